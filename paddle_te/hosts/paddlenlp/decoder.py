"""Decoder layers in the place of PaddleNLP's, plain and pipeline: what families share.

A family says what PaddleNLP calls its layers with.
"""

from collections.abc import Mapping
from typing import Any, Literal

from paddle import Tensor

from paddle_te.host import HostConfig
from paddle_te.layers.context import Context, KeyValue
from paddle_te.models.decoder import DecoderLayer
from paddle_te.models.pipeline import FLASH_MASK, InPipeline
from paddle_te.ops import documents

# In place of position_ids where positions are 0, 1, 2, ... or follow the cache: PaddleNLP's model would turn None into
# numbers for each sequence, and those into angles for each sequence.
FROM_ZERO: Literal[False] = False


class TEDecoderLayer(DecoderLayer):
    """In place of PaddleNLP's decoder layer.

    further: what PaddleNLP's layer takes after use_cache, in its order. layerwise_recompute: whether this layer may be
    computed again; PaddleNLP's models say it of each layer, or not at all. number: as DecoderLayer's.
    """

    further: tuple[str, ...] = ()

    def __init__(
        self,
        config: HostConfig,
        layerwise_recompute: bool = True,
        skip_recompute_ops: Mapping[str, object] | None = None,
        number: int = 0,
    ) -> None:
        if skip_recompute_ops and any(skip_recompute_ops.values()):
            raise ValueError("refined recompute (--refined_recompute) is not supported by backends pd and te")
        super().__init__(config, number)
        # read by PaddleNLP: the Trainer switches enable_recompute on, the model's loop looks at the others
        self.enable_recompute = False
        self.layerwise_recompute = layerwise_recompute
        self.recompute_granularity = config.recompute_granularity
        self.skip_recompute_ops: dict[str, object] = {}

    def forward(
        self,
        hidden_states: Tensor,
        position_ids: Tensor | Literal[False] | None = None,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = False,
        past_key_value: KeyValue | None = None,
        use_cache: bool = False,
        *further: Any,
        is_first_microbatch: bool | None = None,
        npu_is_casual: bool = False,
        **others: Any,
    ) -> Tensor | tuple[Tensor, KeyValue]:
        """hidden_states [b, s, h] ([b·s/tp, h] under sequence parallelism) -> the same shape.

        Where ranks share sequences (config's sep_ or context_parallel_degree), they have this rank's tokens,
        and all else is of whole sequences.

        position_ids: [b, s], or None or FROM_ZERO for tokens that follow past_key_value (or nothing).
        past_key_value: (k, v), each [b, past, kv heads, d]. use_cache: return (output, (k, v)), x's appended.
        attn_mask_startend_row_indices: where packed documents end, int32 [b, 1, s]; or their cu_seqlens, int32
        [documents + 1], which spares waiting for numbers on the device (`ops.documents`).
        Raises NotImplementedError for what the layer does not have, unless it is None or False.
        """
        others |= dict(zip(self.further, further, strict=False), output_attentions=output_attentions)
        cu_seqlens = documents.boundaries(others.pop(FLASH_MASK, None))
        for name, value in others.items():
            if value is not None and value is not False:
                raise NotImplementedError(f"{name} is not supported by the decoder layers of backends pd and te")
        core_attn = self.enable_recompute and self.layerwise_recompute and self.recompute_granularity == "core_attn"
        context = Context(
            attention_mask=attention_mask,
            recompute_core_attention=core_attn,
            is_first_microbatch=is_first_microbatch,
            past_key_value=past_key_value,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            position_ids=position_ids if isinstance(position_ids, Tensor) else None,
        )
        return self.compute(hidden_states, context)


class TEDecoderLayerPipe(InPipeline, TEDecoderLayer):  # type: ignore[misc]  # its forward takes a tuple
    """In place of PaddleNLP's pipeline layer; see `InPipeline`."""

    def recomputes_whole(self) -> bool:
        """Read PaddleNLP's flags: a pipeline recomputes layer by layer, or not at all."""
        return self.enable_recompute and self.layerwise_recompute and self.recompute_granularity == "full"
