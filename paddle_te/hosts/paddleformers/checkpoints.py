"""Our decoder layers' weights in PaddleFormers' checkpoints, which have Hugging Face's names.

PaddleFormers translates between a checkpoint and a model by statements for Paddle's flex_checkpoint, which its model
classes give: "a, b -> c, axis=0" concatenates, "c -> a, b, axis=0" divides into equal shares.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import paddle
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import build_sharded_state_dict
from paddle.nn import Layer
from paddleformers.utils.env import MODEL_STATE_DIC

from paddle_te.configs.families import family_of
from paddle_te.host import HostConfig, HostModel
from paddle_te.weights.layouts import hf_layout, te_layout

Stored = Mapping[str, int | None]  # {name in a checkpoint: how many heads that part has, None if it has none}


def sharded_state_dict(layer: Layer, prefix: str) -> dict[str, Any]:
    """Return a decoder layer's weights as Paddle's flex_checkpoint takes them, under tensor parallelism.

    Of each weight there are the whole tensor's shape and where this rank's share stands in it, one rank's after the
    other's.

    In a weight of several parts, such as q, k and v, a rank has its share of every part, so that the whole tensor in a
    checkpoint is that of its degree of tensor parallelism: q, k and v of the first rank, then of the second.
    """
    weights = layer.state_dict(structured_name_prefix="")
    axes = {name: weight.split_axis for name, weight in weights.items() if weight.is_distributed}
    return build_sharded_state_dict(weights, axes, prefix)


def load_statements(config: HostConfig, prefix: str) -> list[str]:
    """Return statements from the decoder layers' weights of a checkpoint to those of a model, named with the prefix."""
    statements, ranks = [], _ranks(config)
    for ours, stored in _weights(config):
        shares = _taken_apart(stored, dict.fromkeys(stored, ranks if len(stored) > 1 else 1))
        statements += [_statement([name], part) for name, part in shares.items() if len(part) > 1]
        statements.append(_statement(_in_order_of_ranks(shares, ranks), [prefix + ours]))
    return statements


def save_statements(config: HostConfig, prefix: str) -> list[str]:
    """Return the statements of the other way. q, k and v differ in size: heads are divided first, then put together."""
    statements, ranks = [], _ranks(config)
    for ours, stored in _weights(config):
        shares = _taken_apart(stored, _equal_shares(stored, ranks))
        statements.append(_statement([prefix + ours], _in_order_of_ranks(shares, ranks)))
        statements += [_statement(part, [name]) for name, part in shares.items() if len(part) > 1]
    return statements


def resharding_statements(config: HostConfig, prefix: str, saved_ranks: int, folder: str | Path) -> list[str]:
    """Return statements from weights of a run with saved_ranks tensor parallel ranks to those of this model.

    folder: of a checkpoint's weights, or of their states. Statements are there for what it holds, as Paddle refuses
    others: an adapter's base has no states, and in float32 there are no master weights.
    """
    statements, ranks = [], _ranks(config)
    there = _saved(folder)
    for ours, stored in _weights(config):
        weight = prefix + ours
        if len(stored) > 1 and any(name == weight or name.startswith(f"{weight}.") for name in there):
            shares = _taken_apart(stored, _equal_shares(stored, math.lcm(ranks, saved_ranks)))
            statements.append(_statement([weight], _in_order_of_ranks(shares, saved_ranks)))
            statements.append(_statement(_in_order_of_ranks(shares, ranks), [weight]))
    return statements


def saved_ranks(checkpoint: str | Path) -> int:
    """Return how many tensor parallel ranks had shares of the decoder layers' weights in a checkpoint of a Trainer.

    Raises FileNotFoundError where there is no such checkpoint.
    """
    weights = _saved(Path(checkpoint) / MODEL_STATE_DIC)
    shares = next(shares for name, shares in weights.items() if name.endswith(".layernorm_qkv.weight"))
    return shares[0].global_shape[0] // shares[0].local_shape[0]


def _saved(folder: str | Path) -> dict[str, Any]:
    """Return {name: what Paddle notes of each of its shares} of what a folder of a checkpoint holds."""
    paths = [*Path(folder).glob("*.metadata")]
    if len(paths) != 1:
        raise FileNotFoundError(f"{folder}: is not a whole part of a checkpoint of PaddleFormers, in flex_checkpoint")
    return paddle.load(str(paths[0])).state_dict_metadata


def _ranks(config: HostConfig) -> int:
    return max(config.tensor_model_parallel_size, 1)


def _equal_shares(stored: Stored, ranks: int) -> dict[str, int]:
    """Return {name: how many shares it is taken apart into}.

    All shares of one of our weights are equally large, and each belongs to one rank.
    """
    if len(stored) == 1:
        return dict.fromkeys(stored, 1)
    return {name: heads or ranks for name, heads in stored.items()}


def _taken_apart(stored: Iterable[str], counts: Mapping[str, int]) -> dict[str, list[str]]:
    """Return {name: the names of its shares}."""
    return {name: [f"{name}_{i}" for i in range(counts[name])] if counts[name] > 1 else [name] for name in stored}


def _in_order_of_ranks(shares: Mapping[str, Sequence[str]], ranks: int) -> list[str]:
    """Return the shares of one of our weights as they lie in it: each part's of the first rank, then of the second."""
    if len(shares) == 1:
        return [share for part in shares.values() for share in part]
    return [
        share
        for rank in range(ranks)
        for part in shares.values()
        for share in part[len(part) * rank // ranks : len(part) * (rank + 1) // ranks]
    ]


def _weights(config: HostConfig) -> Iterator[tuple[str, Stored]]:
    """Yield (our name, Stored) of each weight of the decoder layers."""
    family = family_of(config)
    names = {slot.parts[0]: slot.name for slot in hf_layout(family=family).layer}
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for slot in te_layout(family=family).layer:
            parts = {f"model.layers.{layer}.{names[part]}": heads.get(part) for part in slot.parts}
            yield f"layers.{layer}.{slot.name}", parts


def lora_names(model: HostModel) -> dict[str, str]:
    """Return {name in our model: name in an adapter's files} of LoRA's weights on the decoder layers' parts.

    The files have the names of PaddleFormers' own layers; `models.lora` says which parts those are.
    """
    prefix = f"{model.base_model_prefix}."
    names: dict[str, str] = {}
    for ours, stored in _weights(model.config):
        for theirs in stored:
            projection, _, leaf = theirs.rpartition(".")
            if leaf == "weight" and projection.endswith("_proj"):
                layer, part = ours.rpartition(".")[0], projection.rpartition(".")[2]
                for name in ("lora_A", "lora_B"):
                    names[f"{prefix}{layer}.{part}.{name}"] = f"{projection}.{name}"
    return names


def _statement(left: Sequence[str], right: Sequence[str]) -> str:
    return f"{', '.join(left)} -> {', '.join(right)}" + (", axis=0" if len(left) + len(right) > 2 else "")
