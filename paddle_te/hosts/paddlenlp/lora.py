"""LoRA in PaddleNLP: its LoRAModel around native layers or ours (`models.lora`), its files, and merged checkpoints."""

from pathlib import Path

import paddle
from paddlenlp.peft import LoRAConfig, LoRAModel
from paddlenlp.utils.env import LORA_CONFIG_NAME, LORA_WEIGHTS_NAME

from paddle_te.hosts.paddlenlp.loading import on_device, read_share, verification
from paddle_te.layers import stored_weights
from paddle_te.layers.lora import WithLoRA
from paddle_te.models.lora import TARGETS, DecoderLoRA
from paddle_te.weights import check_contents
from paddle_te.weights.folder import open_checkpoint
from paddle_te.weights.names import FUSED, NATIVE
from paddle_te.weights.verification import FULL


def target_modules(targets):
    """LoRAConfig's target_modules for "all", "attention" or "mlp", for every backend, native weights fused or not."""
    if targets not in TARGETS:
        raise ValueError(f"lora_targets={targets!r}; it may be {', '.join(TARGETS)}")
    parts = {name.removesuffix("_proj") for name in TARGETS[targets]}
    parts |= {module for module, held in FUSED.items() if parts.issuperset(held)}
    native = [module for names in NATIVE.values() for part, module in names.layer.items() if part in parts]
    return [rf".*\.{name}" for name in dict.fromkeys((*TARGETS[targets], *(name.split(".")[-1] for name in native)))]


class TELoRAModel(DecoderLoRA, LoRAModel):
    """PaddleNLP's LoRAModel (save_pretrained, from_pretrained, merge, unmerge) around a model with our layers.

    lora_config.target_modules are matched against the names of the parts (`models.lora`), as against native
    projections. Raises ValueError for settings that LoRA on our layers does not have, or when nothing matches.
    """


def lora_model_class(backend):
    """PaddleNLP's LoRAModel for backend "none", ours for the others."""
    return LoRAModel if backend == "none" else TELoRAModel


def lora_config(targets="all", r=32, lora_alpha=64, lora_dropout=0.0, dtype=None, tensor_parallel_degree=-1):
    """LoRAConfig for "all", "attention" or "mlp" projections of any backend. scaling = lora_alpha / r."""
    return LoRAConfig(
        target_modules=target_modules(targets),
        r=r,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        dtype=dtype,
        tensor_parallel_degree=tensor_parallel_degree,
    )


def load_lora(model, folder, backend, merge=True, verify=FULL):
    """`model` with the adapter in `folder` (LoRAModel.save_pretrained); merge adds it to the weights.

    verify: how much of the folder's manifest, if it has one, is compared first. Returns the model itself, or the
    LoRAModel around it where it is not merged. Raises FileNotFoundError where there is
    no adapter (PaddleNLP's from_pretrained would only log and go on), ValueError for the adapter of another backend,
    and CheckpointError, a ValueError, for files that are damaged or would run code when they are loaded.
    """
    for name in (LORA_CONFIG_NAME, LORA_WEIGHTS_NAME):
        if not (Path(folder) / name).is_file():
            raise FileNotFoundError(f"{Path(folder) / name}: no such file; {folder} holds no LoRA adapter")
    verification(verify).check(folder)
    for name in ("lora_model_state*", "peft_model*"):  # which of them PaddleNLP loads depends on what else is there
        for path in Path(folder).glob(name):
            check_contents(path)
    lora = lora_model_class(backend).from_pretrained(model, str(folder))
    _check_names(lora, folder)
    if not merge:
        return lora
    lora.merge()
    return lora.model


def _check_names(lora, folder):
    """set_state_dict skips what it does not find: an adapter of other layers would do nothing."""
    there = set(paddle.load(str(Path(folder) / LORA_WEIGHTS_NAME), return_numpy=True))
    wanted = {name for name in lora.model.state_dict() if "lora_" in name}
    if there != wanted:
        example = sorted(there ^ wanted)[0]
        raise ValueError(
            f"{folder}: the adapter's weights are not those of this model and backend (for instance {example}); "
            "LoRA of backend none fits native layers, that of paddle and transformer_engine theirs"
        )


def save_merged(lora, folder, base=None):
    """Adds the adapter to the weights and saves the model, as a checkpoint without LoRA, in `folder`. One process.

    base: the folder that the model was loaded from, for one whose weights exist in fp8 only: they are read there again
    and stay on the host, so that the merged ones are those of a model that was never quantized.
    """
    model = lora.model
    stored = stored_weights(model)
    if not stored:
        lora.merge()
    weights = {name: weight for name, weight in model.state_dict().items() if "lora_" not in name}
    for name, array in read_share(open_checkpoint(base), model.config, stored) if stored else ():
        layer, own_name = stored[name]
        weight = on_device(array).astype(layer.params_dtype)
        weights[name] = (layer.with_products(own_name, weight) if isinstance(layer, WithLoRA) else weight).cpu()
    model.save_pretrained(str(folder), state_dict=weights)
