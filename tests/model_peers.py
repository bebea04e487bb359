"""What transformers makes of the models of `model_cases`: `python -m tests.model_peers SEED` prints it as JSON.

Needs torch and transformers, which the tests of this repository do without:
`unit/hosts/paddlenlp/model_transformers.json`
has the answers of transformers 4.51.3 and torch 2.14 to seed 36.
"""

import json
import sys

import numpy as np
import torch
import transformers

from tests import model_cases


def answer(name, seed):
    """{what: numbers} of a model: its weights' shapes, logits, loss, gradients, and the tokens that it generates."""
    config = transformers.AutoConfig.for_model(**model_cases.config(name))
    gemma = "gemma" in name  # sdpa leaves out the soft cap, and with their cache other tokens come than without
    attention = "eager" if gemma else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    weights = dict(model.named_parameters())
    for key, parameter in weights.items():
        parameter.data.copy_(torch.tensor(model_cases.weight(name, key, parameter.shape, seed)))
    tokens = torch.tensor(model_cases.tokens(seed))
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    model.generation_config.eos_token_id = None
    prompt = tokens[:, : model_cases.PROMPT]
    made = model.generate(
        prompt, max_new_tokens=model_cases.NEW, do_sample=False, attention_mask=torch.ones_like(prompt), pad_token_id=0,
        use_cache=not gemma,
    )  # fmt: skip
    return {
        "shapes": {key: list(parameter.shape) for key, parameter in weights.items()},
        "logits": rounded(logits.detach().numpy()),
        "loss": loss.item(),
        "gradients": {key: rounded(parameter.grad.numpy()) for key, parameter in weights.items()},
        "generated": made[:, model_cases.PROMPT :].tolist(),
    }


def rounded(array):
    """The digest of an array."""
    return np.vectorize(lambda x: float(f"{x:.8g}"))(model_cases.digest(array)).tolist()


def main():
    print(json.dumps({name: answer(name, int(sys.argv[1])) for name in model_cases.MODELS}))


if __name__ == "__main__":
    main()
