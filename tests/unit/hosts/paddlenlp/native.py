"""PaddleNLP's own models as the reference, and ours with the same weights."""

import paddle
from paddlenlp.transformers import GPTConfig, LlamaConfig, MistralConfig, Qwen2Config
from paddlenlp.transformers.gpt import modeling as gpt
from paddlenlp.transformers.llama import modeling as llama
from paddlenlp.transformers.mistral import modeling as mistral
from paddlenlp.transformers.qwen2 import modeling as qwen2

from paddle_te.configs.families import family_of
from paddle_te.hosts.paddlenlp.families import model_class
from tests.sizes import GPTS
from tests.te_weights import SIZES, copy_layer

FAMILIES = {
    "llama": (LlamaConfig, llama),
    "qwen2": (Qwen2Config, qwen2),
    "mistral": (MistralConfig, mistral),
    "gpt": (GPTConfig, gpt),
}


def tiny_config(family="llama", **kwargs):
    own = dict(seq_length=24, transformer_engine_backend="paddle", recompute_use_reentrant=True)
    make, _ = FAMILIES[family]
    return make(**(SIZES | own | (GPTS if family == "gpt" else {}) | kwargs))


def paddlenlps(config, what):
    """PaddleNLP's class of a configuration's family, such as its DecoderLayer."""
    _, modeling = FAMILIES[config.model_type]
    return getattr(modeling, f"{family_of(config).title}{what}")


def two_models(family="llama", **kwargs):
    """PaddleNLP's model and ours, with the same random weights, biases too."""
    config = tiny_config(family, **kwargs)
    native, ours = paddlenlps(config, "ForCausalLM")(config), model_class(config)(tiny_config(family, **kwargs))
    for name, parameter in native.named_parameters():
        if name.endswith("bias"):  # PaddleNLP makes them zeros
            parameter.set_value(paddle.randn(parameter.shape))
    copy_model(native, ours)
    return native, ours


def draw_adapters(model):
    """Random numbers for A and B of a LoRA model, of which PaddleNLP makes B zeros."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.set_value(0.1 * paddle.randn(parameter.shape))


def decoder_layers(model):
    """A PaddleNLP model's, or those of ours."""
    base = getattr(model, model.base_model_prefix)
    return (base.decoder if hasattr(base, "decoder") else base).layers


def copy_model(native, ours):
    """Loads the weights of a PaddleNLP model into ours."""
    for source, target in zip(decoder_layers(native), decoder_layers(ours), strict=True):
        copy_layer(source, target)
    theirs = dict(native.named_parameters())
    for name, parameter in ours.named_parameters():
        if ".layers." not in name:
            parameter.set_value(theirs[name])
