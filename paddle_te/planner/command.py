"""Find the layouts in which a model fits and trains fastest on so many GPUs: paddle-te plan MODEL --gpus N.

MODEL is a name or a folder with config.json. The command computes memory and time of all layouts (tensor and pipeline
parallelism, sharding, recompute, micro-batches) and runs nothing. All weights are trained, or with --lora_rank only an
adapter. It prints the fastest layouts that fit, with their memory by part, why the others do not fit, and the command
line that trains with the best one. Measurements differed by at most 1.8 % in memory and 7.1 % in time
(docs/guides/plan.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from paddle_te import commands, configs
from paddle_te.commands import DATASET, MODEL, OUTPUT, PLACEHOLDERS
from paddle_te.job import Job
from paddle_te.job.record import PREFERENCES
from paddle_te.options import BACKENDS, option
from paddle_te.options.fp8 import SKIP_LAYERS
from paddle_te.options.layers import stored_in_fp8
from paddle_te.options.lora import TARGETS, TRANSPOSES_KEPT, Adapter
from paddle_te.options.training import MASTER_WEIGHTS, OPTIMIZER, PATTERNS, STATES_ON_HOST, UPDATED_HERE
from paddle_te.planner import formulas
from paddle_te.planner.frozen import check_patterns
from paddle_te.planner.gpus import GPUS, Gpu, at_hand
from paddle_te.planner.layout import extra_arguments, launcher_arguments, memory_text, shape
from paddle_te.planner.measured import ran_on, speed_of
from paddle_te.planner.memory import Memory, host_bytes, state_bytes
from paddle_te.planner.model import Model, check_size
from paddle_te.planner.plan import Plan
from paddle_te.planner.ranking import costs
from paddle_te.planner.search import SEQUENCES, Search, search, usual_tokens
from paddle_te.table import in_columns

RANDOM_TOKENS = "--MOCK_DATA=1"
STORED = next(iter(stored_in_fp8(True)))


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="name, or folder with config.json")
    parser.add_argument("--gpus", type=option.RANKS.argument, required=True, help="how many there are")
    other = next(iter(GPUS))
    parser.add_argument("--gpu", choices=GPUS, help=f"their kind; default: those of this machine, else {other}")
    parser.add_argument(
        "--seq", type=option.TOKENS.argument, help="tokens of a sequence; default: the model's, at most 8192"
    )
    parser.add_argument(
        "--tokens_per_step",
        type=option.STEP_TOKENS.argument,
        help=f"of all GPUs together; default: {SEQUENCES} sequences for each GPU",
    )
    parser.add_argument("--precision", choices=("fp8", "bf16"), default="fp8", help="default %(default)s")
    parser.add_argument("--optim", choices=UPDATED_HERE, help="as in training; default: adamw")
    for name, kinds in OPTIMIZER.items():
        parser.add_argument(f"--{name}", choices=kinds, help="as in training; default: the plainest that fits, or pays")
    parser.add_argument(
        f"--{STATES_ON_HOST}",
        type=option.FRACTION.argument,
        help="as in training; default: as much as must be for a layout to fit",
    )
    parser.add_argument(
        f"--{STORED}",
        choices=("true", "false"),
        default="false",
        help="as in training; where backward computes the activation's input again it is left out",
    )
    parser.add_argument(
        "--task", choices=PREFERENCES, help="tuning on preferences; default: pretraining, with LoRA fine-tuning"
    )
    parser.add_argument(
        "--lora_rank", type=option.RANKS.argument, help="LoRA of this rank; default: all weights are trained"
    )
    parser.add_argument("--lora_targets", choices=TARGETS, help=f"as in fine-tuning; default {Adapter.targets}")
    parser.add_argument("--quantize_base", choices=("fp8",), help="as in fine-tuning, with LoRA in fp8")
    parser.add_argument(
        f"--{TRANSPOSES_KEPT}", choices=("true", "false"), help="as in fine-tuning; default: what is faster and fits"
    )
    parser.add_argument(
        "--freeze", nargs="+", metavar="PATTERN", help="as in training: regular expressions of what is not"
    )
    parser.add_argument("--fp8_skip_layers", type=SKIP_LAYERS.argument, help="as in training: layers in 16 bits")
    parser.add_argument(
        "--show", type=option.SAMPLES.argument, default=10, help="how many layouts to print; default %(default)s"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="also print what the best one's memory and time consist of, by which formulas and from which sources, and "
        "the numbers of the GPU that they are computed from",
    )
    return parser


def main() -> int:
    """Run the command. Return the exit status: 0; 1 where nothing fits; 2 for wrong arguments."""
    arguments = make_parser().parse_args()
    try:
        config = _config(arguments.model)
        model, gpu, gpus = Model.of(config), GPUS[arguments.gpu or at_hand()], arguments.gpus
        sequence = arguments.seq or min(config.get("max_position_embeddings", 8192), 8192)
        tokens = arguments.tokens_per_step or usual_tokens(gpus, sequence, arguments.optimizer_in_backward or "off")
        flags = {name: getattr(arguments, name) for name in (*OPTIMIZER, STATES_ON_HOST)}
        flags = {name: value for name, value in flags.items() if value is not None}
        flags |= stored_in_fp8(getattr(arguments, STORED) == "true") | _lora(arguments) | _freeze(arguments, model)
        flags |= {"optim": arguments.optim} if arguments.optim else {}
        flags |= _task(arguments) | _skipped(arguments)
        found = search(model, gpu, gpus, sequence, tokens, arguments.precision, **flags)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(arguments.model, model, gpu, found, arguments.show, arguments.explain))
    return 0 if found.plans else 1


def _config(name: str) -> dict[str, Any]:
    """A model's config.json. Raises ValueError for one that our layers do not compute, or that no machine holds."""
    said = configs.read_model(name)
    configs.check_computed(said, BACKENDS["te"])
    config = configs.words_of_model(said)
    check_size(config, said.source)
    return config


