"""Times steps of decoder layers in fp8 with and without statistics, and says what --fp8_statistics N costs.

    python tools/benchmark/fp8_statistics.py [--layers 8] [--every 50] [--recipes delayed current block]

A step is forward and backward of layers of Llama-3-8B's sizes with 8192 tokens, without optimizer and head. A run has
these as well, so statistics take a smaller share of its steps than the printed one. Prints JSON lines.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout, installed or not

import paddle  # noqa: E402

from paddle_te import fp8  # noqa: E402
from paddle_te.env import training_device  # noqa: E402
from paddle_te.fp8.statistics import Recorder  # noqa: E402
from paddle_te.layers import RotaryPositionEmbedding, TransformerLayer  # noqa: E402

HIDDEN, FFN, HEADS, KV_HEADS, TOKENS = 4096, 14336, 32, 8, 8192
REPETITIONS = 8  # of a step of each kind, by turns


class Layers(paddle.nn.Layer):
    """Decoder layers, one behind the other."""

    def __init__(self, count, hidden, ffn, heads, kv_heads):
        super().__init__()
        sizes = dict(num_gqa_groups=kv_heads, activation="swiglu", normalization="RMSNorm", params_dtype="bfloat16")
        self.layers = paddle.nn.LayerList(
            TransformerLayer(hidden, ffn, heads, backend="transformer_engine", **sizes) for _ in range(count)
        )
        self.angles = RotaryPositionEmbedding(hidden // heads)
        fp8.bind_model(self)

    def forward(self, x):
        angles = self.angles(x.shape[1])
        for layer in self.layers:
            x = layer(x, None, angles)
        return x


def measure(layers, recipe, x, dy, repetitions=REPETITIONS):
    """({False, True: median ms of a step without and with statistics}, how many tensors were counted)."""
    recorder, times, found = Recorder(fp8.name_modules(layers)), {False: [], True: []}, {}
    for repetition in range(-2, repetitions):  # the first two compile and record
        for counted in times:
            paddle.device.synchronize()
            begin = time.perf_counter()
            if counted:
                recorder.begin(recipe)
            with fp8.fp8_autocast(True, recipe):
                layers(x).backward(dy)
            if counted:
                found = recorder.end()
            paddle.device.synchronize()
            if repetition >= 0:
                times[counted].append(1e3 * (time.perf_counter() - begin))
            layers.clear_gradients()
    return {counted: statistics.median(each) for counted, each in times.items()}, len(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--every", type=int, default=50, help="N of --fp8_statistics; default %(default)s")
    parser.add_argument("--recipes", nargs="+", choices=fp8.RECIPES, default=[*fp8.RECIPES])
    args = parser.parse_args()
    paddle.set_device(f"{training_device()}:0")
    paddle.seed(1)
    layers = Layers(args.layers, HIDDEN, FFN, HEADS, KV_HEADS)
    x, dy = (paddle.randn([1, TOKENS, HIDDEN]).astype("bfloat16") for _ in range(2))
    x.stop_gradient = False
    for name in args.recipes:
        times, tensors = measure(layers, fp8.RECIPES[name](), x, dy)
        more = times[True] / times[False] - 1
        line = dict(recipe=name, layers=args.layers, tensors=tensors, step_ms=round(times[False], 2))
        line |= dict(counted_ms=round(times[True], 2), more=round(more, 4), of_all_steps=round(more / args.every, 5))
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
