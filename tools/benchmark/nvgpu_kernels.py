"""Times the kernels of a training step that only move memory, through Paddle's operations, and a plain copy.

    python tools/benchmark/nvgpu_kernels.py [--quick]    # CUSTOM_DEVICE_ROOT: with --device cpu the host runtime's

At Llama-3-8B's largest weight and its logits of 8192 tokens. Writes
benchmarks/nvgpu_kernels/<date>_<gpu>x<n>_<what>.json and a table of the same name.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout, installed or not

from tools.benchmark import report, timing  # noqa: E402
from tools.benchmark.layer import free_memory  # noqa: E402
from tools.benchmark.peers import start_on_paddles  # noqa: E402

TOKENS, VOCABULARY, FFN, HIDDEN = 8192, 128256, 28672, 4096
DEFINITIONS = [
    "Each operation again and again, by events on Paddle's stream; median of a round's calls, then of the rounds. "
    "GB/s: of the bytes that it must read and write, each once (cross-entropy: its logits twice).",
]


class Operations:
    """Makes the calls. Each method returns a function that makes the operands and returns the call.

    shrink: divides one axis of each tensor.
    """

    def __init__(self, paddle, shrink):
        self.paddle, self.F, self.ops = paddle, paddle.nn.functional, paddle._C_ops
        self.weight, self.logits = [FFN // shrink, HIDDEN], [TOKENS // shrink, VOCABULARY]
        self.vocabulary = VOCABULARY // shrink

    def tensor(self, shape, dtype="bfloat16"):
        return self.paddle.full(shape, 0.01, dtype)

    def random_weight(self):
        return (self.paddle.randn(self.weight) * 0.01).astype("bfloat16")

    def unary(self, function, shape, dtype="bfloat16"):
        def make():
            x = self.tensor(shape, dtype)
            return lambda: function(x)

        return make

    def multiply_by_one(self):
        x, factor = self.tensor(self.weight), self.tensor([1])
        return lambda: x * factor

    def adamw(self, moments="float32", master_weights="float32"):
        from paddle_te.optimizer.compact_states import keep_compact

        paddle = self.paddle

        def make():
            parameter = paddle.base.framework.EagerParamBase.from_tensor(self.random_weight())
            parameter.stop_gradient = False
            # as in training: where a learning rate or a gradient is 0, a GPU's division takes its slow way
            rate = paddle.optimizer.lr.LambdaDecay(1e-4, lambda step: 1.0)
            optimizer = paddle.optimizer.AdamW(rate, parameters=[parameter], multi_precision=True)
            keep_compact(optimizer, moments, master_weights)
            (parameter * self.random_weight()).sum().backward()
            return optimizer.step

        return make

    def cross_entropy(self, backward):
        def make():
            x, labels = self.tensor(self.logits, "float32"), self.paddle.arange(self.logits[0]).unsqueeze(-1)
            call = lambda: self.F.cross_entropy(x, labels, reduction="none")  # noqa: E731
            return self.gradient(call, x) if backward else call

        return make

    def rms_norm(self, backward):
        def make():
            x, scale = self.tensor(self.weight), self.tensor([HIDDEN])
            call = lambda: self.ops.fused_rms_norm_ext(x, scale, 1e-5)  # noqa: E731
            return self.gradient(lambda: call()[0], x, scale) if backward else call

        return make

    def embedding_grad(self):
        table, ids = self.tensor([self.vocabulary, HIDDEN]), self.paddle.arange(self.logits[0]) % self.vocabulary
        return self.gradient(lambda: self.F.embedding(ids, table), table)

    def gradient(self, function, *inputs):
        """The call of a result's gradients with respect to the inputs."""
        for x in inputs:
            x.stop_gradient = False
        y = function()
        beginning = self.beginning(y, self.paddle.ones_like(y))
        return lambda: self.paddle.grad(beginning, inputs, retain_graph=True)

    def beginning(self, y, grad):
        """A number whose gradient with respect to y is `grad`. paddle.grad(y, …, grad) would copy `grad` first."""
        paddle = self.paddle

        class Beginning(paddle.autograd.PyLayer):
            @staticmethod
            def forward(ctx, y):
                return paddle.zeros([])

            @staticmethod
            def backward(ctx, _):
                return grad

        return Beginning.apply(y)


