"""What transformers makes of the models of `model_cases`: `python -m tests.model_peers SEED` prints it as JSON.

Needs torch and transformers, which the tests of this repository do without:
`unit/hosts/paddlenlp/model_transformers.json`
has the answers of transformers 4.51.3 and torch 2.14 to seed 36; those of gpt_oss are of transformers 4.57.6, as 4.51.3
has no such model, for which `gpt_oss_peer` stands in.
"""

import json
import sys

import numpy as np
import torch
import transformers

from tests import model_cases
from tests.gpt_oss_peer import GptOss


def answer(name, seed):
    """{what: numbers} of a model: its weights' shapes, logits, loss, gradients, and the tokens that it generates."""
    own = name == "gpt_oss" and not hasattr(transformers, "GptOssForCausalLM")
    model = GptOss(model_cases.config(name)) if own else of_transformers(name)
    weights = dict(model.named_parameters())
    for key, parameter in weights.items():
        parameter.data.copy_(torch.tensor(model_cases.weight(name, key, parameter.shape, seed)))
    tokens = torch.tensor(model_cases.tokens(seed))
    logits = model(tokens[:, :-1]) if own else model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    prompt = tokens[:, : model_cases.PROMPT]
    made = model.generate(prompt, model_cases.NEW) if own else generated(model, prompt, cache="gemma" not in name)
    return {
        "shapes": {key: list(parameter.shape) for key, parameter in weights.items()},
        "logits": rounded(logits.detach().numpy()),
        "loss": loss.item(),
        "gradients": {key: rounded(parameter.grad.numpy()) for key, parameter in weights.items()},
        "generated": made[:, model_cases.PROMPT :].tolist(),
    }


def of_transformers(name):
    """transformers' model. sdpa leaves out soft caps and sinks."""
    config = transformers.AutoConfig.for_model(**model_cases.config(name))
    attention = "eager" if "gemma" in name or name == "gpt_oss" else "sdpa"
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def generated(model, prompt, cache):
    """The prompt and greedy tokens behind it. cache: with Gemma's others come than without."""
    model.generation_config.eos_token_id = None
    return model.generate(
        prompt, max_new_tokens=model_cases.NEW, do_sample=False, attention_mask=torch.ones_like(prompt), pad_token_id=0,
        use_cache=cache,
    )  # fmt: skip


def rounded(array):
    """The digest of an array."""
    return np.vectorize(lambda x: float(f"{x:.8g}"))(model_cases.digest(array)).tolist()


def main():
    print(json.dumps({name: answer(name, int(sys.argv[1])) for name in model_cases.MODELS}))


if __name__ == "__main__":
    main()
