"""What transformers makes of the models of `model_cases`: `python -m tests.model_peers SEED [NAME…]` prints it as JSON.

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


class SoftmaxRouter(torch.nn.Module):
    """DeepSeek-V2's MoEGate, of which transformers 4.51.3 has no class: experts by softmax, of the best groups."""

    def __init__(self, said):
        super().__init__()
        self.said = said
        self.weight = torch.nn.Parameter(torch.empty(said["n_routed_experts"], said["hidden_size"]))

    def forward(self, hidden):
        said, scores = self.said, torch.softmax(hidden.flatten(0, -2) @ self.weight.T, -1)
        choice = scores.detach().clone()
        if said["topk_method"] == "group_limited_greedy":
            groups = choice.unflatten(-1, (said["n_group"], -1))
            best = groups.amax(-1).topk(said["topk_group"])[1]
            left_out = torch.ones(groups.shape[:2], dtype=torch.bool).scatter_(1, best, False)
            choice = groups.masked_fill(left_out[..., None], -1.0).flatten(1)
        experts = choice.topk(said["num_experts_per_tok"])[1]
        return experts, scores.gather(1, experts) * said["routed_scaling_factor"]


def deepseek(said, attention):
    """`of_transformers` of DeepSeek-V3's model, with V2's router, and queries without a latent vector."""
    direct, v2 = said["q_lora_rank"] is None, said["model_type"] == "deepseek_v2"
    config = said | {"model_type": "deepseek_v3", "q_lora_rank": said["q_lora_rank"] or 4}
    config = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for layer in model.model.layers:
        if direct:
            layer.self_attn.q_a_proj = layer.self_attn.q_a_layernorm = torch.nn.Identity()
            rows = layer.self_attn.q_b_proj.out_features
            layer.self_attn.q_b_proj = torch.nn.Linear(said["hidden_size"], rows, bias=False)
        if v2 and hasattr(layer.mlp, "gate"):
            layer.mlp.gate = SoftmaxRouter(said)
    return model, ("q_b_proj", "q_proj") if direct else ("", "")


def answer(name, seed):
    """{what: numbers} of a model: its weights' shapes, logits, loss, gradients, and the tokens that it generates."""
    own = name == "gpt_oss" and not hasattr(transformers, "GptOssForCausalLM")
    model, words = (GptOss(model_cases.config(name)), ("", "")) if own else of_transformers(name)
    parameters = {key.replace(*words): parameter for key, parameter in model.named_parameters()}
    weights = parameters | {key: value for key, value in model.named_buffers() if key.endswith("correction_bias")}
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
        "gradients": {key: rounded(parameter.grad.numpy()) for key, parameter in parameters.items()},
        "generated": made[:, model_cases.PROMPT :].tolist(),
    }


def of_transformers(name):
    """(transformers' model, how words in its weights' names are replaced). sdpa leaves out soft caps and sinks."""
    said = model_cases.config(name)
    attention = "eager" if "gemma" in name or name == "gpt_oss" else "sdpa"
    if "deepseek" in name:
        return deepseek(said, attention)
    config = transformers.AutoConfig.for_model(**said)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention), ("", "")


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
    seed, *names = sys.argv[1:]
    print(json.dumps({name: answer(name, int(seed)) for name in names or model_cases.MODELS}))


if __name__ == "__main__":
    main()
