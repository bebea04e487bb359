"""Layers of experts in NumPy, and what transformers' ones are made with. Needs neither Paddle nor torch."""

import math

import numpy as np

HIDDEN, FFN, SHARED, EXPERTS, TOKENS = 8, 6, 5, 8, 7
# family: (what a MoEConfig has besides the sizes, transformers' module, options of transformers' configuration)
FAMILIES = {
    "mixtral": (
        dict(moe_router_topk=2),
        "mixtral.MixtralSparseMoeBlock",
        dict(intermediate_size=FFN, num_local_experts=EXPERTS, num_experts_per_tok=2),
    ),
    "qwen2_moe": (
        dict(
            moe_router_topk=3,
            moe_router_pre_softmax=True,
            moe_shared_expert_intermediate_size=SHARED,
            moe_shared_expert_gate=True,
        ),
        "qwen2_moe.Qwen2MoeSparseMoeBlock",
        dict(
            num_experts=EXPERTS,
            num_experts_per_tok=3,
            moe_intermediate_size=FFN,
            shared_expert_intermediate_size=SHARED,
            norm_topk_prob=False,
        ),
    ),
    "qwen3_moe": (
        dict(moe_router_topk=3),
        "qwen3_moe.Qwen3MoeSparseMoeBlock",
        dict(num_experts=EXPERTS, num_experts_per_tok=3, moe_intermediate_size=FFN, norm_topk_prob=True),
    ),
    "olmoe": (
        dict(moe_router_topk=2, moe_router_pre_softmax=True),
        "olmoe.OlmoeSparseMoeBlock",
        dict(num_experts=EXPERTS, num_experts_per_tok=2, intermediate_size=FFN, norm_topk_prob=False),
    ),
    "deepseek_v3": (
        dict(
            moe_router_topk=4,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_num_groups=4,
            moe_router_group_topk=2,
            moe_router_topk_scaling_factor=2.5,
            moe_shared_expert_intermediate_size=SHARED,
        ),
        "deepseek_v3.DeepseekV3MoE",
        dict(
            n_routed_experts=EXPERTS,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
            moe_intermediate_size=FFN,
            n_shared_experts=1,
        ),
    ),
}


def shared_columns(family):
    """DeepSeek-V3's shared expert has a multiple of the experts' columns."""
    return FFN if family == "deepseek_v3" else SHARED


def values(family, seed):
    """{name: float32 array} of what a family's module has, its input x and the output's gradient dy."""
    draw = np.random.RandomState(seed).randn  # its numbers are the same in every version of NumPy
    options = FAMILIES[family][0]
    made = {
        "x": draw(TOKENS, HIDDEN),
        "dy": draw(TOKENS, HIDDEN),
        "router.weight": draw(EXPERTS, HIDDEN),
        "experts.fc1_weight": draw(EXPERTS, 2 * FFN, HIDDEN) * HIDDEN**-0.5,
        "experts.fc2_weight": draw(EXPERTS, HIDDEN, FFN) * FFN**-0.5,
    }
    if "moe_router_enable_expert_bias" in options:
        made["router.expert_bias"] = np.abs(draw(EXPERTS)) * 0.3  # transformers takes experts of other groups for 0
    if "moe_shared_expert_intermediate_size" in options:
        made["shared_experts.fc1_weight"] = draw(2 * shared_columns(family), HIDDEN) * HIDDEN**-0.5
        made["shared_experts.fc2_weight"] = draw(HIDDEN, shared_columns(family)) * SHARED**-0.5
    if "moe_shared_expert_gate" in options:
        made["shared_experts.gate_weight"] = draw(1, HIDDEN)
    return {name: value.astype("float32") for name, value in made.items()}


def digest(gradient):
    """Of an array of several axes the products of its rows with a fixed vector, to keep files small."""
    gradient = np.asarray(gradient, "float64")
    return gradient if gradient.ndim < 3 else gradient @ np.cos(np.arange(gradient.shape[-1]))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


def clamped_swiglu(gate, up):
    gate = np.minimum(gate, 7)
    return gate * sigmoid(1.702 * gate) * (np.clip(up, -7, 7) + 1)


