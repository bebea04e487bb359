"""Trains layers of experts on nvgpu's host runtime, te's on the emulated library: python moe.py KIND...

Prints "STEP KIND" and "END KIND" to stderr around a step that has been recorded before.
"""

import os
import sys

import paddle

from paddle_te.layers.moe import MoEConfig, MoELayer
from tests import emulated_te
from tests.moe_te_cases import CONFIGS, HIDDEN, SIZES, TOKENS


def say(*words):
    paddle.device.synchronize()
    print(*words, file=sys.stderr, flush=True)


def main(kinds):
    paddle.set_device("nvgpu:0")
    emulated_te.install()
    for kind in kinds:
        layer = MoELayer(MoEConfig(**SIZES | CONFIGS[kind], params_dtype="bfloat16"))
        for step in range(2):
            if step:
                say("STEP", kind)
            x = paddle.ones([2, TOKENS, HIDDEN], "bfloat16")
            x.stop_gradient = False
            layer(x).sum().backward()
        say("END", kind)


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # Paddle aborts where a process with GLOG_vmodule exits