def _freeze(arguments: argparse.Namespace, model: Model) -> dict[str, object]:
    """Return the flag --freeze. Raises ValueError for patterns that training refuses."""
    if not arguments.freeze:
        return {}
    if arguments.lora_rank:
        raise ValueError("--freeze with --lora_rank, which trains none of the model's weights: leave one of them out")
    if fault := PATTERNS.fault(arguments.freeze):
        raise ValueError(f"--freeze {' '.join(arguments.freeze)} must be {fault}")
    check_patterns(model, arguments.freeze)
    return {"freeze": tuple(arguments.freeze)}


def _skipped(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the flag --fp8_skip_layers. Raises ValueError where there is no fp8 to leave out."""
    if not arguments.fp8_skip_layers:
        return {}
    if arguments.precision != "fp8" or arguments.quantize_base:
        raise ValueError("--fp8_skip_layers needs --precision fp8, and weights that do not exist in fp8 only")
    return {"fp8_skip_layers": arguments.fp8_skip_layers}


def _lora(arguments: argparse.Namespace) -> dict[str, object]:
    """The flags of an adapter. Raises ValueError where they do not go together."""
    kept = getattr(arguments, TRANSPOSES_KEPT)
    if kept and not arguments.quantize_base:
        raise ValueError(f"--{TRANSPOSES_KEPT} needs --quantize_base fp8; alone it means nothing")
    if not arguments.lora_rank:
        alone = [f"--{name}" for name in ("lora_targets", "quantize_base") if getattr(arguments, name)]
        if alone:
            raise ValueError(f"{' and '.join(alone)} without --lora_rank: all weights are trained")
        return {}
    if arguments.quantize_base and arguments.precision != "fp8":
        raise ValueError("--quantize_base fp8 needs --precision fp8: such weights are multiplied in fp8")
    if getattr(arguments, STATES_ON_HOST):
        raise ValueError(f"--{STATES_ON_HOST} with --lora_rank: an adapter's states are too small to be moved")
    targets = arguments.lora_targets or Adapter.targets
    adapter = Adapter(rank=arguments.lora_rank, targets=targets, fp8_base=arguments.quantize_base is not None)
    return adapter.flags | ({TRANSPOSES_KEPT: kept == "true"} if kept else {})


def _task(arguments: argparse.Namespace) -> dict[str, object]:
    """The flags of preference tuning, whose loss is always computed in chunks."""
    return {"script": arguments.task, "use_fused_linear_cross_entropy": True} if arguments.task else {}


def report(name: str, model: Model, gpu: Gpu, found: Search, show: int, explain: bool) -> str:
    """Return the lines that the command prints."""
    lines = [f"{name}: {model.parameters:,} parameters"]
    if model.idle:
        lines[0] += f", {model.active_parameters:,} of them for each token"
        lines.append(
            "Experts: memory is within 2 % and time within 6 % of trainings, steps and layers that ran on one to four "
            "H200s."
        )
    if not gpu.measured:
        lines.append(f"{gpu.title}: its speeds are taken over from the H200; {gpu.steps}")
    lines.append("")
    if found.plans:
        lines += [*_plans_table(found.plans[:show], model, gpu), "", *_notes(found.plans[:show])]
        lines += _command_lines(name, found.plans[0].layout)
    else:
        lines.append(f"No layout fits. Each of these would need more than the {gpu.memory:g} GB of a {gpu.title}:")
    if found.too_large:
        lines += ["", "Too large, with what it would need at least:", *_too_large(found.too_large)]
    if explain and found.plans:
        lines += ["", *_explained(found.plans[0], gpu)]
    return "\n".join(lines)


def _offloaded(plan: Plan, model: Model) -> str:
    """The layers whose activations are moved, the share of the optimizer's states, and the host's memory for both."""
    layout = plan.layout
    words = [f"{layout.layers_on_host} layers"] * bool(layout.layers_on_host)
    words += [f"{layout.share_on_host:.0%} of states"] * bool(layout.share_on_host)
    return f"{', '.join(words)}: {host_bytes(model, layout) / 1e9:.1f} GB" if words else ""


def _states(layout: Job) -> str:
    """Return the form of AdamW's states with bytes a parameter, and the update in backward, in words."""
    if layout.lora:
        return ""
    remainders = " + remainders" * (layout.master_weights != next(iter(MASTER_WEIGHTS)))
    in_backward = ", in backward" * (layout.optimizer_in_backward != "off")
    return f"{layout.optim_moments}{remainders}: {state_bytes(layout):.2g} B{in_backward}"


def _measured(plan: Plan, model: Model, gpu: Gpu) -> str:
    """Return a layout's measured tokens/s; if it never ran, the GPUs on which layouts of its kind ran."""
    if speed := speed_of(model, plan.layout, gpu):
        return f"{speed:,.0f} tokens/s"
    where = [] if model.idle else ran_on(plan.layout)
    return "kind ran on " + ", ".join(where) if where else "never ran"


def _notes(plans: list[Plan]) -> list[str]:
    """Return the lines that say what a user gives up for the layouts of a table."""
    said = list(dict.fromkeys(each for plan in plans for each in costs(plan.layout)))
    if not said:
        return []
    return ["Costs of the states (docs/background/optimizer-memory.md):", *(f"  {each}" for each in said), ""]


def _plans_table(plans: list[Plan], model: Model, gpu: Gpu) -> list[str]:
    parts = [part.name for part in fields(plans[0].memory)]
    header = ["layout", "recompute", "batch × GA", "loss in chunks", "states", "offload", "tokens/s per GPU"]
    header += ["measured", "ms", "GB", *parts]
    rows = []
    for plan in plans:
        layout = plan.layout
        row = [shape(layout), memory_text(layout), f"{layout.batch} × {layout.micro_batches}"]
        row += [
            "yes" if layout.use_fused_linear_cross_entropy else "",
            _states(layout),
            _offloaded(plan, model),
            f"{plan.tokens_per_second:,.0f}",
            _measured(plan, model, gpu),
            f"{plan.milliseconds:,.0f}",
        ]
        row += [f"{plan.memory.total / 1e9:.1f}", *(f"{getattr(plan.memory, part) / 1e9:.1f}" for part in parts)]
        rows.append(row)
    return in_columns([header, *rows])


def _too_large(plans: dict[str, Plan]) -> list[str]:
    rows = [
        [
            f"  {kind}",
            f"{plan.memory.total / 1e9:.0f} GB",
            f"(recompute {memory_text(plan.layout)})",
            _largest(plan.memory),
        ]
        for kind, plan in sorted(plans.items(), key=lambda item: item[1].memory.total)
    ]
    return in_columns(rows)


def _largest(memory: Memory) -> str:
    """The parts of a memory that are more than a tenth of it, the largest first."""
    sizes = {part.name.replace("_", " "): getattr(memory, part.name) for part in fields(memory)}
    large = sorted((size, part) for part, size in sizes.items() if size > memory.total / 10)
    return ", ".join(f"{part} {size / 1e9:.0f}" for size, part in reversed(large))


def _command_lines(name: str, layout: Job) -> list[str]:
    return [
        "The first one is",
        "",
        "  " + commands.line(*launch_words(name, layout)),
        "",
        _what_to_change(name, layout),
    ]


def _what_to_change(name: str, layout: Job) -> str:
    """Return the line that says which folders of the printed command to replace."""
    if not layout.tunes:
        return f"It trains on random tokens. To train on your data, put --DATA_PATH=FOLDER in place of {RANDOM_TOKENS}."
    words = [MODEL] * (_launched_model(name, layout) == MODEL) + [DATASET, OUTPUT]
    listed = ", ".join(f"{word} ({PLACEHOLDERS[word]})" for word in words)
    return f"Put your own folders in place of {listed}."


def _launched_model(name: str, layout: Job) -> str:
    """Return the model as a command names it: fine-tuning needs a folder, for which MODEL stands."""
    return MODEL if layout.tunes and not Path(name).expanduser().is_dir() else name


def launch_words(name: str, layout: Job) -> list[str]:
    """Return the command that trains with this layout, and its words."""
    own = {"dataset": DATASET, "output": OUTPUT} if layout.tunes else {"MOCK_DATA": 1}
    arguments = {"model_name": _launched_model(name, layout)} | own | launcher_arguments(layout)
    if extra := extra_arguments(layout):
        arguments["EXTRA_ARGS"] = extra
    return [layout.script, *by_name(arguments)]


def by_name(arguments: Mapping[str, object]) -> list[str]:
    """Return the launcher's words for its arguments: --NAME=VALUE, true and false in lower case."""
    values = {key: str(value).lower() if isinstance(value, bool) else value for key, value in arguments.items()}
    return [f"--{key}={value}" for key, value in values.items()]


def _explained(plan: Plan, gpu: Gpu) -> list[str]:
    total = plan.memory.total
    sizes = [(part, getattr(plan.memory, part)) for part in formulas.MEMORY]
    memory = [
        [f"  {part}", f"{size / 1e9:,.1f} GB", f"{size / total:.1%}", formulas.MEMORY[part]]
        for part, size in sizes
        if size
    ]
    times = [
        [f"  {part}", f"{ms:,.1f} ms", f"{ms / plan.milliseconds:.1%}", formulas.TIME[part]]
        for part, ms in plan.times.items()
        if ms
    ]
    numbers = [
        [f"  {each.name}", f"{getattr(gpu, each.name):g}", each.metadata["what"]]
        for each in fields(gpu)
        if each.metadata["what"] and each.name not in ("measured", "steps")
    ]
    return [
        "The first one's memory (paddle_te/planner/memory.py has the formulas in full):",
        *in_columns(memory),
        "",
        "Its step (paddle_te/planner/speed.py):",
        *in_columns(times),
        "",
        "Sources:",
        *(f"  {source}" for source in formulas.SOURCES),
        "",
        f"Of a {gpu.title}, in GB, GB/s, µs, TFLOP/s:",
        *in_columns(numbers),
    ]
