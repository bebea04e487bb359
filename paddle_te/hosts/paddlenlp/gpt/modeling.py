"""GPT's models, plain and pipeline."""

from paddle import Tensor
from paddlenlp.transformers.gpt import modeling, modeling_pp

from paddle_te.hosts.paddlenlp.gpt.decoder import TEGPTDecoderLayer, TEGPTDecoderLayerPipe
from paddle_te.hosts.paddlenlp.modeling import TEForCausalLMPipe
from paddle_te.hosts.paddlenlp.own_forward import OwnForward, OwnForwardForCausalLM, given
from paddle_te.hosts.paddlenlp.positions import Positions, positions_of


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
        return self.embeddings(input_ids, positions_of(self.config, shape, position_ids, past), inputs_embeds)


class GPTForCausalLM(OwnForwardForCausalLM, modeling.GPTForCausalLM):
    """See `OwnForwardForCausalLM`."""

    host_module, decoder_class, base = modeling, TEGPTDecoderLayer, _GPTModel


class GPTForCausalLMPipe(TEForCausalLMPipe, modeling_pp.GPTForCausalLMPipe):
    """See `TEForCausalLMPipe`."""

    host_module, decoder_class = modeling_pp, TEGPTDecoderLayerPipe
