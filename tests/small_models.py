"""One small model of each family in several backends and precisions: pd in float32 on the CPU is the truth."""

import paddle

from paddle_te.configs.families import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    FAMILIES,
    GEMMA2,
    GEMMA3,
    GLAM,
    GLM4,
    GPT,
    GPT_OSS,
    GRANITE,
    GRANITE_MOE,
    MISTRAL,
    MIXTRAL,
    OLMOE,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3_MOE,
)
from paddle_te.fp8 import fp8_model_init
from paddle_te.hosts.paddlenlp.families import config_class, model_class
from paddle_te.layers import stored_weights
from tests.bfloat16 import truncated
from tests.sizes import GPTS, TINY

TE, PD = "transformer_engine", "paddle"
VOCABULARY = TINY["vocab_size"]
# Families that te computes; Gemma 2 without the soft cap of its scores, see OWN. Dense Granite has nothing that its
# mixture lacks.
TE_FAMILIES = tuple(name for name in FAMILIES if name != GRANITE.model_type)
# Families with experts. Where two experts are as good within rounding, backends may choose different ones, and the
# token's output makes a step.
MIXTURES = tuple(
    family.model_type
    for family in (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE, GLAM, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3)
)
MULTIPLIED = dict(embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.125, logits_scaling=2.0)
LORA_PARTS = {"all": 7, "attention": 4, "mlp": 3}  # matrices of a layer without latent attention
# Those whose models compute in fp8 here: of mixtures Qwen's with a shared expert, and GLaM with biases and GELU.
FP8_FAMILIES = tuple(name for name in TE_FAMILIES if name not in MIXTURES or name in ("qwen2_moe", "glam"))
FEW = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
# heads as DeepSeek's, for which cuDNN has attention
LATENT = dict(
    kv_lora_rank=64, q_lora_rank=None, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
    n_shared_experts=1, first_k_dense_replace=1,
)  # fmt: skip
# What a family has that Llama has not, beside its biases.
OWN = {
    QWEN2.model_type: dict(tie_word_embeddings=True),
    MISTRAL.model_type: dict(sliding_window=20),
    GLM4.model_type: dict(attention_bias=False),
    PHI3.model_type: dict(
        partial_rotary_factor=0.5,
        original_max_position_embeddings=32,
        rope_scaling=dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[1.0 + i for i in range(8)]),
    ),
    # heads of 256, one layer with a window and one without; te has no soft cap of the scores
    GEMMA2.model_type: dict(head_dim=64, sliding_window=20, attn_logit_softcapping=None, final_logit_softcapping=5.0),
    GEMMA3.model_type: dict(sliding_window=20, sliding_window_pattern=2),
    QWEN2_MOE.model_type: FEW | dict(shared_expert_intermediate_size=96),
    QWEN3_MOE.model_type: FEW,
    OLMOE.model_type: dict(num_experts=8, num_experts_per_tok=2),
    GRANITE.model_type: MULTIPLIED,
    GRANITE_MOE.model_type: MULTIPLIED | dict(num_local_experts=8),
    GLAM.model_type: dict(num_experts=8, num_key_value_heads=None),
    GPT_OSS.model_type: dict(sliding_window=20, num_local_experts=8, router_aux_loss_coef=0.0),
    DEEPSEEK_V2.model_type: LATENT,
    DEEPSEEK_V3.model_type: LATENT | dict(q_lora_rank=64, n_group=4, topk_group=2, num_experts_per_tok=4),
    GPT.model_type: GPTS,
}


def config(backend, family="llama", **settings):
    """Sizes that fp8 GEMMs take, heads that cuDNN takes, and weights large enough that tokens differ."""
    base = TINY | dict(
        hidden_size=128,
        intermediate_size=224,
        max_position_embeddings=128,
        seq_length=64,
        rms_norm_eps=1e-5,
        initializer_range=0.15,
        use_cache=False,
        recompute_use_reentrant=True,
    )
    settings = base | OWN.get(family, {}) | settings
    return config_class(FAMILIES[family])(**settings, transformer_engine_backend=backend)


def make(device, backend, dtype, weights=None, in_fp8=False, **settings):
    """A whole model on `device`, with `weights` (see `weights_of`) where given, and `config`'s settings. in_fp8: its
    layers' weights exist in fp8 only."""
    paddle.set_device(device)
    wanted = config(backend, **settings)
    with fp8_model_init(in_fp8):
        model = model_class(wanted)._from_config(wanted, dtype=dtype)
    if weights is not None:
        load(model, weights)
    return model


def load(model, weights):
    """Gives `model` the weights, which must be exactly its own."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    stored = stored_weights(model)
    for name, parameter in parameters.items():
        value = paddle.to_tensor(weights[name])
        if name in stored:
            layer, own_name = stored[name]
            layer.store_weight(own_name, value)
        else:
            parameter.set_value(value.astype(parameter.dtype))


def weights_of(model):
    """{name: float32 array that bfloat16 can hold} of the parameters."""
    return {name: truncated(parameter.numpy()) for name, parameter in model.named_parameters()}


def truth(**settings):
    """(pd's model in float32 on the CPU, its weights, biases too)."""
    model = make("cpu", PD, "float32", **settings)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # PaddleNLP makes them zeros
            parameter.set_value(model.config.initializer_range * paddle.randn(parameter.shape))
    weights = weights_of(model)
    load(model, weights)
    return model, weights


def array(tensor):
    return tensor.astype("float32").numpy()


def first(output):
    return output[0] if isinstance(output, tuple) else output
