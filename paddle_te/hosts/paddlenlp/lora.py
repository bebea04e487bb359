"""LoRA in PaddleNLP: its LoRAModel around native layers or ours (`models.lora`), and adapters that are read into it."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from paddle import Tensor
from paddlenlp.peft import LoRAConfig, LoRAModel

from paddle_te.configs.families import family_of, is_tied
from paddle_te.configs.spec import spec_of
from paddle_te.distributed.expert_parallel import all_experts, experts_share, own_experts
from paddle_te.host import HostConfig, HostModel
from paddle_te.hosts.paddlenlp.loading import layout_of, on_device, verification
from paddle_te.models.lora import TARGETS, DecoderLoRA
from paddle_te.options.lora import Adapter
from paddle_te.weights import CheckpointError, Dims
from paddle_te.weights.adapters import check_fits, open_adapter
from paddle_te.weights.adapters.files import Adapter as Saved
from paddle_te.weights.adapters.names import form_for
from paddle_te.weights.adapters.sharing import check_trainable, shares
from paddle_te.weights.names import FUSED, NATIVE
from paddle_te.weights.verification import FULL

_EXPERTS = ".experts."  # in the names of A and B that each expert has


def target_modules(targets: str) -> list[str]:
    """Return LoRAConfig's target_modules for "all", "attention" or "mlp", for every backend and native weights."""
    if targets not in TARGETS:
        raise ValueError(f"targets={targets!r}; they may be {', '.join(TARGETS)}")
    return [rf".*\.{name}" for name in _module_names([name.removesuffix("_proj") for name in TARGETS[targets]])]


def _module_names(parts: Collection[str]) -> dict[str, None]:
    """Return the last words of the names of the modules with these parts, ours and PaddleNLP's."""
    there = {*parts, *(module for module, held in FUSED.items() if {*parts}.issuperset(held))}
    native = [module for names in NATIVE.values() for part, module in names.layer.items() if part in there]
    return dict.fromkeys((*(f"{part}_proj" for part in parts), *(name.split(".")[-1] for name in native)))


def _targets_of(adapter: Saved, num_layers: int) -> list[str]:
    """Return target_modules of the modules that an Adapter has A and B for."""
    layers: dict[str, set[int | None]] = {}
    for place in adapter.parts:
        layers.setdefault(place.name.removeprefix("shared_"), set()).add(place.layer)
    parts = {part for part in layers if len(layers[part]) == num_layers}
    for targets, names in TARGETS.items():
        if parts == {*layers} == {name.removesuffix("_proj") for name in names} & {*adapter.form.layout.layer_parts}:
            return target_modules(targets)
    found = [rf".*\.{name}" for name in _module_names(sorted(parts))]
    for part in sorted(layers.keys() - parts):
        numbers = "|".join(str(layer) for layer in sorted(each for each in layers[part] if each is not None))
        found += [rf".*\.layers\.(?:{numbers})\.(?:.*\.)?{name}" for name in _module_names([part])]
    return found


class TELoRAModel(DecoderLoRA, LoRAModel):
    """PaddleNLP's LoRAModel (save_pretrained, from_pretrained, merge, unmerge) around a model with our layers.

    lora_config.target_modules are matched against the names of the parts (`models.lora`), as against native
    projections. Raises ValueError for settings that LoRA on our layers does not have, or when nothing matches.

    Where sharding's ranks divide the experts, the first of them saves the A and B of all.
    """

    def get_trainable_state_dict(self, *arguments: Any, **options: Any) -> dict[str, Tensor]:
        """Return {name: what is trained}, of all experts. Collective over the ranks that divide these."""
        state = super().get_trainable_state_dict(*arguments, **options)
        return {name: all_experts(value) if _EXPERTS in name else value for name, value in state.items()}

    def save_pretrained(self, save_directory: str, merge_tensor_parallel: bool = False, **options: Any) -> None:
        """Save as PaddleNLP does. Collective over the ranks that divide the experts."""
        parts, mine = experts_share()
        if mine:
            self.get_trainable_state_dict()  # the first one gathers
            return
        if parts > 1:
            words = [word for word in (options.get("variant") or "").split("_") if word and not word.startswith("ep")]
            options["variant"] = "_".join(words) or None
        super().save_pretrained(save_directory, merge_tensor_parallel, **options)


def lora_model_class(backend: str) -> Any:
    """Return PaddleNLP's LoRAModel for backend "none", ours for the others."""
    return LoRAModel if backend == "none" else TELoRAModel


