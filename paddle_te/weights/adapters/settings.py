"""Read an adapter's settings from adapter_config.json, PEFT's, or lora_config.json, PaddleNLP's.

A setting that changes what the adapter computes is understood or refused by its name; so is one that is not known and
asks for something.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypeVar

from paddle_te import typed
from paddle_te.folders import PADDLE_ADAPTER, PEFT_ADAPTER
from paddle_te.weights.contents import read_object
from paddle_te.weights.tensors import CheckpointError

# Of training, or of how a file came about; A and B mean the same whatever they say.
_PEFT_FREE = set(
    "auto_mapping peft_version revision inference_mode megatron_core qalora_group_size loftq_config eva_config "
    "corda_config lora_ga_config runtime_config ensure_weight_tying fan_in_fan_out bias".split()
)
_PADDLE_FREE = set("use_quick_lora trainable_bias lora_plus_scale tensor_parallel_degree dtype head_dim".split())
_PADDLE_FREE |= set("trainable_modules merge_weights target_modules tensor_model_parallel_size".split())
# Other ways to begin, such as pissa, take a part of the weights away, to which A and B are then added.
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")


Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Targets:
    """The modules that a PEFT adapter is for, by PEFT's rules."""

    modules: list[str] | str
    exclude: list[str] | str | None = None
    layers: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None

    def patterns(self) -> list[str]:
        """Return the regular expressions among them."""
        listed = self.layers_pattern if isinstance(self.layers_pattern, list) else [self.layers_pattern]
        return [text for text in (self.modules, self.exclude, *listed) if isinstance(text, str)]

    def match(self, module: str) -> bool:
        """Return whether the module of that full name gets A and B."""
        if self.exclude and _matches(self.exclude, module):
            return False
        if self.modules == "all-linear":
            return module.rpartition(".")[2] not in ("lm_head", "embed_tokens", "wte")
        return _matches(self.modules, module) and (isinstance(self.modules, str) or self._of_the_layers(module))

    def _of_the_layers(self, module: str) -> bool:
        if self.layers is None or self.layers == []:
            return True
        patterns = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern
        found = [re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module) for pattern in patterns or [r"[^.]*"]]
        wanted = [self.layers] if isinstance(self.layers, int) else self.layers
        return any(match is not None and int(match[1]) in wanted for match in found)


def _matches(targets: str | Iterable[str], module: str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


@dataclass(frozen=True)
class Settings:
    """An adapter's settings.

    ranks, alphas: {pattern of a module's name: its own}. targets: None where PaddleNLP wrote them.

    saved: modules that stand in the file whole. base: the model's name or folder.
    """

    path: Path
    rank: int
    alpha: float
    rslora: bool
    dropout: float = 0.0
    base: str | None = None
    targets: Targets | None = None
    ranks: dict[str, int] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)

    def rank_of(self, module: str) -> int:
        """Return the rank of the module of that full name."""
        return self._own(self.ranks, module, self.rank)

    def scaling_of(self, module: str) -> float:
        """Return the factor of the module's product B · A."""
        rank, alpha = self.rank_of(module), self._own(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    @property
    def scaling(self) -> float:
        """The factor of modules without a pattern of their own."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def _own(self, patterns: Mapping[str, Number], module: str, general: Number) -> Number:
        for pattern, value in patterns.items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return general


@dataclass(frozen=True)
class _Peft:
    """The keys of adapter_config.json that are read."""

    peft_type: str
    target_modules: list[str] | str
    r: int = typed.at_least(1, 8)
    lora_alpha: float = 8
    use_rslora: bool | None = False
    lora_dropout: float | None = 0.0
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    modules_to_save: list[str] | None = None
    init_lora_weights: bool | str | None = True
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None


@dataclass(frozen=True)
class _Paddle:
    """The keys of lora_config.json that are read."""

    r: int = typed.at_least(1, 8)
    lora_alpha: float = 8
    rslora: bool | None = False
    lora_dropout: float | None = 0.0
    scaling: float | None = None
    base_model_name_or_path: str | None = None


def read_settings(folder: Path) -> Settings:
    """Return the Settings in an adapter's folder. Raises CheckpointError."""
    try:
        return _of_peft(folder / PEFT_ADAPTER) if (folder / PEFT_ADAPTER).is_file() else _of_paddle(folder)
    except re.error as error:
        raise CheckpointError(f"{folder / PEFT_ADAPTER}: {error.pattern!r} is no regular expression: {error}") from None


Said = TypeVar("Said", _Peft, _Paddle)


def _of_peft(path: Path) -> Settings:
    said = _read(path, _Peft, _PEFT_FREE)
    if said.peft_type != "LORA":
        raise CheckpointError(f"{path}: peft_type={said.peft_type!r}: only LORA adapters are understood")
    if said.task_type not in (None, "CAUSAL_LM"):
        raise CheckpointError(f"{path}: task_type={said.task_type!r}: only CAUSAL_LM is understood")
    if said.init_lora_weights not in _BEGINNINGS:
        raise CheckpointError(
            f"{path}: init_lora_weights={said.init_lora_weights!r} changed the base when training began, and A and B "
            "are for that one: save the adapter with PEFT's path_initial_model_for_weight_conversion, which makes them "
            "those of the original"
        )
    targets = Targets(said.target_modules, said.exclude_modules, said.layers_to_transform, said.layers_pattern)
    settings = Settings(
        path,
        said.r,
        said.lora_alpha,
        bool(said.use_rslora),
        said.lora_dropout or 0.0,
        said.base_model_name_or_path,
        targets,
        said.rank_pattern or {},
        said.alpha_pattern or {},
        said.modules_to_save or [],
    )
    for pattern in (*settings.ranks, *settings.alphas, *targets.patterns()):
        re.compile(pattern)
    if any(rank < 1 for rank in settings.ranks.values()):
        raise CheckpointError(f"{path}: rank_pattern={settings.ranks}: a rank is a whole number from 1")
    return settings


def _of_paddle(folder: Path) -> Settings:
    path = folder / PADDLE_ADAPTER
    said = _read(path, _Paddle, _PADDLE_FREE)
    settings = Settings(
        path, said.r, said.lora_alpha, bool(said.rslora), said.lora_dropout or 0.0, said.base_model_name_or_path
    )
    if said.scaling is not None and not math.isclose(said.scaling, settings.scaling, rel_tol=1e-6):
        raise CheckpointError(
            f"{path}: scaling={said.scaling}, but {settings.scaling:g} follows from r={said.r}, "
            f"lora_alpha={said.lora_alpha:g}, rslora={settings.rslora}: one of them is wrong"
        )
    return settings


def _read(path: Path, kind: type[Said], free: set[str]) -> Said:
    content = read_object(path)
    known = {entry.name for entry in fields(kind)}
    for key, value in content.items():
        asks = value not in (None, False, {}, [], "") and (key, value) != ("lora_plus_scale", 1.0)
        if key not in known | free and asks:
            raise CheckpointError(
                f"{path}: {key}={_short(value)}: adapters with it are not understood here; merge it with the library "
                "that made it, such as PEFT's merge_and_unload, and convert the merged model"
            )
    try:
        said = typed.read(kind, {key: value for key, value in content.items() if key in known})
    except typed.NotAsDeclared as error:
        raise CheckpointError(f"{path}: {error}") from error
    return said


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
