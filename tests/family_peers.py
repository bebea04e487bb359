"""What transformers computes of `tests.family_layers`, by its own Python: python -m tests.family_peers SEED.

tests/unit/layers/family_transformers.json is what transformers 4.51.3 has printed for seed 37.
"""

import json
import sys

import torch
from transformers import Gemma3TextConfig, Glm4Config, Olmo2Config, Phi3Config, Qwen3Config
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.glm4 import modeling_glm4
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen3 import modeling_qwen3

from tests.family_layers import BATCH, FAMILIES, SIZES, TOKENS, WINDOW, digest, parts, values

MODULES = {
    "olmo2": (Olmo2Config, modeling_olmo2, "Olmo2"),
    "glm4": (Glm4Config, modeling_glm4, "Glm4"),
    "gemma3": (Gemma3TextConfig, modeling_gemma3, "Gemma3"),
    "phi3": (Phi3Config, modeling_phi3, "Phi3"),
    "qwen3": (Qwen3Config, modeling_qwen3, "Qwen3"),
}
OWN = {  # words of config.json
    "glm4": dict(attention_bias=True),
    "gemma3": dict(query_pre_attn_scalar=16, sliding_window=WINDOW),
    "phi3": dict(pad_token_id=0),
}


def make(family):
    """(decoder layer, the layer's arguments besides x)."""
    make_config, module, name = MODULES[family]
    _, head_dim, percent, base, eps = FAMILIES[family]
    words = dict(head_dim=head_dim, rms_norm_eps=eps, rope_theta=base, partial_rotary_factor=percent)
    config = make_config(
        **SIZES,
        **words,
        num_hidden_layers=1,
        max_position_embeddings=64,
        attn_implementation="eager",
        **OWN.get(family, {}),
    )
    layer = getattr(module, f"{name}DecoderLayer")(config, 0)
    positions = torch.arange(TOKENS)[None].expand(BATCH, -1)
    angles = getattr(module, f"{name}RotaryEmbedding")(config)(torch.zeros(1), positions)
    hidden = torch.ones(TOKENS, TOKENS).triu(1).bool()
    names = ["position_embeddings"]
    if family == "gemma3":
        hidden |= torch.ones(TOKENS, TOKENS).tril(-WINDOW).bool()
        layer.is_sliding, names = False, ["position_embeddings_global", "position_embeddings_local"]
    mask = torch.zeros(TOKENS, TOKENS).masked_fill(hidden, -torch.inf)[None, None].expand(BATCH, 1, -1, -1)
    return layer, dict(attention_mask=mask) | dict.fromkeys(names, angles)


def answers(family, seed):
    layer, arguments = make(family)
    named = dict(layer.named_parameters())
    names = parts(family)
    assert {name for theirs in names.values() for name in theirs} == {*named}
    rows = {ours: [named[name].shape[0] for name in theirs] for ours, theirs in names.items()}
    shapes = {ours: [sum(rows[ours]), *named[theirs[0]].shape[1:]] for ours, theirs in names.items()}
    given = {name: torch.from_numpy(value) for name, value in values(family, shapes, seed).items()}
    for ours, theirs in names.items():
        for name, part in zip(theirs, given[ours].split(rows[ours]), strict=True):
            named[name].data = part.clone()
    x = given["x"].requires_grad_()
    y = layer(x, **arguments)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(given["dy"])
    found = {ours: torch.cat([named[name].grad for name in theirs]) for ours, theirs in names.items()}
    return {name: digest(value.detach().numpy()) for name, value in ({"y": y, "x": x.grad} | found).items()}


if __name__ == "__main__":
    print(json.dumps({family: answers(family, int(sys.argv[1])) for family in FAMILIES}))
