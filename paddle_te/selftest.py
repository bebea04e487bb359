"""Check the numbers of this machine in about a minute: `paddle-te selftest [--report FILE]`.

On an NVIDIA GPU each layer of Transformer Engine (te), forward and backward, in bf16 and fp8, is compared with the same
layer in plain Paddle (pd) in float32 on the CPU; its error may be little above the one that the precision itself makes,
which pd shows. Everywhere pd in float32 is compared with pd in float64. Then all GPUs add, gather and scatter numbers
whose sums are known, and one layer is timed. What could not be tested is said, with the reason.

Exit status: 0; 1 where a number is off, which is named, or FILE cannot be written after all; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle

from paddle_te import device, env, fp8, layers
from paddle_te.options.option import SEED
from paddle_te.outputs import NotWritten, file_argument, write_file
from paddle_te.table import in_columns

HIDDEN, FFN, HEADS, KV_HEADS, BATCH, SEQUENCE = 256, 448, 4, 2, 2, 64
Array: TypeAlias = npt.NDArray[Any]  # of floats
Dtype: TypeAlias = Literal["float32", "float64", "bfloat16"]
TE, PD = "transformer_engine", "paddle"
COLLECTIVES = Path(__file__).parent / "scripts/check_collectives.py"
COLLECTIVES_SECONDS = 120
STEPS = 3  # of which the last is compared: delayed scaling goes by the amaxes of those before


@dataclass(frozen=True)
class Layer:
    """How a layer is made, and the shapes of its inputs behind batch and sequence. rotary: the argument for angles."""

    make: Callable[..., paddle.nn.Layer]
    inputs: Sequence[tuple[int, ...]] = field(default_factory=lambda: [(HIDDEN,)])
    rotary: str = ""


def _attention(backend: str, **_: object) -> paddle.nn.Layer:
    return layers.DotProductAttention(HIDDEN // HEADS, backend)


LAYERS = {
    "RMSNorm": Layer(lambda **made: layers.RMSNorm(HIDDEN, **made)),
    "Linear": Layer(lambda **made: layers.Linear(HIDDEN, FFN, **made)),
    "LayerNormLinear": Layer(lambda **made: layers.LayerNormLinear(HIDDEN, FFN, **made)),
    "LayerNormMLP": Layer(lambda **made: layers.LayerNormMLP(HIDDEN, FFN, **made)),
    "DotProductAttention": Layer(_attention, [(heads, HIDDEN // HEADS) for heads in (HEADS, KV_HEADS, KV_HEADS)]),
    "MultiHeadAttention": Layer(
        lambda **made: layers.MultiHeadAttention(HIDDEN, HEADS, KV_HEADS, **made), rotary="rotary_pos_emb"
    ),
    "TransformerLayer": Layer(
        lambda **made: layers.TransformerLayer(HIDDEN, FFN, HEADS, KV_HEADS, **made), rotary="rotary_pos_emb"
    ),
}
WITHOUT_FP8 = ("RMSNorm", "DotProductAttention")


@dataclass(frozen=True)
class Check:
    """A number that was compared: the greatest relative error of outputs and gradients, and what it may be."""

    what: str
    error: float
    bound: float
    where: str = ""

    @property
    def right(self) -> bool:
        return self.error <= self.bound  # not a NaN


@dataclass
class Report:
    """What was found. not_tested: {what: why}. times: {what: ms}."""

    checks: list[Check] = field(default_factory=list)
    not_tested: dict[str, str] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)

    def wrong(self) -> list[str]:
        return [check.what for check in self.checks if not check.right]

    def table(self) -> str:
        rows = [("", "relative error", "may be", "")]
        rows += [
            (check.what, f"{check.error:.1e}", f"{check.bound:.1e}", "ok" if check.right else f"OFF: {check.where}")
            for check in self.checks
        ]
        rows += [(what, f"{ms:.2f} ms", "", "") for what, ms in self.times.items()]
        lines = in_columns(rows)
        return "\n".join(lines + [f"not tested: {what}: {why}" for what, why in self.not_tested.items()])


def relative(got: Array, want: Array) -> float:
    """Return ‖got - want‖ / ‖want‖."""
    return float(np.linalg.norm(got.astype("float64") - want) / np.linalg.norm(want))


def as_bf16_has_it(array: Array) -> Array:
    """Return float32, the lower half of the bits cut off, so that bfloat16 holds each number exactly."""
    return (array.astype("float32").view("uint32") & 0xFFFF0000).view("float32")


class Case:
    """One layer's weights, inputs and output gradients, which bf16 has exactly, and what comes of them."""

    def __init__(self, name: str, seed: int) -> None:
        self.layer, self.generator = LAYERS[name], np.random.default_rng(seed)
        self.inputs = [self._draw([BATCH, SEQUENCE, *shape]) for shape in self.layer.inputs]
        paddle.set_device("cpu")
        made = self.layer.make(backend=PD, params_dtype="float32")
        self.weights = {key: self._weight(parameter.shape) for key, parameter in made.named_parameters()}
        self.output_grads: list[Array] = []

    def _draw(self, shape: Sequence[int]) -> Array:
        return as_bf16_has_it(self.generator.standard_normal(shape))

    def _weight(self, shape: Sequence[int]) -> Array:
        """Draw a weight: norms around one, matrices that keep the scale of what they multiply."""
        value = self._draw(shape)
        return as_bf16_has_it(1 + 0.125 * value if len(shape) == 1 else value * shape[1] ** -0.5)

    def run(self, backend: str, dtype: Dtype, recipe: fp8.DelayedScaling | None = None) -> dict[str, Array]:
        """Return {name: float64 array} of the outputs and of all gradients, on Paddle's present device."""
        layer = self.layer.make(backend=backend, params_dtype=dtype)
        for key, parameter in layer.named_parameters():
            parameter.set_value(paddle.to_tensor(self.weights[key]).astype(dtype))
        angles = {}
        if self.layer.rotary:
            angles[self.layer.rotary] = layers.RotaryPositionEmbedding(HIDDEN // HEADS)(SEQUENCE)
        for _ in range(STEPS if recipe else 1):
            layer.clear_gradients()
            xs = [paddle.to_tensor(x).astype(dtype).detach() for x in self.inputs]
            for x in xs:
                x.stop_gradient = False
            with fp8.fp8_autocast(recipe is not None, recipe):
                ys = layer(*xs, **angles)
            ys = list(ys) if isinstance(ys, (tuple, list)) else [ys]
            self.output_grads = self.output_grads or [self._draw(y.shape) for y in ys]
            paddle.autograd.backward(ys, [paddle.to_tensor(dy).astype(dtype) for dy in self.output_grads])
        found = {f"output {i}": y for i, y in enumerate(ys)} | {
            f"gradient of input {i}": x.grad for i, x in enumerate(xs)
        }
        found |= {f"gradient of {key}": parameter.grad for key, parameter in layer.named_parameters()}
        return {key: value.cast("float64" if dtype == "float64" else "float32").numpy() for key, value in found.items()}


def worst(what: str, got: Mapping[str, Array], truth: Mapping[str, Array], bounds: Mapping[str, float]) -> Check:
    """Return the comparison that is nearest to its bound, or farthest above it. bounds: {name: bound}."""
    errors = {name: relative(got[name], want) for name, want in truth.items()}
    # a NaN is never within its bound
    name = max(errors, key=lambda name: errors[name] / bounds[name] if errors[name] == errors[name] else np.inf)
    return Check(what, errors[name], bounds[name], name)


def check_on_cpu(name: str, seed: int) -> Check:
    """Compare pd in float32 with pd in float64."""
    case = Case(name, seed)
    truth = case.run(PD, "float64")
    return worst(f"{name}, pd in float32", case.run(PD, "float32"), truth, dict.fromkeys(truth, 1e-5))


def check_on_gpu(name: str, seed: int, where: str, recipe: fp8.DelayedScaling | None = None) -> Check:
    """Compare te on the device `where` with pd in float32 on the CPU; in fp8 with a recipe, otherwise in bf16."""
    case = Case(name, seed)
    truth = case.run(PD, "float32")
    if recipe:
        own = case.run(PD, "float32", recipe)  # what the rounding to fp8 alone does
    paddle.set_device(where)
    if not recipe:
        own = case.run(PD, "bfloat16")
    # what fp8 does not touch, such as the residual, has bf16's error
    bounds = {key: 1.2 * relative(own[key], want) + (1e-2 if recipe else 1e-3) for key, want in truth.items()}
    what = f"{name}, te in {'fp8' if recipe else 'bf16'}"
    return worst(what, case.run(TE, "bfloat16", recipe), truth, bounds)


def time_of_layer(
    where: str, backend: str, dtype: Dtype, recipe: fp8.DelayedScaling | None = None, repeats: int = 10
) -> float:
    """Return the ms of a TransformerLayer's forward and backward.

    The layer is Llama-2-7B's with 4096 tokens on a GPU, a small one on a CPU.
    """
    paddle.set_device(where)
    hidden, ffn, heads, tokens = (4096, 11008, 32, 4096) if where != "cpu" else (HIDDEN, FFN, HEADS, 512)
    layer = layers.TransformerLayer(hidden, ffn, heads, params_dtype=dtype, backend=backend)
    angles = layers.RotaryPositionEmbedding(hidden // heads)(tokens)
    x, dy = (paddle.ones([1, tokens, hidden], dtype) * value for value in (0.5, 0.25))
    x.stop_gradient = False
    times = []
    for _ in range(repeats):
        device.synchronize()
        start = time.perf_counter()
        with fp8.fp8_autocast(recipe is not None, recipe):
            layer(x, rotary_pos_emb=angles).backward(dy)
        device.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times[repeats // 2 :]))


def check_collectives(devices: Sequence[str], logs: str) -> list[Check]:
    """Compare all devices together, each in a process of its own. logs: a folder for theirs.

    Raises RuntimeError where they do not come to an end.
    """
    command = [sys.executable, "-m", "paddle.distributed.launch", "--devices", ",".join(devices)]
    command += ["--log_dir", str(logs), str(COLLECTIVES), str(Path(logs) / "found.json")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COLLECTIVES_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end after {COLLECTIVES_SECONDS} s") from None
    found = Path(logs) / "found.json"
    if done.returncode or not found.is_file():
        raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1][:300])
    return [
        Check(f"{name}, {len(devices)} devices", error, 0.0) for name, error in json.loads(found.read_text()).items()
    ]


def selftest(seed: int) -> Report:
    """Test all that can be tested here."""
    report, where = Report(), env.training_device()
    for name in LAYERS:
        report.checks.append(check_on_cpu(name, seed))
    report.times["a small TransformerLayer on the CPU, pd"] = time_of_layer("cpu", PD, "float32")
    if where == "cpu":
        why = "Paddle has no GPU here; `paddle-te env` says what is missing"
        report.not_tested = dict.fromkeys(["te in bf16 and fp8", "collectives", "te's time"], why)
        return report
    paddle.set_device(where)
    for precision, recipe in (("bf16", None), ("fp8", fp8.DelayedScaling(amax_history_len=4))):
        paddle.set_device(where)
        if problems := env.backend_problems("te", precision):
            report.not_tested[f"te in {precision}"] = "; ".join(f"{p.what} ({p.remedy})" for p in problems)
            continue
        for name in LAYERS:
            if not (recipe and name in WITHOUT_FP8):
                report.checks.append(check_on_gpu(name, seed, where, recipe))
        what = f"TransformerLayer of Llama-2-7B, 4096 tokens, te in {precision}"
        report.times[what] = time_of_layer(where, TE, "bfloat16", recipe)
    _collectives(report)
    return report


def _collectives(report: Report) -> None:
    devices = [str(number) for number in range(len(env.nvidia_gpus()))]
    if len(devices) < 2:
        report.not_tested["collectives"] = f"{len(devices)} NVIDIA GPU"
        return
    with tempfile.TemporaryDirectory() as logs:
        try:
            report.checks += check_collectives(devices, logs)
        except RuntimeError as error:
            report.checks.append(Check(f"collectives, {len(devices)} devices", float("nan"), 0.0, str(error)))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--report", type=file_argument, metavar="FILE", help="also write all, and what this machine has, as JSON"
    )
    parser.add_argument("--seed", type=SEED.argument, default=1, help="of weights and inputs (%(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = make_parser().parse_args(argv)
    report = selftest(args.seed)
    print(report.table())
    if args.report:
        checks = [asdict(check) | {"right": check.right} for check in report.checks]
        found = dict(checks=checks, times_ms=report.times, not_tested=report.not_tested, machine=env.report())
        try:
            write_file("--report", args.report, json.dumps(found, indent=2) + "\n")
        except NotWritten as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"written: {args.report}")
    if wrong := report.wrong():
        print(f"error: {len(wrong)} of {len(report.checks)} are off: {'; '.join(wrong)}", file=sys.stderr)
        return 1
    return 0
