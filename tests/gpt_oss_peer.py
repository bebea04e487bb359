"""gpt-oss in torch, written from its published description, for transformers before 4.55, which has no such model.

OpenAI's model card (arXiv 2508.10925) and reference code (github.com/openai/gpt-oss, gpt_oss/torch/model.py) say what
it computes; its parameters have transformers' names and shapes. On 2026-11-28 it was compared by hand with transformers
4.57.6, whose answers `unit/hosts/paddlenlp/model_transformers.json` has: logits, loss, all gradients and the generated
tokens were the same, numbers within 6e-6 of each other.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

LIMIT, ALPHA = 7.0, 1.702


def rotation(config, length):
    """(cos, sin), [length, head_dim / 2]: YaRN (arXiv 2309.00071) whose ramp begins and ends between pairs."""
    dim, base, scaling = config["head_dim"], config["rope_theta"], config["rope_scaling"]
    turns = base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    pair = lambda times: (  # noqa: E731
        dim / 2 * math.log(scaling["original_max_position_embeddings"] / (times * 2 * math.pi)) / math.log(base)
    )
    low, high = max(pair(32.0), 0), min(pair(1.0), dim - 1)
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    angles = torch.arange(length).float()[:, None] * (turns * kept + turns / scaling["factor"] * (1 - kept))
    sharper = 0.1 * math.log(scaling["factor"]) + 1
    return angles.cos() * sharper, angles.sin() * sharper


def turned(x, cos, sin):
    """x [b, heads, s, head_dim], rotated."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Norm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    def __init__(self, config, window):
        super().__init__()
        self.heads, self.groups, self.dim = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
        )
        hidden, self.window = config["hidden_size"], window
        self.q_proj = nn.Linear(hidden, self.heads * self.dim)
        self.k_proj = nn.Linear(hidden, self.groups * self.dim)
        self.v_proj = nn.Linear(hidden, self.groups * self.dim)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden)
        self.sinks = nn.Parameter(torch.zeros(self.heads))

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, self.dim).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(self.dim)
        distance = torch.arange(s)[:, None] - torch.arange(s)
        scores = scores.masked_fill((distance < 0) | (distance >= (self.window or s)), -torch.inf)
        total = torch.logaddexp(scores.logsumexp(-1), self.sinks[:, None])  # of the softmax's denominator
        out = torch.exp(scores - total[..., None]) @ v
        return self.o_proj(out.transpose(1, 2).reshape(b, s, -1))


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        count, hidden, ffn = config["num_local_experts"], config["hidden_size"], config["intermediate_size"]
        self.gate_up_proj = nn.Parameter(torch.zeros(count, hidden, 2 * ffn))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(count, 2 * ffn))
        self.down_proj = nn.Parameter(torch.zeros(count, ffn, hidden))
        self.down_proj_bias = nn.Parameter(torch.zeros(count, hidden))

    def forward(self, x, weights):
        """x [tokens, hidden], weights [tokens, experts], 0 where an expert is not chosen: all compute all tokens."""
        gate_up = torch.einsum("th,eho->teo", x, self.gate_up_proj) + self.gate_up_proj_bias
        gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        out = torch.einsum("tef,efn->ten", (up + 1) * gate * torch.sigmoid(ALPHA * gate), self.down_proj)
        return ((out + self.down_proj_bias) * weights[..., None]).sum(1)


class Mixture(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router = nn.Linear(config["hidden_size"], config["num_local_experts"])
        self.experts, self.topk = Experts(config), config["num_experts_per_tok"]

    def forward(self, x):
        flat = x.flatten(0, 1)
        best, chosen = self.router(flat).topk(self.topk, -1)
        weights = torch.zeros(len(flat), self.router.out_features).scatter(1, chosen, F.softmax(best, -1))
        return self.experts(flat, weights).view_as(x)


class Layer(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        window = None if number % 2 else config["sliding_window"]
        self.input_layernorm, self.post_attention_layernorm = (Norm(config["hidden_size"], 1e-5) for _ in range(2))
        self.self_attn, self.mlp = Attention(config, window), Mixture(config)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config["num_hidden_layers"]))
        self.norm = Norm(config["hidden_size"], 1e-5)


class GptOss(nn.Module):
    """config: a dict in transformers' words."""

    def __init__(self, config):
        super().__init__()
        self.config, self.model = config, Model(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def forward(self, ids):
        """int64 [b, s] -> logits."""
        x, turns = self.model.embed_tokens(ids), rotation(self.config, ids.shape[1])
        for layer in self.model.layers:
            x = layer(x, *turns)
        return self.lm_head(self.model.norm(x))

    def generate(self, ids, new):
        """The prompt and as many greedy tokens behind it."""
        for _ in range(new):
            with torch.no_grad():
                ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids
