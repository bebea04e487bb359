"""Two tensor parallel ranks in one process, for te's ops: each rank is a thread, of which one runs at a time, until it
comes to a collective."""

import contextlib
import threading

import numpy as np
import paddle

from paddle_te import fp8
from paddle_te.distributed import Pending, TensorParallel
from paddle_te.layers import RotaryPositionEmbedding, TransformerLayer, base, stored_weights

# 128, for block scaling, divides each rank's
HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 256, 256, 16, 8, 16
BATCH, TOKENS, RANKS = 2, 128, 2
STACKED = {
    "self_attention.layernorm_qkv.weight": [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM],
    "self_attention.layernorm_qkv.bias": [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM],
    "self_attention.q_norm.weight": [HEADS * HEAD_DIM],
    "self_attention.k_norm.weight": [KV_HEADS * HEAD_DIM],
    "self_attention.core_attention.softmax_offset": [HEADS],
    "layernorm_mlp.fc1_weight": [FFN, FFN],
    "layernorm_mlp.fc1_bias": [FFN, FFN],
}
NORM = dict(qk_norm_type="RMSNorm", qk_norm_before_rope=True)
LAYERS = {
    "llama": dict(add_qkv_bias=True),
    "gpt": dict(bias=True, normalization="LayerNorm", activation="geglu"),
    "olmo2": dict(norms="after", qk_norm_over="all", **NORM),
    "glm4": dict(norms="both", add_qkv_bias=True, rotary_pos_interleaved=True),
    "gemma3": dict(
        norms="both", zero_centered_gamma=True, qk_norm_zero_centered_gamma=True, activation="geglu",
        window_size=(31, 0), **NORM,
    ),
    "gpt_oss": dict(bias=True, softmax_type="learnable", window_size=(31, 0)),
}  # fmt: skip
DELAYED = fp8.DelayedScaling(amax_history_len=2, first_step="delayed")
BLOCK = fp8.Float8BlockScaling()
RECIPES = {"bf16": None, "delayed": DELAYED, "current": fp8.Float8CurrentScaling(), "block": BLOCK}
ROW_PARALLEL = ("self_attention.proj.weight", "layernorm_mlp.fc2_weight")


def total(tensors):
    """The sum in float32, rounded once: Paddle adds no bfloat16 on the CPU."""
    return sum(tensor.astype("float32") for tensor in tensors).astype(tensors[0].dtype)


