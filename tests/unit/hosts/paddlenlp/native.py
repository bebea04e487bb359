"""PaddleNLP's own layers as the reference: the weights of one in the other's layout, written out by hand."""

import numpy as np
import paddle
from paddlenlp.transformers import GPTConfig, LlamaConfig, MistralConfig, Qwen2Config
from paddlenlp.transformers.gpt import modeling as gpt
from paddlenlp.transformers.llama import modeling as llama
from paddlenlp.transformers.mistral import modeling as mistral
from paddlenlp.transformers.qwen2 import modeling as qwen2

from paddle_te.configs.families import family_of
from paddle_te.hosts.paddlenlp import model_class

FAMILIES = {
    "llama": (LlamaConfig, llama),
    "qwen2": (Qwen2Config, qwen2),
    "mistral": (MistralConfig, mistral),
    "gpt": (GPTConfig, gpt),
}
GPTS = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, ignore_index=-100, num_key_value_heads=None)


def tiny_config(family="llama", **kwargs):
    base = dict(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        seq_length=24,
        rms_norm_eps=1e-5,
        use_cache=False,
        transformer_engine_backend="paddle",
        recompute_use_reentrant=True,
    )
    make, _ = FAMILIES[family]
    return make(**(base | (GPTS if family == "gpt" else {}) | kwargs))


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


# PaddleNLP's GPT: its names, and Llama's for the same
GPTS_NAMES = {
    f"{gpts}.{kind}": f"{llamas}.{kind}"
    for gpts, llamas in {
        "norm1": "input_layernorm",
        "self_attn.out_proj": "self_attn.o_proj",
        "norm2": "post_attention_layernorm",
        "linear1": "mlp.up_proj",
        "linear2": "mlp.down_proj",
    }.items()
    for kind in ("weight", "bias")
}
OTHER_BIASES = {
    "input_layernorm.bias": "self_attention.layernorm_qkv.ln_bias",
    "self_attn.o_proj.bias": "self_attention.proj.bias",
    "post_attention_layernorm.bias": "layernorm_mlp.ln_bias",
    "mlp.up_proj.bias": "layernorm_mlp.fc1_bias",
    "mlp.down_proj.bias": "layernorm_mlp.fc2_bias",
}


def te_weights(native):
    """{te parameter name below `transformer`: array} of a PaddleNLP decoder layer's weights."""
    get = {GPTS_NAMES.get(name, name): value.numpy() for name, value in native.state_dict().items()}

    def stacked(*names):
        return np.concatenate([get[name] for name in names], -1).T

    attention = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
    biases = [name for name in (f"self_attn.{part}_proj.bias" for part in "qkv") if name in get]
    bias = {"self_attention.layernorm_qkv.bias": stacked(*biases)} if biases else {}
    fc1 = [name for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight") if name in get]
    bias |= {ours: get[theirs] for theirs, ours in OTHER_BIASES.items() if theirs in get}
    return bias | {
        "self_attention.layernorm_qkv.ln_weight": get["input_layernorm.weight"],
        "self_attention.layernorm_qkv.weight": stacked(*attention),
        "self_attention.proj.weight": get["self_attn.o_proj.weight"].T,
        "layernorm_mlp.ln_weight": get["post_attention_layernorm.weight"],
        "layernorm_mlp.fc1_weight": stacked(*fc1),
        "layernorm_mlp.fc2_weight": get["mlp.down_proj.weight"].T,
    }


def te_gradients(native):
    """The same for the gradients."""
    grads = {name: parameter.grad for name, parameter in native.named_parameters()}

    class Gradients:
        def state_dict(self):
            return grads

    return te_weights(Gradients())


def randomise(layer, generator):
    """Fresh values for every parameter, norms around one."""
    for name, parameter in layer.named_parameters():
        value = generator.standard_normal(parameter.shape).astype("float32")
        value = 1 + 0.1 * value if "norm" in name and parameter.ndim == 1 else 0.1 * value
        parameter.set_value(paddle.to_tensor(value).astype(parameter.dtype))


def copy_layer(native, ours):
    """Loads a PaddleNLP decoder layer's weights into a TEDecoderLayer."""
    weights = te_weights(native)
    parameters = dict(ours.transformer.named_parameters())
    assert parameters.keys() == weights.keys()
    for name, value in weights.items():
        parameters[name].set_value(paddle.to_tensor(np.ascontiguousarray(value)))


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


def relative(got, want):
    """‖got - want‖ / ‖want‖."""
    got, want = (np.asarray(t, "float64") for t in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)
