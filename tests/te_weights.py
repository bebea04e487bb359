"""What the tests of every host share: a small model's sizes, its weights in both layouts, and a comparison.

The weights of a host's own decoder layers are put into the layout of ours by hand, independently of the package's
tables. `relative` compares what both compute.

Hosts call the parts of Llama's layers alike.
"""

import numpy as np
import paddle

from tests.sizes import TINY

SIZES = TINY | dict(vocab_size=96, intermediate_size=112, rms_norm_eps=1e-5, use_cache=False)
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
    """{te parameter name below `transformer`: array} of a host's decoder layer."""
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
    """Loads the weights of a host's decoder layer into ours."""
    weights = te_weights(native)
    parameters = dict(ours.transformer.named_parameters())
    assert parameters.keys() == weights.keys()
    for name, value in weights.items():
        parameter = parameters[name]
        parameter.set_value(paddle.to_tensor(np.ascontiguousarray(value)).astype(parameter.dtype))


def relative(got, want):
    """‖got - want‖ / ‖want‖."""
    got, want = (np.asarray(t, "float64") for t in (got, want))
    assert got.shape == want.shape
    return np.linalg.norm(got - want) / np.linalg.norm(want)
