"""Write an adapter as PEFT's folder: adapter_model.safetensors and adapter_config.json, which vLLM reads, too.

Each of Hugging Face's modules gets the A and B of its parts. Where the parts of a fused weight share one A, PEFT's q, k
and v each get a copy of it. Where Hugging Face's module is the fused one (GPT-2's c_attn) and each part has its own A,
the module's A stacks all of them, and its B holds theirs in blocks. The product is the same; its rank is their sum.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddle_te import commands
from paddle_te.folders import PEFT_ADAPTER
from paddle_te.weights import safetensors
from paddle_te.weights.adapters.files import PEFT_WEIGHTS, Adapter, LowRank, all_parts, open_adapter
from paddle_te.weights.adapters.names import Form, forms_of
from paddle_te.weights.adapters.settings import Settings
from paddle_te.weights.contents import check_contents, check_own, convert_command, merge_command
from paddle_te.weights.dims import Dims
from paddle_te.weights.files import check_new, copy_file, new_folder, write_json
from paddle_te.weights.folder import dims_of
from paddle_te.weights.layout import Part, Place
from paddle_te.weights.tensors import Array, CheckpointError, TensorSpec, all_finite, cast
from paddle_te.weights.verification import FULL, Verification

_MODES = {"te": "te2hf", "pd": "pd2hf", "formers": "pd2hf"}  # what makes PEFT's of a Form's kind


@dataclass(frozen=True)
class _Module:
    """One of Hugging Face's modules. low_ranks: {Part: its LowRank, or None}."""

    name: str
    low_ranks: Mapping[Part, LowRank | None]

    @property
    def different(self) -> list[LowRank]:
        """The LowRanks of its parts, each once."""
        return list(dict.fromkeys(filter(None, self.low_ranks.values())))

    @property
    def rank(self) -> int:
        """The rank of the module's A."""
        return sum(low_rank.rank for low_rank in self.different)

    def read_a(self) -> Array:
        """Return A [rank, in]."""
        return np.concatenate([low_rank.read_a() for low_rank in self.different], 0)

    def read_b(self, dims: Dims) -> Array:
        """Return B [out, rank]."""
        starts, start = {}, 0
        for low_rank in self.different:
            starts[low_rank], start = start, start + low_rank.rank
        rows = []
        for part, own in self.low_ranks.items():
            block = np.zeros((dims.part_shape(part)[0], self.rank), self.different[0].read_a().dtype)
            if own is not None:
                block[:, starts[own] : starts[own] + own.rank] = own.read_b(part, dims)
            rows.append(block)
        return np.concatenate(rows, 0)


def convert_adapter(
    input_path: str | Path,
    output_path: str | Path,
    mode: str | None,
    dtype: str | None = None,
    verify_checkpoint: str = FULL,
    tell: Callable[[str], None] = print,
) -> None:
    """Make PEFT's folder of an adapter's.

    mode: "te2hf" or "pd2hf", as the adapter's names are. verify_checkpoint: how much of the input's manifest, if it has
    one, is compared first. Others and errors as `write_peft`'s.
    """
    input_path, output_path = Path(input_path), Path(output_path)
    check_new(output_path)
    Verification(verify_checkpoint, tell=tell).check(input_path)
    adapter = open_adapter(input_path)
    fitting, command = _MODES.get(adapter.form.kind), peft_command(adapter)
    if fitting is None or mode != fitting:
        to_peft = f"; {command} makes PEFT's folder of it, which vLLM serves" if command else ""
        raise CheckpointError(
            f"{input_path}: holds {adapter.title}, not a model: {merge_command(input_path, base_of(adapter))} "
            f"merges it into its model{to_peft}"
        )
    write_peft(adapter, output_path, dtype, tell)


def peft_command(adapter: Adapter) -> str | None:
    """Return the command that makes PEFT's folder of an adapter's; None for one that is PEFT's."""
    mode = _MODES.get(adapter.form.kind)
    return mode and convert_command(adapter.folder, "--mode", mode)


def base_of(adapter: Adapter) -> str:
    """Return the folder of an adapter's model where it is there, else MODEL, for commands."""
    base = adapter.settings.base
    return base if base and (Path(base) / "config.json").is_file() else commands.MODEL


