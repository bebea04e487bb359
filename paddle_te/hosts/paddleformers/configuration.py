"""Read PaddleFormers' configurations, and refuse the settings that our decoder layers do not support."""

from types import SimpleNamespace

import paddle

from paddle_te.host import PADDLEFORMERS, HostConfig
from paddle_te.job import Job, check
from paddle_te.job.paddleformers import ITS_OWN, RECIPE
from paddle_te.job.rules import FORMERS_RULES, LAYER_RULES
from paddle_te.models.backend import check_backend
from paddle_te.options import LayerOptions

# What PaddleNLP and PaddleFormers call alike.
_SAME = (
    "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "max_position_embeddings vocab_size initializer_range rms_norm_eps rope_parameters sequence_parallel"
).split()
# PaddleFormers' word: PaddleNLP's
_TRANSLATED = {
    "tensor_model_parallel_size": "tensor_parallel_degree",
    "sep_parallel_size": "sep_parallel_degree",
    "context_parallel_size": "context_parallel_degree",
}
# What a configuration may say: the value that our layers compute, and what to do about another one
_ONLY = {
    "attention_bias": (False, "use backend none for this model"),
    "mlp_bias": (False, "use backend none for this model"),
    "attention_dropout": (0.0, "leave it at 0"),
    "hidden_act": ("silu", "use backend none for this model"),
}


def check_config(config: HostConfig, keeps_fp8_state: bool = False) -> None:
    """Raise ValueError for what a PaddleFormers configuration asks for and our layers do not have in this host.

    Raises what `models.backend.check_backend` raises where the backend cannot run in Paddle's default dtype.

    keeps_fp8_state: whether the Trainer saves the state of delayed scaling, as `trainer.TETrainer` does.
    """
    check(_job_of(config), RECIPE, (*LAYER_RULES, *FORMERS_RULES))
    for name, (only, remedy) in _ONLY.items():
        value = getattr(config, name, only)
        if value is not None and value != only:
            raise ValueError(
                f"{name}={value!r}: backends paddle and transformer_engine have only {only!r} here; {remedy}"
            )
    if config.quantization_config.is_weight_quantize():
        raise ValueError(
            "weight_quantize_algo: backends paddle and transformer_engine quantize no weights; leave it out"
        )
    layers = LayerOptions.of(config)
    if layers.use_fp8 and layers.fp8_recipe == "delayed" and not keeps_fp8_state:
        raise ValueError(
            "fp8_recipe='delayed' (which is the default): PaddleFormers' own Trainer does not save its scaling state, "
            "so that a resumed run would part from itself; set fp8_recipe to 'current', which has no state, or train "
            "by a recipe with python -m paddle_te.hosts.paddleformers"
        )
    in_fp8 = layers.use_fp8 or _job_of(config).stores_input_in_fp8
    check_backend(config.transformer_engine_backend, paddle.get_default_dtype(), in_fp8)


def _job_of(config: HostConfig) -> Job:
    """Return the Job of a PaddleFormers configuration, as far as layers go."""
    whole, kind = config.recompute_granularity == "full", paddle.get_default_dtype()
    flags = vars(decoder_config(config)) | {"lora": getattr(config, "is_lora", False), "recompute": whole}
    flags |= {"recompute_granularity": "full", "bf16": kind == "bfloat16", "fp16": kind == "float16"}
    return Job.of({name: value for name, value in flags.items() if value is not None}, host=PADDLEFORMERS)


def decoder_config(config: HostConfig) -> SimpleNamespace:
    """Return a PaddleFormers configuration in PaddleNLP's words, with what `models.decoder` reads and no more.

    Its own parts of layers count where the host's recompute_granularity is "selective", as its Trainer has them.
    """
    theirs = {name: getattr(config, name) for name in _SAME}
    theirs |= {ours: getattr(config, name) for name, ours in _TRANSLATED.items()}
    theirs |= LayerOptions.said_by(config)
    if config.recompute_granularity != "selective":
        theirs |= dict.fromkeys(ITS_OWN)
    length = getattr(config, "max_sequence_length", None)  # a recipe says it, a configuration file does not
    # the layers of PaddleFormers read θ there as well; its config.rope_theta may have another value
    return SimpleNamespace(**theirs, seq_length=length, rope_theta=config.rope_parameters["rope_theta"])


def has_positions_elsewhere(config: HostConfig) -> bool:
    """Return whether a Llama's angles follow from more than config.rope_theta, all that the host's pipelines read."""
    rope = getattr(config, "rope_parameters", None) or {}
    scaled = rope.get("rope_type", "default") != "default" or rope.get("rope_theta") != config.rope_theta
    return config.model_type == "llama" and scaled
