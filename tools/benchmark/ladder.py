"""The ladder of Transformer Engine's Hugging Face tutorial: what each step from native bf16 to te in fp8 gains.

    python tools/benchmark/ladder.py [--rungs hf_bf16 paddle_te_fp8 ...] [--sizes b8-s256 ...] [--layers 4] [--quick]

Times a stack of Llama-2-7B decoder layers at the tutorial's batch 8, sequence 256, and at sequence 4096; all rungs in
one process, taking turns. Writes benchmarks/ladder/<date>_<gpu>x<n>_<what>.json and a table of the same name. A rung
that is not there or fails keeps its row, with the reason.
"""

import argparse
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout, installed or not

from tools.benchmark import report, timing  # noqa: E402
from tools.benchmark.layer import Contest, free_memory, run_sizes, sizes_in_words  # noqa: E402
from tools.benchmark.peers import HuggingFace, PaddleTE, Peer, TETorch, exact_results  # noqa: E402
from tools.benchmark.problem import SIZES as LAYER_SIZES  # noqa: E402
from tools.benchmark.problem import Problem  # noqa: E402

LLAMA_7B = LAYER_SIZES["7b-b1"]
SIZES = {"b8-s256": replace(LLAMA_7B, batch=8, sequence=256), "b1-s4096": LLAMA_7B, "b2-s4096": LAYER_SIZES["7b-b2"]}
DEFINITIONS = [
    "Time: forward and backward of the stack of decoder layers, gradients cleared before, by events on the rung's own "
    "stream; median of a round's steps, then the median and range of the rounds' medians. Rungs take turns within each "
    "round. Embedding, lm_head, loss and optimizer, which are the same on every rung, are left out; the tutorial's own "
    "times have them in.",
    "Peak GB: greatest count of the framework's own allocator in a step, above its count before the stack was built.",
    "Error: relative L2 distance of output and input gradient from the same stack in float32 PyTorch.",
    "× native: against the first rung of the same framework. PaddleNLP's layer has its default options, so plain "
    "attention, norm and rope; on a device of nvgpu its kernels are the plug-in's, not paddlepaddle-gpu's.",
]


class HuggingFaceTELinear(HuggingFace):
    """transformers' LlamaDecoderLayer, its Linear layers replaced by Transformer Engine's, in fp8 delayed scaling."""

    precision = "fp8_delayed"

    def __init__(self, problem, **options):
        super().__init__(problem, **options)
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import DelayedScaling

        self.scope = lambda: te.autocast(enabled=True, recipe=DelayedScaling())
        for parent in (self.layer.self_attn, self.layer.mlp):
            for name, linear in list(parent.named_children()):
                if isinstance(linear, self.torch.nn.Linear):
                    sizes = linear.in_features, linear.out_features
                    replaced = te.Linear(*sizes, bias=False, params_dtype=self.dtype, device=self.device)
                    replaced.weight = linear.weight
                    setattr(parent, name, replaced)
        self.module_parameters = list(self.layer.parameters())

    def forward(self):
        with self.scope():
            return super().forward()


class PaddleNLP(PaddleTE):
    """PaddleNLP's own LlamaDecoderLayer on Paddle's device; te_linear: with this project's Linear inside."""

    def __init__(self, problem, te_linear=False, **options):
        self.te_linear = te_linear
        super().__init__(problem, **options)

    def build(self, problem, backend, fuse_wgrad):
        from paddlenlp.transformers import LlamaConfig
        from paddlenlp.transformers.llama.modeling import LlamaDecoderLayer

        paddle, dims = self.paddle, self.dims
        config = LlamaConfig(**dims.config, seq_length=dims.sequence)
        kept = paddle.get_default_dtype()
        paddle.set_default_dtype(self.dtype)
        try:
            self.layer = LlamaDecoderLayer(config)
            self._load(problem, backend)
        finally:
            paddle.set_default_dtype(kept)
        self.module_parameters = self.layer.parameters()
        self.positions = paddle.arange(dims.sequence).unsqueeze(0).expand([dims.batch, dims.sequence])
        mask = paddle.triu(paddle.full([dims.sequence, dims.sequence], -3e4, "float32"), diagonal=1).astype(self.dtype)
        self.mask = mask.expand([dims.batch, 1, dims.sequence, dims.sequence])

    def _load(self, problem, backend):
        dims, layer, kv = self.dims, self.layer, self.dims.kv_heads * self.dims.head_dim
        layer.input_layernorm.weight.set_value(self._array(problem.weights["ln1"]))
        layer.post_attention_layernorm.weight.set_value(self._array(problem.weights["ln2"]))
        parts = {  # one of our fused weights is several of theirs, stacked on out
            "qkv": (layer.self_attn, {"q_proj": dims.hidden, "k_proj": kv, "v_proj": kv}),
            "proj": (layer.self_attn, {"o_proj": dims.hidden}),
            "fc1": (layer.mlp, {"gate_proj": dims.ffn, "up_proj": dims.ffn}),
            "fc2": (layer.mlp, {"down_proj": dims.hidden}),
        }
        for name, (parent, sizes) in parts.items():
            bits, start = problem.weights[name], 0
            for part, rows in sizes.items():
                weight = bits[start : start + rows]
                start += rows
                if self.te_linear:
                    self._replace(parent, part, weight.shape, backend)
                else:
                    weight = weight.T.copy()  # Paddle's are [in, out]
                getattr(parent, part).weight.set_value(self._array(weight))

    def _replace(self, parent, part, shape, backend):
        from paddle_te.layers import Linear

        zeros = self.paddle.nn.initializer.Constant(0.0)
        setattr(parent, part, Linear(*shape[::-1], init_method=zeros, params_dtype=self.dtype, backend=backend))

    def forward(self):
        with self.scope():
            return self.layer(self.x, self.positions, self.mask)


