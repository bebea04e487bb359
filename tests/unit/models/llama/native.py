"""PaddleNLP's own Llama layer as the reference: the weights of one in the other's layout, written out by hand."""

import numpy as np
import paddle
from paddlenlp.transformers import LlamaConfig


def tiny_config(**kwargs):
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
    return LlamaConfig(**(base | kwargs))


def draw_adapters(model):
    """Random numbers for A and B of a LoRA model, of which PaddleNLP makes B zeros."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.set_value(0.1 * paddle.randn(parameter.shape))


def te_weights(native):
    """{te parameter name below `transformer`: array} of a PaddleNLP decoder layer's weights."""
    get = {name: value.numpy() for name, value in native.state_dict().items()}

    def stacked(*names):
        return np.concatenate([get[name] for name in names], 1).T

    attention = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
    return {
        "self_attention.layernorm_qkv.ln_weight": get["input_layernorm.weight"],
        "self_attention.layernorm_qkv.weight": stacked(*attention),
        "self_attention.proj.weight": get["self_attn.o_proj.weight"].T,
        "layernorm_mlp.ln_weight": get["post_attention_layernorm.weight"],
        "layernorm_mlp.fc1_weight": stacked("mlp.gate_proj.weight", "mlp.up_proj.weight"),
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
    """Loads a PaddleNLP decoder layer's weights into a TELlamaDecoderLayer."""
    weights = te_weights(native)
    parameters = dict(ours.transformer.named_parameters())
    assert parameters.keys() == weights.keys()
    for name, value in weights.items():
        parameters[name].set_value(paddle.to_tensor(np.ascontiguousarray(value)))


def copy_model(native, ours):
    """Loads a PaddleNLP LlamaForCausalLM's weights into ours."""
    for source, target in zip(native.llama.layers, ours.llama.layers, strict=True):
        copy_layer(source, target)
    theirs = dict(native.named_parameters())
    for name, parameter in ours.named_parameters():
        if ".layers." not in name:
            parameter.set_value(theirs[name])


def relative(got, want):
    """‖got - want‖ / ‖want‖."""
    got, want = (np.asarray(t, "float64") for t in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)
