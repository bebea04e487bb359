"""What transformers' modules make of the numbers of `moe_cases`: `python -m tests.moe_peers SEED` prints it as JSON.

Needs torch and transformers, which the tests of this repository do without: `unit/layers/moe_transformers.json` has the
answers of transformers 4.51.3 and torch 2.14 to seed 37.
"""

import importlib
import json
import sys

import numpy as np
import torch
import transformers

from tests.moe_cases import EXPERTS, FAMILIES, HIDDEN, digest, values

MIXTRAL_NAMES, NAMES = ("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")


def module(family):
    """transformers' module, in float32: DeepSeek-V3's computes in no other."""
    _, path, options = FAMILIES[family]
    folder, name = path.split(".")
    code = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    config = transformers.AutoConfig.for_model(family, hidden_size=HIDDEN, **options)
    return getattr(code, name)(config).float()


def parts(family, made):
    """{our name: [the module's parameters that stand one above the other, of each expert]}."""
    names = MIXTRAL_NAMES if family == "mixtral" else NAMES
    of = lambda mlp: [getattr(mlp, name).weight for name in names]  # noqa: E731
    gates, downs = zip(*[(of(expert)[:2], of(expert)[2:]) for expert in made.experts], strict=True)
    found = {"router.weight": [[made.gate.weight]], "experts.fc1_weight": gates, "experts.fc2_weight": downs}
    shared = getattr(made, "shared_expert", None) or getattr(made, "shared_experts", None)
    if shared is not None:
        found["shared_experts.fc1_weight"] = [of(shared)[:2]]
        found["shared_experts.fc2_weight"] = [of(shared)[2:]]
    if hasattr(made, "shared_expert_gate"):
        found["shared_experts.gate_weight"] = [[made.shared_expert_gate.weight]]
    return found


def answer(family, seed):
    """{name: array} of the output, the router's logits and all gradients."""
    made, given = module(family), values(family, seed)
    placed = parts(family, made)
    for name, experts in placed.items():
        source = torch.tensor(given[name], dtype=torch.float32).reshape(len(experts), -1, given[name].shape[-1])
        for stacked, value in zip(experts, source, strict=True):
            for part, piece in zip(stacked, value.chunk(len(stacked)), strict=True):
                part.data.copy_(piece)
    if "router.expert_bias" in given:
        made.gate.e_score_correction_bias.copy_(torch.tensor(given["router.expert_bias"]))
    x = torch.tensor(given["x"], dtype=torch.float32, requires_grad=True)
    y = made(x[None])
    y = y[0] if isinstance(y, tuple) else y
    (y[0] * torch.tensor(given["dy"])).sum().backward()
    found = {"y": y[0], "dx": x.grad, "logits": x @ made.gate.weight.T}
    for name, experts in placed.items():
        grads = [[torch.zeros_like(part) if part.grad is None else part.grad for part in each] for each in experts]
        gradients = [torch.cat(each) for each in grads]  # an expert that gets no token has no gradient
        found[f"d{name}"] = torch.stack(gradients) if len(gradients) == EXPERTS else gradients[0]
    return {name: digest(value.detach().numpy()) for name, value in found.items()}


def main():
    rounded = lambda array: np.vectorize(lambda x: float(f"{x:.8g}"))(array).tolist()  # noqa: E731
    answers = {family: answer(family, int(sys.argv[1])) for family in FAMILIES}
    print(json.dumps({family: {n: rounded(a) for n, a in of.items()} for family, of in answers.items()}))


if __name__ == "__main__":
    main()
