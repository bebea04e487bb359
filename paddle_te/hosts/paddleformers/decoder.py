"""Llama's decoder layer in the place of PaddleFormers'."""

from typing import Any

from paddle import Tensor

from paddle_te.host import HostConfig
from paddle_te.hosts.paddleformers.checkpoints import sharded_state_dict
from paddle_te.hosts.paddleformers.configuration import decoder_config
from paddle_te.layers.context import Context, KeyValue
from paddle_te.models.decoder import DecoderLayer
from paddle_te.models.pipeline import InPipeline
from paddle_te.ops import documents


class TELlamaDecoderLayer(DecoderLayer):
    """In place of PaddleFormers' LlamaDecoderLayer.

    config: PaddleFormers'. layer_idx: the layer's place in the model, which is its place in a cache.
    """

    def __init__(self, config: HostConfig, layer_idx: int) -> None:
        super().__init__(decoder_config(config))
        self.layer_idx = layer_idx

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_startend_row_indices: Tensor | None = None,
        position_ids: Tensor | None = None,
        position_embeddings: object = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        is_first_microbatch: bool | None = None,
    ) -> Tensor:
        """hidden_states [b, s, h] ([b·s/tp, h] under sequence parallelism) -> the same shape.

        attention_mask: additive, [b, 1, s, keys]. attn_mask_startend_row_indices: where packed documents end, int32
        [b, 1, s, 1]; NotImplementedError for other patterns in it. position_ids: int64 [b, s]. position_embeddings:
        the host's (cos, sin), which are not read: the angles come from position_ids. past_key_values: the host's
        Cache, to which the keys and values of these tokens are added; use_cache adds nothing to that.
        """
        cached = past_key_values is not None
        context = Context(
            attention_mask=attention_mask,
            is_first_microbatch=is_first_microbatch,
            past_key_value=_keys_and_values(past_key_values, self.layer_idx) if cached else None,
            use_cache=cached,
            cu_seqlens=documents.boundaries(attn_mask_startend_row_indices),
            position_ids=position_ids,
        )
        out = self.compute(hidden_states, context)
        if isinstance(out, Tensor):
            return out
        out, present = out
        new = [tensor[:, -hidden_states.shape[1] :].transpose([0, 2, 1, 3]) for tensor in present]
        past_key_values.update(*new, self.layer_idx)
        return out

    def sharded_state_dict(self, structured_name_prefix: str = "") -> dict[str, Any]:
        """Return Paddle's, of the weights that tensor parallel ranks share as well."""
        if self.config.tensor_parallel_degree > 1:
            return sharded_state_dict(self, structured_name_prefix)
        return super().sharded_state_dict(structured_name_prefix)


class TELlamaDecoderLayerPipe(InPipeline, TELlamaDecoderLayer):  # type: ignore[misc]  # its forward takes a tuple
    """In place of PaddleFormers' pipeline layer; see `InPipeline`."""

    def __init__(self, config: HostConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.recompute = config.recompute_granularity, config.recompute_method, config.recompute_num_layers

    def recomputes_whole(self) -> bool:
        """Read the configuration as PaddleFormers' own layers do."""
        return self.recompute == ("full", "uniform", 1)


def _keys_and_values(cache: Any, layer: int) -> KeyValue | None:
    """Return (k, v) of a layer, each [b, past, kv heads, d], in a PaddleFormers Cache; None where it has none yet."""
    if not cache.get_seq_length(layer):
        return None
    held = cache.layers[layer]
    return held.keys.transpose([0, 2, 1, 3]), held.values.transpose([0, 2, 1, 3])