ACTIVATIONS = {
    "swiglu": lambda x: (g := x[: len(x) // 2]) * sigmoid(g) * x[len(x) // 2 :],
    "clamped_swiglu": lambda x: clamped_swiglu(x[: len(x) // 2], x[len(x) // 2 :]),
    "gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
}


def chosen(scores, bias, config):
    """The experts of a token."""
    choice = scores if bias is None else scores + bias
    allowed = range(len(choice))
    if config.moe_router_num_groups:
        size = len(choice) // config.moe_router_num_groups
        best = config.moe_router_group_best or config.moe_router_topk // config.moe_router_group_topk
        of_groups = [np.sort(choice[g * size : (g + 1) * size])[-best:].sum() for g in range(len(choice) // size)]
        groups = np.argsort(of_groups)[-config.moe_router_group_topk :]
        allowed = [e for e in allowed if e // size in groups]
    return sorted(allowed, key=lambda e: choice[e])[-config.moe_router_topk :]


def routed(logits, bias, config):
    """{expert: probability} of a token."""
    if config.moe_router_score_function == "sigmoid":
        scores = sigmoid(logits)
        experts = chosen(scores, bias, config)
        total = sum(scores[e] for e in experts) if config.moe_router_topk > 1 else 1
    elif config.moe_router_pre_softmax:
        scores, total = softmax(logits), 1
        experts = chosen(scores, None, config)
    else:
        experts = chosen(logits, None, config)
        scores, total = np.exp(logits), sum(np.exp(logits[e]) for e in experts)
    factor = config.moe_router_topk_scaling_factor or 1.0
    return {e: scores[e] / total * factor for e in experts}


def limited(probabilities, config):
    """The same of all tokens, without what is beyond the experts' capacity."""
    if config.moe_expert_capacity_factor is None:
        return probabilities
    even = len(probabilities) * config.moe_router_topk / config.num_moe_experts
    capacity, kept = math.ceil(even * config.moe_expert_capacity_factor), set()
    for expert in range(config.num_moe_experts):
        tokens = [t for t, of_token in enumerate(probabilities) if expert in of_token]
        if config.moe_token_drop_policy == "probs":
            tokens.sort(key=lambda t, expert=expert: -probabilities[t][expert])
        kept |= {(t, expert) for t in tokens[:capacity]}
    return [{e: p for e, p in of.items() if (t, e) in kept} for t, of in enumerate(probabilities)]


def mlp(x, w1, w2, b1, b2, activation, probability=1.0):
    hidden = w1 @ x + (0 if b1 is None else b1)
    return probability * (w2 @ ACTIVATIONS[activation](hidden) + (0 if b2 is None else b2))


def layer(values, config):
    """(output of the layer without its norm and residual, auxiliary loss, z-loss), token by token in float64.

    values: as MoELayer names its parameters, and x [tokens, hidden].
    """
    values = {name: value.astype("float64") for name, value in values.items()}
    get = values.get
    x, logits = values["x"], values["x"] @ values["router.weight"].T + values.get("router.bias", 0)
    probabilities = [routed(of_token, get("router.expert_bias"), config) for of_token in logits]
    out = np.zeros_like(x)
    for t, of_token in enumerate(limited(probabilities, config)):
        for e, probability in of_token.items():
            b1, b2 = (None if (b := get(f"experts.fc{i}_bias")) is None else b[e] for i in (1, 2))
            w1, w2 = values["experts.fc1_weight"][e], values["experts.fc2_weight"][e]
            out[t] += mlp(x[t], w1, w2, b1, b2, config.activation, probability)
        if "shared_experts.fc1_weight" in values:
            shared = [get(f"shared_experts.fc{i}_{what}") for what in ("weight", "bias") for i in (1, 2)]
            gate = get("shared_experts.gate_weight")
            out[t] += mlp(x[t], *shared, config.activation, 1 if gate is None else sigmoid(gate[0] @ x[t]))
    return out, balance_loss(logits, config), z_loss(logits)


def balance_loss(logits, config):
    """Switch Transformers' loss, divided by topk as Megatron-Core does."""
    sigmoids = config.moe_router_score_function == "sigmoid"
    scores = [(s := sigmoid(row)) / s.sum() if sigmoids else softmax(row) for row in logits]
    tokens = np.zeros(logits.shape[1])
    for row in scores:
        tokens[np.argsort(row)[-config.moe_router_topk :]] += 1
    share = tokens / len(logits) / config.moe_router_topk
    return logits.shape[1] * (share * np.mean(scores, 0)).sum()


def z_loss(logits):
    return (np.log(np.exp(logits).sum(1)) ** 2).mean()
