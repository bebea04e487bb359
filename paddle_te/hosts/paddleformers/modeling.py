"""PaddleFormers' Llama with our decoder layers."""

from collections.abc import Mapping
from typing import Any

from paddleformers.nn.pp_model import CriterionLayerPipe, RMSNormPipe
from paddleformers.transformers.llama import modeling

from paddle_te.fp8 import bind_model
from paddle_te.host import HostClass, HostConfig
from paddle_te.hosts.paddleformers.checkpoints import load_statements, lora_names, save_statements
from paddle_te.hosts.paddleformers.configuration import check_config
from paddle_te.hosts.paddleformers.criterion import OurCriterion
from paddle_te.hosts.paddleformers.decoder import TELlamaDecoderLayer, TELlamaDecoderLayerPipe
from paddle_te.models.backend import check_backend_name, is_native
from paddle_te.models.in_16_bits import skip_outer_layers
from paddle_te.models.last_norm import LastNorm
from paddle_te.models.switch import replace_decoder_layers, take_over
from paddle_te.options.layers import FuseWgrad

PREFIX = f"{modeling.LlamaForCausalLM.base_model_prefix}."  # of the names of all but the head


class _LastNormPipe(LastNorm, RMSNormPipe):
    """A pipeline's last norm."""


class _OurCriterionPipe(OurCriterion, CriterionLayerPipe):
    """A pipeline's loss function."""


class _OurModel(HostClass):
    """What PaddleFormers' models with our decoder layers share, which config.transformer_engine_backend chooses.

    Their embedding, head and loss, their arguments and their checkpoints are PaddleFormers'. options: what a
    subclass puts into the configuration of each of its models. fuse_wgrad_accumulation: as LayerOptions', of the
    Trainer that trains the model; a config.json does not say it. keeps_fp8_state: `check_config`'s, which raises what
    the configuration cannot have.
    """

    options: Mapping[str, object] = {}
    fuse_wgrad_accumulation: FuseWgrad = False
    keeps_fp8_state = False

    def _prepare(self, config: HostConfig) -> None:
        for name, value in self.options.items():
            setattr(config, name, value)
        config.fuse_wgrad_accumulation = self.fuse_wgrad_accumulation
        config.register_unsavable_keys("fuse_wgrad_accumulation")
        check_config(config, self.keeps_fp8_state)

    @classmethod
    def _gen_aoa_config(cls, config: HostConfig) -> dict[str, Any]:
        return _with_our_layers(super()._gen_aoa_config(config), load_statements(config, PREFIX))

    @classmethod
    def _gen_inv_aoa_config(cls, config: HostConfig) -> dict[str, Any]:
        return _with_our_layers(super()._gen_inv_aoa_config(config), save_statements(config, PREFIX))

    def _gen_lora_inv_aoa_config(self, config: HostConfig) -> list[str]:
        """Return the statements that PaddleFormers asks for where it saves an adapter."""
        there = self.state_dict()
        return [f"{ours} -> {theirs}" for ours, theirs in lora_names(self).items() if ours in there]


class LlamaForCausalLM(_OurModel, modeling.LlamaForCausalLM):
    """PaddleFormers' model with our decoder layers; see `_OurModel`."""

    host_module, decoder_class = modeling, TELlamaDecoderLayer

    def __init__(self, config: HostConfig) -> None:
        self._prepare(config)
        # Only what the host makes of it matters: no [b, 1, s, s] mask where sequences are whole and causal.
        config._attn_implementation = "sdpa"
        with replace_decoder_layers(type(self)):
            super().__init__(config)
        take_over(self.model.norm, LastNorm)
        take_over(self.criterion, OurCriterion)
        bind_model(self)
        skip_outer_layers(self)


class LlamaForCausalLMPipe(_OurModel, modeling.LlamaForCausalLMPipe):
    """PaddleFormers' pipeline model with our decoder layers; see `_OurModel`."""

    _decoder_layer_pipe_cls = TELlamaDecoderLayerPipe
    _rms_norm_pipe_cls, _criterion_pipe_cls = _LastNormPipe, _OurCriterionPipe

    def __init__(self, config: HostConfig) -> None:
        self._prepare(config)
        # Then no cosines and sines travel between stages. PaddleFormers' would be without the rope scaling, too.
        config.apply_rope_fusion = True
        super().__init__(config)
        bind_model(self)
        skip_outer_layers(self)


def _with_our_layers(aoa_config: dict[str, Any], statements: list[str]) -> dict[str, Any]:
    """Return PaddleFormers' statements of what is outside of the layers, and ours of them."""
    outside = [statement for statement in aoa_config["aoa_statements"] if "$LAYER_ID" not in statement]
    return aoa_config | {"aoa_statements": outside + statements}


def model_class(config: HostConfig) -> Any:
    """Return the class of a configuration's model for its transformer_engine_backend; for none PaddleFormers' own.

    Raises ValueError for another backend, and for a model that is not a Llama.
    """
    check_backend_name(config.transformer_engine_backend)
    check_family(config)
    return modeling.LlamaForCausalLM if is_native(config) else LlamaForCausalLM


def check_family(config: HostConfig) -> None:
    """Raise ValueError for a configuration of another family than Llama."""
    if config.model_type != "llama":
        raise ValueError(
            f"model_type={config.model_type!r}: in PaddleFormers the backends are there for llama only; Qwen's models "
            "and most mixtures of experts are made there by paddlefleet, which is not on PyPI, and for which no layers "
            "of ours are made (docs/guides/paddleformers.md). For qwen2, mistral and gpt use PaddleNLP"
        )