class Stack(Peer):
    """Layers of one kind, the output of each the input of the next; fp8's scope is around them all, as in a model."""

    def __init__(self, problem, make, layers, **options):
        self.members = [make(problem, **options) for _ in range(layers)]
        head = self.members[0]
        for member in self.members[1:]:
            member.x = member.dy = None  # the first one's serve
        self.x, self.stream, self.precision = head.x, head.stream, head.precision
        self.before = getattr(head, "before", None)
        self.reset_peak, self.peak, self.backward = head.reset_peak, head.peak, head.backward
        self.module_parameters = [parameter for member in self.members for parameter in member.module_parameters]

    def forward(self):
        y = self.x
        with self.members[0].scope():
            for member in self.members:
                member.x = y
                y = member.forward()
        for member in self.members[1:]:
            member.x = None  # or this step's activations would live into the next
        return y

    def results(self):
        self.release()
        y = self.forward()
        self.backward(y)
        to_torch = self.members[0].to_torch
        return {"y": to_torch(y), "dx": to_torch(self.x.grad)}


FP8 = "fp8_delayed"
# name: (layer, what it is). The first of each framework is its native one.
RUNGS = {
    "hf_bf16": (HuggingFace, "Hugging Face's layer, SDPA (PyTorch)"),
    "hf_te_linear_fp8": (HuggingFaceTELinear, "the same, Linear by TE's PyTorch Linear, fp8"),
    "te_torch_bf16": (TETorch, "TE's PyTorch TransformerLayer, bf16"),
    "te_torch_fp8": (partial(TETorch, precision=FP8), "TE's PyTorch TransformerLayer, fp8"),
    "paddlenlp_bf16": (PaddleNLP, "native: PaddleNLP's layer, bf16"),
    "paddlenlp_te_linear_fp8": (partial(PaddleNLP, te_linear=True, precision=FP8), "the same, Linear by te's, fp8"),
    "paddle_te_bf16": (PaddleTE, "te: the whole layer, bf16"),
    "paddle_te_fp8": (partial(PaddleTE, precision=FP8), "te: the whole layer, fp8"),
}
NATIVE = {True: "hf_bf16", False: "paddlenlp_bf16"}


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rungs", nargs="+", choices=RUNGS, default=list(RUNGS), metavar="NAME", help=", ".join(RUNGS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), metavar="NAME", help=", ".join(SIZES))
    parser.add_argument("--layers", type=int, default=4, help="in the stack (Llama-2-7B has 32)")
    timing.add_options(parser, "ladder", rounds=5, iterations=10, warmup=2, quick=(2, 3, 1))
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    return timing.parse_options(parser, argv, ["layers"])


def float32_results(problem, arguments):
    """exact_results of the stack."""
    return exact_results(lambda exact: Stack(problem, exact, arguments.layers, device=arguments.device))


def run_size(arguments, clock, dims):
    """{"dims", "flops", "peers": {rung: row}} of one size."""
    problem = Problem(dims, arguments.seed)
    makers = {name: partial(Stack, make=RUNGS[name][0], layers=arguments.layers) for name in arguments.rungs}
    contest = Contest(problem, arguments, makers)
    reference = float32_results(problem, arguments)
    free_memory()
    for name in arguments.rungs:
        if contest.build(name):
            contest.check(name, reference)
    del reference
    free_memory()
    contest.time(clock, "step_ms", timing.time_steps)
    return {"dims": asdict(dims), "flops": dims.flops * arguments.layers, "peers": contest.rows}


def markdown(result):
    """The readable table of a result."""
    layers = result["settings"]["layers"]
    lines = report.heading(f"The ladder, {layers} decoder layers of Llama-2-7B, forward + backward", result)
    for name, size in result["sizes"].items():
        lines += [f"## {name}: {report.describe(size['dims'])}", "", *_table(size, layers)]
    return "\n".join(lines)


def _table(size, layers):
    peers = size["peers"]

    def times(name, reference):
        other = peers.get(reference, {})
        return f"{other['step_ms']['median'] / peers[name]['step_ms']['median']:.2f}" if "step_ms" in other else ""

    def row(name, peer):
        step, error = peer["step_ms"], peer["error"]
        limit = report.ERROR_LIMITS[peer["precision"]] * layers**0.5  # a layer's roundings do not know the others'
        wrong = error and not all(value <= limit for value in error.values())
        return [
            RUNGS[name][1],
            f"{step['median']:.2f}",
            f"{step['min']:.2f} to {step['max']:.2f}",
            times(name, NATIVE[name.startswith(("hf", "te_torch"))]),
            times(name, "hf_bf16"),
            "" if peer["peak_bytes"] is None else f"{peer['peak_bytes'] / 1e9:.2f}",
            f"{'**WRONG** ' * bool(wrong)}{error['y']:.4f} / {error['dx']:.4f}" if error else "not measured",
        ]

    header = ["", "what", "ms", "over rounds", "× native", "× HF", "peak GB", "error y / dx"]
    return report.rows(header, peers, row)


def main(argv=None):
    arguments = parse_arguments(argv)
    clock = timing.make_clock(arguments)
    result = report.header("ladder", argv, DEFINITIONS) | {
        "settings": {name: getattr(arguments, name) for name in ("layers", "rounds", "iterations", "warmup", "seed")},
    }
    path = report.destination(result, arguments, sizes_in_words(arguments.sizes, SIZES))
    return run_sizes(result, arguments, lambda name: run_size(arguments, clock, SIZES[name]), path, markdown)


if __name__ == "__main__":
    sys.exit(main())
