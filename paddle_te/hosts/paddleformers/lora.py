"""PaddleFormers' LoRAModel around a model with our decoder layers.

Adapters have the names of PaddleFormers' own layers in their files, whichever backend made them: each backend reads
them, and `python -m paddle_te.hosts.paddleformers export` merges them into the weights.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Self

import paddle.distributed as dist
from paddleformers.peft import LoRAConfig, LoRAModel
from paddleformers.utils.env import FLEX_CKPT_AUTO_GENERATED_METADATA, SAFE_PEFT_WEIGHTS_INDEX_NAME

from paddle_te.host import HostConfig, HostModel
from paddle_te.hosts.paddleformers.checkpoints import lora_names
from paddle_te.models.lora import DecoderLoRA


class TELoRAModel(DecoderLoRA, LoRAModel):
    """In place of PaddleFormers' LoRAModel.

    lora_config.target_modules are matched against the names of the parts (`models.lora`), as against native
    projections. Raises ValueError for settings that LoRA on our layers does not have, or when nothing matches.
    """

    @classmethod
    def from_pretrained(
        cls, model: HostModel, lora_path: str | Path, lora_config: HostConfig | None = None, **kwargs: Any
    ) -> Self:
        """Return the model with the adapter in the folder lora_path, not merged.

        kwargs: PaddleFormers' others, of which only load_via_cpu counts. Raises FileNotFoundError where there is no
        adapter, and ValueError for one of other layers than lora_config.json names.
        """
        names = _names_in(lora_path)
        lora = cls(model, lora_config or LoRAConfig.from_pretrained(str(lora_path)))
        lora.load_adapter(lora_path, names, kwargs.get("load_via_cpu", False))
        return lora

    def load_adapter(self, folder: str | Path, names: set[str], load_via_cpu: bool = False) -> None:
        """Load the weights of an adapter, which are called `names` in the folder's files."""
        stored = {ours: theirs for ours, theirs in lora_names(self.model).items() if ours in self._trained()}
        if set(stored.values()) != names:
            example = sorted(set(stored.values()) ^ names)[0]
            raise ValueError(f"{folder}: the adapter's weights are not those of this model (for instance {example})")
        # PaddleFormers makes this file of the others, and would go on with one of an older adapter
        (Path(folder) / FLEX_CKPT_AUTO_GENERATED_METADATA).unlink(missing_ok=True)
        weights = self.sharded_state_dict()
        dist.load_state_dict(
            {name: weights[name] for name in stored},
            path=str(folder),
            aoa_config={"aoa_statements": [_cast(theirs, ours, weights[ours]) for ours, theirs in stored.items()]},
            safetensors=True,
            offload=load_via_cpu,
        )

    def _trained(self) -> Collection[str]:
        return self.get_trainable_state_dict().keys()


def _cast(theirs: str, ours: str, weight: Any) -> str:
    """Return the statement with which a weight of an adapter's files becomes the model's, in the model's dtype."""
    return f"{theirs} -> {ours}, dtype='{str(weight.local_tensor.dtype).removeprefix('paddle.')}'"


def _names_in(folder: str | Path) -> set[str]:
    """Return the names of the weights of an adapter. Raise FileNotFoundError where there is none."""
    index = Path(folder) / SAFE_PEFT_WEIGHTS_INDEX_NAME
    if not index.is_file():
        raise FileNotFoundError(f"{index}: no such file; {folder} holds no LoRA adapter of format flex_checkpoint")
    return set(json.loads(index.read_text())["weight_map"])
