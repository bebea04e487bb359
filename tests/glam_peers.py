"""What transformers' GPT-2 makes of a small GLaM: `python -m tests.glam_peers SEED` prints it as JSON.

Its second layer has experts instead of the MLP, composed of torch's operations, expert by expert.

Needs torch and transformers, which the tests of this repository do without:
`unit/hosts/paddlenlp/glam_transformers.json` has the answers of transformers 4.51.3 and torch 2.14 to seed 36.
"""

import json
import math
import sys

import torch
from torch.nn.functional import gelu
from transformers import GPT2Config, GPT2LMHeadModel

from tests import model_cases
from tests.model_peers import rounded

SIZES, EXPERTS, TOPK, COEFFICIENT = model_cases.SIZES, 6, 2, 0.01
CAPACITY = {"glam": None, "glam-capacity": 1.0}


class Experts(torch.nn.Module):
    """Top-2 of gelu experts with biases; weights [in, out] as GPT-2's. loss: the balance loss of the last tokens."""

    def __init__(self, capacity_factor):
        super().__init__()
        hidden, ffn = SIZES["hidden_size"], SIZES["intermediate_size"]
        shapes = dict(fc1=[hidden, ffn], fc1_bias=[ffn], fc2=[ffn, hidden], fc2_bias=[hidden])
        self.router = torch.nn.Parameter(torch.empty(hidden, EXPERTS))
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.empty(EXPERTS, *shape)))
        self.capacity_factor = capacity_factor

    def forward(self, hidden):
        x = hidden.reshape(-1, hidden.shape[-1])
        logits = x @ self.router
        best, chosen = logits.topk(TOPK, -1)
        gates, out = best.softmax(-1), torch.zeros_like(x)
        counts = torch.zeros(EXPERTS)
        for expert in range(EXPERTS):
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            counts[expert] = len(tokens)
            gate = gates[tokens, places]
            if self.capacity_factor is not None:
                room = math.ceil(len(x) * TOPK / EXPERTS * self.capacity_factor)
                kept = gate.argsort(descending=True)[:room]
                tokens, gate = tokens[kept], gate[kept]
            inner = gelu(x[tokens] @ self.fc1[expert] + self.fc1_bias[expert], approximate="tanh")
            out = out.index_add(0, tokens, gate[:, None] * (inner @ self.fc2[expert] + self.fc2_bias[expert]))
        share = counts / len(x) / TOPK
        self.loss = COEFFICIENT * EXPERTS * (share * logits.softmax(-1).mean(0)).sum()
        return out.reshape(hidden.shape)


def make(name, seed):
    """The model with its weights."""
    config = GPT2Config(
        vocab_size=SIZES["vocab_size"], n_embd=SIZES["hidden_size"], n_inner=SIZES["intermediate_size"],
        n_layer=SIZES["num_hidden_layers"], n_head=SIZES["num_attention_heads"],
        n_positions=SIZES["max_position_embeddings"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        activation_function="gelu_new",
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.transformer.h[1].mlp = Experts(CAPACITY[name])
    for key, parameter in model.named_parameters():
        parameter.data.copy_(torch.tensor(model_cases.weight("gpt", key, parameter.shape, seed)))
    return model


def answer(name, seed):
    """{what: numbers}, as model_peers' answer."""
    model, tokens = make(name, seed), torch.tensor(model_cases.tokens(seed))
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    (loss + model.transformer.h[1].mlp.loss).backward()
    weights = dict(model.named_parameters())
    found = {
        "shapes": {key: list(parameter.shape) for key, parameter in weights.items()},
        "logits": rounded(logits.detach().numpy()),
        "loss": loss.item(),
        "gradients": {key: rounded(parameter.grad.numpy()) for key, parameter in weights.items()},
    }
    if CAPACITY[name] is None:  # else what a token gets depends on the others beside it
        prompt = tokens[:, : model_cases.PROMPT]
        made = model.generate(
            prompt, max_new_tokens=model_cases.NEW, do_sample=False, attention_mask=torch.ones_like(prompt),
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        found["generated"] = made[:, model_cases.PROMPT :].tolist()
    return found


def main():
    print(json.dumps({name: answer(name, int(sys.argv[1])) for name in CAPACITY}))


if __name__ == "__main__":
    main()
