"""One process of `paddle-te selftest`: collectives over all devices; rank 0 writes {name: relative error} to argv[1].

Whole numbers are added, which bf16 and float32 have exactly, so that any difference is an error.
"""

import json
import sys

import paddle
import paddle.distributed as dist

SIZE = 1 << 16


def errors() -> dict[str, float]:
    """Return {collective and dtype: greatest absolute difference from what it must be}."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for dtype in ("float32", "bfloat16"):
        mine = paddle.full([SIZE], rank + 1.0, dtype)
        total = mine.clone()
        dist.all_reduce(total)
        gathered: list[paddle.Tensor] = []
        dist.all_gather(gathered, mine)
        part = paddle.zeros([SIZE // world], dtype)
        parts = paddle.concat([mine[: SIZE // world]] * world)
        dist.reduce_scatter(part, parts)  # type: ignore[arg-type]  # Paddle takes one tensor, too
        sent = mine.clone()
        dist.broadcast(sent, src=world - 1)
        want = world * (world + 1) / 2
        results = {"all_reduce": [(total, want)], "reduce_scatter": [(part, want)], "broadcast": [(sent, float(world))]}
        results["all_gather"] = [(tensor, number + 1.0) for number, tensor in enumerate(gathered)]
        for name, pairs in results.items():
            found[f"{name} in {dtype}"] = max(float((got.cast("float32") - right).abs().max()) for got, right in pairs)
    return found


def main() -> None:
    dist.init_parallel_env()
    every: list[dict[str, float]] = []
    dist.all_gather_object(every, errors())
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w") as file:
            json.dump({name: max(found[name] for found in every) for name in every[0]}, file)


if __name__ == "__main__":
    main()
