"""One rank of a test of the nvgpu plug-in: python ranks.py MODE [ARGUMENT]; started by test_plugin.py."""

import os
import resource
import sys
import time

import numpy as np
import paddle
import paddle.distributed as dist

RANK, SIZE = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])


def values(dtype, count, rank):
    """Small whole numbers, so that sums and products are exact in every type."""
    return np.random.RandomState(1000 + rank).randint(0, 3, count).astype("float32"), dtype


def tensor(dtype, count, rank=RANK):
    numbers, dtype = values(dtype, count, rank)
    return paddle.to_tensor(numbers).astype(dtype)


def numbers(t):
    return t.astype("float32").numpy()


def expect(got, want, what):
    np.testing.assert_array_equal(got if isinstance(got, np.ndarray) else numbers(got), want, err_msg=what)


def everyone(dtype, count):
    return np.stack([values(dtype, count, rank)[0] for rank in range(SIZE)])


def check_reductions(dtype, count):
    all_ranks = everyone(dtype, count)
    for op, reduce in (
        (dist.ReduceOp.SUM, np.sum),
        (dist.ReduceOp.MAX, np.max),
        (dist.ReduceOp.MIN, np.min),
        (dist.ReduceOp.PROD, np.prod),
    ):
        x = tensor(dtype, count)
        dist.all_reduce(x, op=op)
        expect(x, reduce(all_ranks, axis=0), f"all_reduce {op} {dtype} {count}")
    out = paddle.zeros([count // SIZE], dtype)
    dist.reduce_scatter(out, list(paddle.split(tensor(dtype, count), SIZE)))
    share = slice(RANK * (count // SIZE), (RANK + 1) * (count // SIZE))
    expect(out, all_ranks.sum(0)[share], f"reduce_scatter {dtype} {count}")
    x = tensor(dtype, count)
    dist.reduce(x, dst=1)
    if RANK == 1:
        expect(x, all_ranks.sum(0), f"reduce {dtype} {count}")


def check_moves(dtype, count):
    all_ranks = everyone(dtype, count)
    x = tensor(dtype, count)
    dist.broadcast(x, src=1)
    expect(x, all_ranks[1], f"broadcast {dtype} {count}")
    parts = []
    dist.all_gather(parts, tensor(dtype, count))
    expect(np.stack([numbers(p) for p in parts]), all_ranks, f"all_gather {dtype} {count}")
    got = []
    dist.alltoall(got, list(paddle.split(tensor(dtype, count), SIZE)))
    share = slice(RANK * (count // SIZE), (RANK + 1) * (count // SIZE))
    expect(np.stack([numbers(g) for g in got]), all_ranks[:, share], f"alltoall {dtype} {count}")
    # in a ring, all at once: everybody sends before it receives
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    shifted = paddle.zeros([count], dtype)
    sent, received = ([count if rank == peer else 0 for rank in range(SIZE)] for peer in (after, before))
    parts = dict(out_split_sizes=received, in_split_sizes=sent)
    dist.stream.alltoall_single(shifted, tensor(dtype, count), **parts, sync_op=False).wait()
    expect(shifted, all_ranks[before], f"alltoall of unequal parts {dtype} {count}")
    y = paddle.zeros([count], dtype)
    transfers = [dist.P2POp(dist.isend, tensor(dtype, count), after), dist.P2POp(dist.irecv, y, before)]
    for task in dist.batch_isend_irecv(transfers):
        task.wait()
    expect(y, all_ranks[before], f"isend and irecv {dtype} {count}")
    if RANK == 0:
        dist.send(tensor(dtype, count), dst=SIZE - 1)
    elif RANK == SIZE - 1:
        dist.recv(y, src=0)
        expect(y, all_ranks[0], f"send and recv {dtype} {count}")


def check_cross_entropy(dtype, tolerance):
    """Over classes that the ranks share: the last row's label is ignored, the two before are no class: NaN there."""
    from paddle.distributed.fleet.layers.mpu.mp_ops import _c_softmax_with_cross_entropy

    labels = np.array([0, 2 * SIZE, 5 * SIZE - 1, -1, 5 * SIZE, -100])
    logits = numbers(tensor(dtype, len(labels) * 5 * SIZE, rank=0)).reshape(len(labels), -1)
    mine = slice(RANK * 5, (RANK + 1) * 5)
    x = paddle.to_tensor(logits[:, mine]).astype(dtype)
    x.stop_gradient = False
    loss = _c_softmax_with_cross_entropy(x, paddle.to_tensor(labels[:, None]), ignore_index=-100)
    loss.sum().backward()
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    want = [-np.log(p[row, label]) for row, label in enumerate(labels[:3])] + [np.nan, np.nan, 0]
    np.testing.assert_allclose(numbers(loss).ravel(), want, rtol=tolerance, atol=tolerance)
    p[range(3), labels[:3]] -= 1
    p[3:5], p[5] = np.nan, 0
    np.testing.assert_allclose(numbers(x.grad), p[:, mine], rtol=tolerance, atol=tolerance)


def check_averages(dtype, count):
    """paddle_te's repair, which hands ReduceOp.AVG to the plug-in; a mean of SIZE times as much is a sum."""
    all_ranks = everyone(dtype, count).sum(0)
    x = SIZE * tensor(dtype, count)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    expect(x, all_ranks, f"averaging all_reduce {dtype} {count}")
    x = SIZE * tensor(dtype, count)
    dist.reduce(x, dst=1, op=dist.ReduceOp.AVG)
    if RANK == 1:
        expect(x, all_ranks, f"averaging reduce {dtype} {count}")
    out = paddle.zeros([count // SIZE], dtype)
    dist.reduce_scatter(out, SIZE * tensor(dtype, count), op=dist.ReduceOp.AVG, sync_op=False).wait()
    expect(out, all_ranks[RANK * out.size : (RANK + 1) * out.size], f"averaging reduce_scatter {dtype} {count}")
    x = tensor(dtype, count)
    dist.all_reduce(x)
    expect(x, all_ranks, f"all_reduce after averages {dtype} {count}")


def collectives():
    check_cross_entropy("float32", 1e-5)
    check_cross_entropy("bfloat16", 1e-2)
    large = 6 * 450_000  # several pieces of the shared memory
    for dtype in ("float32", "bfloat16", "float16", "int32", "int64", "uint8", "float64"):
        check_reductions(dtype, 12)
        check_moves(dtype, 12)
    check_reductions("bfloat16", large)
    check_moves("float32", large)
    from paddle_te.upstream import averages

    averages.apply()
    for dtype in ("float32", "bfloat16", "float16"):
        check_averages(dtype, 12)
    check_averages("float32", large)
    pair = dist.new_group([0, SIZE - 1])
    if RANK in (0, SIZE - 1):
        x = paddle.to_tensor([1.0 + RANK])
        dist.all_reduce(x, group=pair)
        expect(x, [1.0 + SIZE], "all_reduce in a group")
    average = paddle.to_tensor([float(RANK)])
    dist.all_reduce(average, sync_op=False).wait()
    expect(average, [sum(range(SIZE))], "all_reduce without sync")
    objects = []
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": r} for r in range(SIZE)]
    dist.barrier()


def ring():
    """Everybody sends 1 GiB (1 MiB on the host runtime) on the computing stream, then receives, as in an interleaved
    pipeline; done 20 times."""
    from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication as p2p

    from paddle_te import device
    from paddle_te.upstream import pipeline_transfers

    pipeline_transfers.apply()
    count = (1 << 18) if device.nvgpu_library().endswith("libnvgpu_host.so") else (1 << 28)
    group, after, before = dist.collective._get_default_group(), (RANK + 1) % SIZE, (RANK - 1) % SIZE
    dist.all_reduce(paddle.ones([1]))  # makes the communicator, which cannot be done within a group
    y = paddle.empty([count])
    for step in range(20):
        x = paddle.full([count], float(step * SIZE + RANK))
        p2p.batch_send_recv_on_calc_stream(
            [
                p2p.P2PonCalcStream(p2p._send_on_calc_stream, x, after, group),
                p2p.P2PonCalcStream(p2p._recv_on_calc_stream, y, before, group),
            ]
        )
        assert float(y.min()) == float(y.max()) == step * SIZE + before, f"step {step}"


class Batches(paddle.io.Dataset):
    def __len__(self):
        return 1500

    def __getitem__(self, index):
        return np.full(4096, index, "float32")


def race():
    """A data loader's thread waits for the stream now and then; what is received is still waited for by the others."""
    for step, _ in enumerate(paddle.io.DataLoader(Batches(), batch_size=1, use_buffer_reader=True)):
        x = paddle.full([1024], -1.0)
        if RANK == 1:
            time.sleep(0.0005 * (step % 12))
            dist.send(paddle.full([1024], float(step)), dst=0)
        elif RANK == 0:
            dist.recv(x, src=1)
            y = x * 1  # a kernel, which must wait
            assert float(y.min()) == step, f"step {step}: {numbers(y)}"


def die():
    """Rank 1 dies between two collectives; the others must be told so."""
    x = paddle.ones([4])
    dist.all_reduce(x)
    paddle.device.synchronize()
    if RANK == 1:
        os.kill(os.getpid(), 9)
    start = time.time()
    try:
        dist.all_reduce(x)
        print("got", numbers(x))
    except Exception as error:  # noqa: BLE001 whatever Paddle makes of it
        print(f"FAILED after {time.time() - start:.1f} s: {type(error).__name__}", flush=True)
        os._exit(3)


def wait():
    """Rank 1 comes three seconds late; rank 0 must not burn a core until then."""
    x = paddle.ones([4])
    dist.all_reduce(x)
    paddle.device.synchronize()
    used = resource.getrusage(resource.RUSAGE_SELF)
    if RANK == 1:
        time.sleep(3)
    dist.all_reduce(x)
    paddle.device.synchronize()
    now = resource.getrusage(resource.RUSAGE_SELF)
    print(f"CPU {now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime:.3f}", flush=True)


def main():
    paddle.set_device(f"nvgpu:{RANK}")
    dist.init_parallel_env()
    {"collectives": collectives, "ring": ring, "race": race, "die": die, "wait": wait}[sys.argv[1]]()
    print(f"RANK {RANK} DONE", flush=True)


if __name__ == "__main__":
    main()