def operations(paddle, shrink):
    """{name: (bytes, function that makes the call)}. shrink: divides one axis of each tensor."""
    from paddle_te.weights.blocks import row_bytes

    make = Operations(paddle, shrink)
    weight, logits = make.weight, make.logits
    n, m = (shape[0] * shape[1] for shape in (weight, logits))
    in_blocks = 4 * weight[0] * row_bytes(weight[1])  # both moments, read and written
    return {
        "copy, bf16": (4 * n, make.unary(lambda x: x.clone(), weight)),
        "copy, float32": (8 * m, make.unary(lambda x: x.clone(), logits, "float32")),
        "fill, float32": (4 * m, lambda: lambda: paddle.full(logits, 0.5, "float32")),
        "x * factor [1], bf16": (4 * n, make.multiply_by_one),
        "x + x, bf16": (4 * n, make.unary(lambda x: x + x, weight)),
        "x * x, float32": (8 * m, make.unary(lambda x: x * x, logits, "float32")),
        "cast, bf16 to float32": (6 * m, make.unary(lambda x: x.astype("float32"), logits)),
        "cast, float32 to bf16": (6 * m, make.unary(lambda x: x.astype("bfloat16"), logits, "float32")),
        "squared_l2_norm, bf16": (2 * n, make.unary(paddle._C_ops.squared_l2_norm, weight)),
        "sum, float32": (4 * m, make.unary(lambda x: x.sum(), logits, "float32")),
        "AdamW, bf16 with float32 master weights": (28 * n, make.adamw()),
        "AdamW, moments in bf16, remainders": (18 * n, make.adamw("bfloat16", "bf16_remainder")),
        "AdamW, moments in 8 bits, float32 master weights": (12 * n + in_blocks, make.adamw("int8")),
        "AdamW, moments in 8 bits, remainders": (10 * n + in_blocks, make.adamw("int8", "bf16_remainder")),
        "cross-entropy, float32": (12 * m, make.cross_entropy(backward=False)),
        "cross-entropy's gradient, float32": (8 * m, make.cross_entropy(backward=True)),
        "RMSNorm, bf16": (4 * n, make.rms_norm(backward=False)),
        "RMSNorm's gradients, bf16": (6 * n, make.rms_norm(backward=True)),
        "embedding's gradient, bf16": (2 * HIDDEN * (make.vocabulary + 2 * logits[0]), make.embedding_grad),
    }


class Operation:
    """A peer for `timing`."""

    def __init__(self, call, stream):
        self.step, self.stream = call, stream


def measure(arguments, clock):
    """{name: row} of all operations."""
    import paddle

    _, stream, _ = start_on_paddles("cuda")  # nvgpu's host runtime for --device cpu: the CPU has no 16-bit kernels
    rows = {}
    for name, (size, make) in operations(paddle, 512 if arguments.device == "cpu" else 1).items():
        operation = Operation(make(), stream)
        rounds = [
            timing.time_steps(clock, operation, arguments.iterations, arguments.warmup) for _ in range(arguments.rounds)
        ]
        rows[name] = {"status": "ok", "bytes": size, "ms": timing.summarize(rounds)}
        del operation
        free_memory()
    return rows


def markdown(result):
    """The readable table of a result."""
    operations = result["operations"]
    speeds = {name: row["bytes"] / row["ms"]["median"] / 1e6 for name, row in operations.items()}

    def row(name, operation):
        size, share = operation["bytes"] / 1e9, speeds[name] / speeds["copy, float32"]
        return [f"{size:.2f}", f"{operation['ms']['median']:.3f}", f"{speeds[name]:.0f}", f"{share:.0%}"]

    header = ["operation", "GB", "ms", "GB/s", "of a copy's"]
    return "\n".join(report.heading("Kernels that move memory", result) + report.rows(header, operations, row))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing.add_options(parser, "nvgpu_kernels", rounds=3, iterations=20, warmup=3, quick=(1, 3, 1))
    arguments = timing.parse_options(parser, argv)
    result = report.header("nvgpu_kernels", argv, DEFINITIONS)
    result["operations"] = measure(arguments, timing.make_clock(arguments))
    report.finish(result, arguments, "8b", markdown)


if __name__ == "__main__":
    main()
