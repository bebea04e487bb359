"""One rank of two that share a layer's weights and tokens; started by test_tp_comm_overlap.py.

A layer whose forward gathers and scatters in chunks, beside one that does so at once: the same bits. te's kernels are
emulated. "OK" at the end.
"""

import sys
from contextlib import contextmanager

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet

from paddle_te import fp8
from paddle_te.distributed import fp8_group, recompute
from paddle_te.layers import RotaryPositionEmbedding, TransformerLayer
from tests import emulated_te

HIDDEN, FFN, HEADS, KV_HEADS, TOKENS = 64, 96, 4, 2, 128
STEPS = 2  # of delayed scaling the first one has the tensors' own scales
RECIPES = {
    "bf16": None,
    "delayed": fp8.DelayedScaling(amax_history_len=2),
    "current": fp8.Float8CurrentScaling(),
}
RECOMPUTED = {
    "nothing": {},
    "parts": dict(recompute_modules=("layernorm", "mlp")),
    "all": {},
}


def start():
    paddle.set_device("nvgpu")
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = dict(dp_degree=1, mp_degree=2, pp_degree=1)
    fleet.init(is_collective=True, strategy=strategy)


@contextmanager
def collectives():
    """Yields [(name, rows of what is sent, whether it is on the communication stream)] of those called meanwhile."""
    found, names = [], ("all_gather", "reduce_scatter")
    originals = {name: getattr(dist.stream, name) for name in names}

    def watched(name):
        def call(result, source, *args, sync_op=True, use_calc_stream=False, **kwargs):
            found.append((name, source.shape[0], not sync_op and not use_calc_stream))
            return originals[name](result, source, *args, sync_op=sync_op, use_calc_stream=use_calc_stream, **kwargs)

        return call

    for name in names:
        setattr(dist.stream, name, watched(name))
    yield found
    for name in names:
        setattr(dist.stream, name, originals[name])


def train(seed, recipe, recomputed, chunks):
    """({name: array} of outputs and gradients of two steps, the collectives of the last forward)."""
    layer = TransformerLayer(
        HIDDEN,
        FFN,
        HEADS,
        KV_HEADS,
        max_sequence_length=TOKENS,
        set_parallel_mode=True,
        sequence_parallel=True,
        params_dtype="bfloat16",
        tp_comm_overlap=chunks,
        **RECOMPUTED[recomputed],
    )
    generator = np.random.default_rng([seed, dist.get_rank()])

    def draw(shape, factor=1.0):
        return paddle.to_tensor(factor * generator.standard_normal(shape, "float32")).astype("bfloat16")

    for parameter in layer.parameters():
        parameter.set_value(draw(parameter.shape, 0.2))
    results, angles = {}, RotaryPositionEmbedding(HIDDEN // HEADS)(TOKENS)
    for step in range(STEPS):
        x, dy = draw([TOKENS, HIDDEN]), draw([TOKENS, HIDDEN])  # of two sequences this rank's half
        x.stop_gradient = False
        with collectives() as found, fp8.fp8_autocast(recipe is not None, recipe, fp8_group()):
            y = recompute(layer, x, None, angles) if recomputed == "all" else layer(x, None, angles)
        y.backward(dy)
        results |= {f"y {step}": y, f"dx {step}": x.grad}
        results |= {f"{name} {step}": p.grad.clone() for name, p in layer.named_parameters()}
        layer.clear_gradients()
    return {name: value.astype("float32").numpy() for name, value in results.items()}, found


def check(seed, name, recomputed):
    recipe = RECIPES[name]
    want, at_once = train(seed, recipe, recomputed, 0)
    of_attention_and_mlp = 2
    assert at_once == of_attention_and_mlp * [("all_gather", TOKENS, False), ("reduce_scatter", 2 * TOKENS, False)]
    for chunks in (1, 2, 4):
        got, found = train(seed, recipe, recomputed, chunks)
        for key, value in want.items():
            assert np.array_equal(got[key], value), (name, recomputed, chunks, key)
        of_half = [("all_gather", TOKENS // chunks, True)] * chunks
        of_half += [("reduce_scatter", 2 * TOKENS // chunks, True)] * chunks
        assert found == of_attention_and_mlp * of_half, found
    return want


def main():
    start()
    emulated_te.install()
    emulated_te.product = emulated_te.exact_product
    seed = int(sys.argv[1])
    results = [check(seed, name, recomputed) for name in RECIPES for recomputed in RECOMPUTED]
    assert all(np.isfinite(value).all() and value.any() for found in results for value in found.values())
    print("OK")


main()