class Group:
    """What a paddle.distributed group is to TensorParallel and to fp8."""

    def __init__(self, nranks):
        self.nranks, self.ranks = nranks, list(range(nranks))
        self._turn, self._barrier, self._values = threading.Lock(), threading.Barrier(nranks, timeout=60), {}
        self.gathered, self.events = [], [[] for _ in self.ranks]

    def exchange(self, rank, x):
        """Every rank's x."""
        self._values[rank] = x
        self._turn.release()
        self._barrier.wait()
        values = [self._values[other] for other in self.ranks]
        self._barrier.wait()
        self._turn.acquire()
        return values

    def take_greatest(self, x, op=None, group=None):
        """Stands in for paddle.distributed.all_reduce of amaxes, in a rank's thread."""
        assert group is self
        paddle.assign(paddle.stack(self.exchange(int(threading.current_thread().name), x.clone())).max(0), x)

    def add(self, x, op=None, group=None):
        """As `take_greatest`, of sums."""
        assert group is self
        paddle.assign(total(self.exchange(int(threading.current_thread().name), x.clone())), x)

    def run(self, function):
        """[function(rank)] of all ranks."""
        results, device = {}, paddle.get_device()

        def main(rank):
            paddle.set_device(device)  # a thread begins with none
            try:
                with self._turn:
                    results[rank] = function(rank)
            except BaseException:
                self._barrier.abort()
                raise

        threads = [threading.Thread(target=main, args=(rank,), name=str(rank)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[rank] for rank in self.ranks]


class Late(Pending):
    """A collective whose result is NaN until `wait`. note: a function of what happens."""

    def __init__(self, arrived, note, what):
        super().__init__(paddle.full(arrived.shape, 255 if arrived.dtype is paddle.uint8 else np.nan, arrived.dtype))
        self._arrived, self._note = arrived, note
        note(f"start {what}")

    def wait(self):
        self._note("finish")
        return paddle.assign(self._arrived, self.result)


class Rank(TensorParallel):
    def all_reduce(self, x):
        return paddle.assign(total(self.group.exchange(self.rank, x.clone())), x)

    def all_gather(self, x):
        self.group.gathered.append(x.dtype)
        return paddle.concat(self.group.exchange(self.rank, x))

    def reduce_scatter(self, x):
        return total(self.group.exchange(self.rank, x)).split(self.size)[self.rank].clone()

    def all_to_all(self, x, sent=None, received=None):
        splits = sent or [x.shape[0] // self.size] * self.size
        parts = self.group.exchange(self.rank, x.split(splits) if sum(splits) else [x] * self.size)
        mine = paddle.concat([part[self.rank] for part in parts])
        assert received is None or mine.shape[0] == sum(received)
        return mine

    def start_all_gather(self, x):
        return Late(self.all_gather(x), self.note, "all_gather")

    def start_reduce_output(self, y):
        return Late(self.reduce_output(y), self.note, "reduce_output")

    def start_exchange(self, x):
        rows = [0 if rank == self.rank else x.shape[0] // (self.size - 1) for rank in self.group.ranks]
        return Late(self.all_to_all(x, rows, rows), self.note, "exchange")

    def note(self, event):
        """Add to what the rank does, in order."""
        self.group.events[self.rank].append(event)


def make(monkeypatch, tp=None, **options):
    monkeypatch.setattr(TensorParallel, "from_fleet", lambda sequence_parallel=False: tp)
    monkeypatch.setattr(base, "get_rng_state_tracker", lambda: paddle.nn.Layer)
    monkeypatch.setattr(paddle.nn.Layer, "rng_state", contextlib.nullcontext, raising=False)
    options |= dict(set_parallel_mode=tp is not None, sequence_parallel=tp is not None and tp.sequence_parallel)
    return TransformerLayer(
        HIDDEN, FFN, HEADS, KV_HEADS, max_sequence_length=TOKENS, params_dtype="bfloat16", **options
    )


def share(name, value, rank):
    """A rank's part of a weight; the norms of each head, of which no rank has a part, are whole."""
    if name in STACKED and len(value) == sum(STACKED[name]):
        parts = np.split(value, np.cumsum(STACKED[name])[:-1])
        return np.concatenate([np.split(part, RANKS)[rank] for part in parts])
    return np.split(value, RANKS, 1)[rank] if name in ROW_PARALLEL else value


def train(layer, values, x, dy, recipe, group):
    """{name: float32 array} of the output and all gradients of one step."""
    in_fp8 = stored_weights(paddle.nn.LayerList([layer]))
    for name, parameter in layer.named_parameters():
        value = paddle.to_tensor(values[name]).astype("bfloat16")
        if f"0.{name}" in in_fp8:
            owner, weight = in_fp8[f"0.{name}"]
            owner.store_weight(weight, value)
        else:
            parameter.set_value(value)
    x, dy = (paddle.to_tensor(array).astype("bfloat16").detach() for array in (x, dy))
    x.stop_gradient = False
    with fp8.fp8_autocast(recipe is not None, recipe, group):
        y = layer(x, None, RotaryPositionEmbedding(HEAD_DIM)(TOKENS))
    y.backward(dy)
    gradients = {
        n: p.grad if getattr(p, "main_grad", None) is None else p.main_grad
        for n, p in layer.named_parameters()
        if f"0.{n}" not in in_fp8
    }
    return {name: value.astype("float32").numpy() for name, value in {"y": y, "x": x.grad, **gradients}.items()}


def train_ranks(monkeypatch, group, sequence_parallel, values, x, dy, recipe, options):
    """[what `train` returns] of each rank."""
    ranks = [Rank(group, rank, RANKS, sequence_parallel) for rank in group.ranks]
    layers = [make(monkeypatch, rank, fuse_wgrad_accumulation=True, **options) for rank in ranks]

    def run(rank):
        mine = {name: share(name, value, rank) for name, value in values.items()}
        part = lambda array: np.split(array.reshape(-1, HIDDEN), RANKS)[rank] if sequence_parallel else array  # noqa: E731
        return train(layers[rank], mine, part(x), part(dy), recipe, group)

    return group.run(run)


def draw_case(seed, layer):
    """(a layer's weights by name, x, dy)."""
    draw = np.random.default_rng(seed).standard_normal
    values = {name: draw(p.shape, "float32") * (0.1 if p.ndim == 2 else 1) for name, p in layer.named_parameters()}
    return values, draw([BATCH, TOKENS, HIDDEN], "float32"), draw([BATCH, TOKENS, HIDDEN], "float32")