def lora_config(adapter: Adapter, dtype: str | None = None, tensor_parallel_degree: int = -1) -> HostConfig:
    """Return the LoRAConfig of an adapter, for the projections of any backend."""
    return LoRAConfig(
        target_modules=target_modules(adapter.targets),
        r=adapter.rank,
        lora_alpha=adapter.numerator,
        lora_dropout=adapter.dropout,
        rslora=adapter.rslora,
        lora_plus_scale=adapter.plus_scale,
        dtype=dtype,
        tensor_parallel_degree=tensor_parallel_degree,
    )


def load_lora(
    model: HostModel, folder: str | Path, backend: str, verify: str = FULL, plus_scale: float = Adapter.plus_scale
) -> HostModel:
    """Return the LoRAModel around `model` with the adapter in `folder`.

    The adapter is PEFT's, PaddleFormers', or PaddleNLP's of any backend and in any degrees. All processes call it.

    verify: how much of the folder's manifest, if it has one, is compared first. plus_scale: B's learning rate
    over A's in further training. Raises CheckpointError where there is no adapter, or that of another model, and for
    files that are damaged or would run code when they are loaded.
    """
    verification(verify).check(folder)
    config, dims = model.config, Dims(spec_of(model.config))
    adapter = open_adapter(folder, family_of(config))
    check_fits(adapter, dims, "this run's model", is_tied(config))
    check_trainable(adapter)
    lora = lora_model_class(backend)(model, _config_of(adapter, model, plus_scale))
    _set_adapter(lora, adapter)
    return lora


def read_lora(lora: HostModel, folder: str | Path) -> None:
    """Give a LoRAModel the A and B that a run with the same settings has saved in a folder. All processes call it.

    Raises CheckpointError as `load_lora`.
    """
    adapter, config = open_adapter(folder, family_of(lora.model.config)), lora.model.config
    check_fits(adapter, Dims(spec_of(config)), "this run's model", is_tied(config))
    _set_adapter(lora, adapter)


def _set_adapter(lora: HostModel, adapter: Saved) -> None:
    """Give each rank its share of an Adapter."""
    config = lora.model.config
    degree, rank = max(config.tensor_parallel_degree, 1), max(config.tensor_parallel_rank, 0)
    whole = shares(adapter, form_for(layout_of(config)), Dims(spec_of(config)), degree, rank)
    mine = {name: _own(array, degree, rank) if _EXPERTS in name else array for name, array in whole}
    _set_weights(lora, mine, adapter.folder)


def _own(array: NDArray[Any], degree: int, rank: int) -> NDArray[Any]:
    """Return the rows of this rank's experts, which tensor parallel ranks divide, or sharding's."""
    size = len(array) // degree
    return own_experts(array[rank * size : (rank + 1) * size])


def _config_of(adapter: Saved, model: HostModel, plus_scale: float) -> HostConfig:
    """Return the LoRAConfig of an Adapter on a model, whose own dtype may be another than its config.json's."""
    settings, config = adapter.settings, model.config
    dtype = next(weight.dtype for weight in model.parameters() if weight.is_floating_point())
    return LoRAConfig(
        target_modules=_targets_of(adapter, config.num_hidden_layers),
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        rslora=settings.rslora,
        lora_plus_scale=plus_scale,
        dtype=str(dtype).removeprefix("paddle."),
        tensor_parallel_degree=config.tensor_parallel_degree,
        base_model_name_or_path=settings.base,
    )


def _set_weights(lora: HostModel, arrays: Mapping[str, NDArray[Any]], folder: str | Path) -> None:
    """set_state_dict skips what it does not find: an adapter of other layers would do nothing."""
    own = {name: weight for name, weight in lora.model.state_dict().items() if "lora_" in name}
    if getattr(lora, "is_pipelinemodel", False):
        arrays = {name: array for name, array in arrays.items() if name in own}  # others are of other stages
    if different := sorted(own.keys() ^ arrays.keys()):
        raise CheckpointError(f"{folder}: not an adapter for this model's layers (for instance {different[0]})")
    for name, array in arrays.items():
        if list(array.shape) != list(own[name].shape):
            raise CheckpointError(
                f"{folder}: {name} has shape {list(array.shape)}, in this model {list(own[name].shape)}"
            )
    lora.set_state_dict({name: on_device(array).astype(own[name].dtype) for name, array in arrays.items()})
