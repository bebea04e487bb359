"""GPT's models, plain and pipeline."""

import paddle
from paddle import Tensor
from paddlenlp.transformers.gpt import modeling, modeling_pp

from paddle_te.hosts.paddlenlp.decoder import FROM_ZERO
from paddle_te.hosts.paddlenlp.families import check_positions
from paddle_te.hosts.paddlenlp.gpt.decoder import TEGPTDecoderLayer, TEGPTDecoderLayerPipe
from paddle_te.hosts.paddlenlp.modeling import TEForCausalLMPipe
from paddle_te.hosts.paddlenlp.own_forward import OwnForward, OwnForwardForCausalLM, Positions, given


class _GPTModel(OwnForward):
    """Mixed into PaddleNLP's GPTModel."""

    stack = property(lambda self: self.decoder)

    def taken_over(self) -> None:
        """Let go of the mask [1, 1, positions, positions] that PaddleNLP's constructor makes and nobody wants."""
        super().taken_over()
        self.bias = None

    def embed(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, position_ids: Positions, past: int
    ) -> Tensor:
        """Embed with the learned positions. Raise ValueError for more tokens than there are."""
        shape = given(input_ids, inputs_embeds).shape[:2]
        check_positions(self.config, past + shape[1])
        if position_ids is None or position_ids is FROM_ZERO:
            position_ids = paddle.arange(past, past + shape[1], dtype="int64").unsqueeze(0).expand(shape)
        return self.embeddings(input_ids, position_ids, inputs_embeds)


class GPTForCausalLM(OwnForwardForCausalLM, modeling.GPTForCausalLM):
    """See `OwnForwardForCausalLM`."""

    host_module, decoder_class, base = modeling, TEGPTDecoderLayer, _GPTModel


class GPTForCausalLMPipe(TEForCausalLMPipe, modeling_pp.GPTForCausalLMPipe):
    """See `TEForCausalLMPipe`."""

    host_module, decoder_class = modeling_pp, TEGPTDecoderLayerPipe