def write_peft(
    adapter: Adapter, output: str | Path, dtype: str | None = None, tell: Callable[[str], None] = print
) -> None:
    """Write an adapter into the new folder `output`, complete or not at all.

    dtype: of A and B; None: as they are. tell: takes a line about numbers that are not finite. Raises CheckpointError
    for one that PEFT's folder cannot hold.
    """
    if adapter.whole:
        name = next(name for _, _, name in adapter.whole.values())
        raise CheckpointError(
            f"{adapter.folder}: has {name!r} whole, which vLLM does not load with an adapter: merge it into its model"
        )
    if not adapter.form.family.in_transformers:
        raise CheckpointError(
            f"{adapter.folder}: transformers has no class for {adapter.form.family.title}, and so PEFT no adapter: "
            "merge it into its model"
        )
    (form,), dims = forms_of(adapter.form.family, peft=True), dims_of(adapter.folder)
    modules = _modules(adapter, form, dims)
    for name in adapter.companions:
        check_own(adapter.folder / name)
        check_contents(adapter.folder / name)
    with new_folder(output) as folder:
        broken = _write_weights(folder / PEFT_WEIGHTS, modules, dims, dtype)
        write_json(folder / PEFT_ADAPTER, _config(adapter, form, modules, dims))
        for name in adapter.companions:
            copy_file(adapter.folder / name, folder / name)
    if broken:
        tell(f"{output}: {len(broken)} tensors hold NaN or infinity, as they did before: {', '.join(broken[:3])}")


def _modules(adapter: Adapter, form: Form, dims: Dims) -> dict[Place, _Module]:
    """Return those of Hugging Face's modules that get A and B, by Place."""
    found = {}
    for name, place in all_parts(form, dims.spec):
        low_ranks = {part: adapter.parts.get(part) for part in dims.parts(place)}
        if any(low_ranks.values()):
            found[place] = _Module(name, low_ranks)
    held = {part for module in found.values() for part in module.low_ranks}
    if left := next((part for part in adapter.parts if part not in held), None):
        raise CheckpointError(
            f"{adapter.folder}: has A and B of {left.name} beside the experts of layer {left.layer}, all of which are "
            f"one tensor in {adapter.form.family.title}'s folders of Hugging Face, and PEFT has none beside such a "
            "tensor: merge it into its model"
        )
    return found


def _write_weights(path: Path, modules: Mapping[Place, _Module], dims: Dims, dtype: str | None) -> list[str]:
    specs, broken = [], []
    for module in modules.values():
        columns, rows = module.different[0].in_features, sum(dims.part_shape(part)[0] for part in module.low_ranks)
        for factor, shape in (("A", (module.rank, columns)), ("B", (rows, module.rank))):
            name = f"base_model.model.{module.name}.lora_{factor}.weight"
            specs.append(TensorSpec(name, dtype or module.different[0].dtype, shape))
    writer, left = safetensors.Writer(path, specs, "pt"), iter(specs)
    for module in modules.values():
        for array in (module.read_a(), module.read_b(dims)):
            spec = next(left)
            array = cast(array, spec)
            if not all_finite(array, spec.dtype):
                broken.append(spec.name)
            writer.add([array])
    writer.close()
    return broken


def _config(adapter: Adapter, form: Form, modules: Mapping[Place, _Module], dims: Dims) -> dict[str, Any]:
    """Return the content of adapter_config.json, with keys that every version of PEFT since 2024 and vLLM know."""
    settings = adapter.settings
    alpha_of = lambda module: _alpha(settings, module)  # noqa: E731
    rank, alpha = Counter((module.rank, alpha_of(module)) for module in modules.values()).most_common(1)[0][0]
    others = [module for module in modules.values() if (module.rank, alpha_of(module)) != (rank, alpha)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": settings.base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rslora,
        "target_modules": _targets(form, modules, dims),
        "rank_pattern": {module.name: module.rank for module in others},
        "alpha_pattern": {module.name: alpha_of(module) for module in others},
        "bias": "none",
        "fan_in_fan_out": form.layout.layer[-1].transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "use_dora": False,
    }


def _alpha(settings: Settings, module: _Module) -> float:
    """Return the alpha with which a module's rank scales as the adapter does."""
    if module.rank == settings.rank:
        return settings.alpha
    return module.different[0].scaling * (module.rank**0.5 if settings.rslora else module.rank)


def _targets(form: Form, modules: Mapping[Place, _Module], dims: Dims) -> list[str]:
    """Return target_modules: the last word of a module's name where all of that word have A and B, or its name."""
    word = lambda name: name.rpartition(".")[2]  # noqa: E731
    everything = Counter(word(name) for name, _ in all_parts(form, dims.spec))
    there = Counter(word(module.name) for module in modules.values())
    whole = {name for name, count in there.items() if everything[name] == count}
    return sorted({word(m.name) if word(m.name) in whole else m.name for m in modules.values()})
