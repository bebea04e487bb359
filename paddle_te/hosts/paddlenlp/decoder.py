"""Decoder layers in the place of PaddleNLP's, plain and pipeline: what families share.

A family says what PaddleNLP calls its layers with.
"""

import paddle

from paddle_te.distributed import recompute
from paddle_te.models.decoder import DecoderLayer, MicroBatches
from paddle_te.ops import documents
from paddle_te.ops.kept import copy_with_kept

# In place of position_ids where positions are 0, 1, 2, ... or follow the cache: PaddleNLP's model would turn None into
# numbers for each sequence, and those into angles for each sequence.
FROM_ZERO = False
FLASH_MASK = "attn_mask_startend_row_indices"  # PaddleNLP's name for where the documents of a packed sequence end


class TEDecoderLayer(DecoderLayer):
    """In place of PaddleNLP's decoder layer.

    further: what PaddleNLP's layer takes after use_cache, in its order. layerwise_recompute: whether this layer may be
    computed again; PaddleNLP's models say it of each layer, or not at all.
    """

    further = ()

    def __init__(self, config, layerwise_recompute=True, skip_recompute_ops=None):
        if skip_recompute_ops and any(skip_recompute_ops.values()):
            raise ValueError("refined recompute (--refined_recompute) is not supported by backends pd and te")
        super().__init__(config)
        # read by PaddleNLP: the Trainer switches enable_recompute on, the model's loop looks at the others
        self.enable_recompute = False
        self.layerwise_recompute = layerwise_recompute
        self.recompute_granularity = config.recompute_granularity
        self.skip_recompute_ops = {}

    def forward(
        self,
        hidden_states,
        position_ids=None,
        attention_mask=None,
        output_attentions=False,
        past_key_value=None,
        use_cache=False,
        *further,
        is_first_microbatch=None,
        npu_is_casual=False,
        **others,
    ):
        """hidden_states [b, s, h] ([b·s/tp, h] under sequence parallelism) -> the same shape. Where ranks share
        sequences (config's sep_ or context_parallel_degree), they have this rank's tokens, and all else is of whole
        sequences.

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
        return self.compute(
            hidden_states,
            None if position_ids is FROM_ZERO else position_ids,
            attention_mask,
            past_key_value=past_key_value,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            recompute_core_attention=core_attn,
            is_first_microbatch=is_first_microbatch,
        )


def _by_name(tensors):
    """{name: tensor} of what travels with hidden_states in PaddleNLP's pipelines, in its order.

    PaddleNLP leaves out what is None, so that only dtypes tell what is there. Raises NotImplementedError for others.
    """
    names, found = {paddle.int32: FLASH_MASK, paddle.int64: "position_ids"}, {}
    tensors = [tensor for tensor in tensors if tensor is not None]
    for tensor in tensors:
        name = "attention_mask" if tensor.is_floating_point() else names.get(tensor.dtype)
        if name is None or name in found:
            raise NotImplementedError(
                f"pipelines of backends pd and te do not take {[str(t.dtype) for t in tensors]} beside hidden_states, "
                "only an additive attention_mask, int32 attn_mask_startend_row_indices and int64 position_ids"
            )
        tensor.stop_gradient = True
        found[name] = tensor
    return found


class TEDecoderLayerPipe(TEDecoderLayer):
    """In place of PaddleNLP's pipeline layer: arguments travel between stages as a tuple."""

    def __init__(self, config, layerwise_recompute=True, skip_recompute_ops=None):
        super().__init__(config, layerwise_recompute, skip_recompute_ops)
        self._micro_batches = MicroBatches()

    def forward(self, args):
        """args: hidden_states, or a tuple of them with any of additive attention_mask [b, 1, s, s], int32
        attn_mask_startend_row_indices [b, 1, s] and int64 position_ids [b, s] -> the same of the output.

        Raises NotImplementedError for what else PaddleNLP's tuple may hold.
        """
        hidden_states, *others = args if isinstance(args, tuple) else (args,)
        others = _by_name(others)
        first = self._micro_batches.is_first(self.training)
        full = self.enable_recompute and self.layerwise_recompute and self.recompute_granularity == "full"
        run = super().forward
        if full and not hidden_states.stop_gradient:
            out = recompute(run, hidden_states, is_first_microbatch=first, **others)
        else:
            out = run(hidden_states, is_first_microbatch=first, **others)
        # copies, because a pipeline lets go of what a stage has sent
        return (out, *map(copy_with_kept, others.values())) if others else out
