"""Our decoder layers' weights in PaddleFormers' checkpoints, which have Hugging Face's names.

PaddleFormers translates between a checkpoint and a model by statements for Paddle's flex_checkpoint, which its model
classes give: "a, b -> c, axis=0" concatenates, "c -> a, b, axis=0" divides into equal shares.
"""

from paddle_te.configs.families import family_of
from paddle_te.weights.layout import hf_layout, te_layout


def load_statements(config, prefix):
    """From the decoder layers' weights of a checkpoint to those of a model, whose names begin with prefix."""
    return [_statement(list(stored), [prefix + ours]) for ours, stored in _weights(config)]


def save_statements(config, prefix):
    """The other way round. q, k and v have different sizes: their heads are divided first, and each put together."""
    statements = []
    for ours, stored in _weights(config):
        shares = {
            name: [f"{name}_{i}" for i in range(count)] if count > 1 else [name] for name, count in stored.items()
        }
        statements.append(_statement([prefix + ours], [share for part in shares.values() for share in part]))
        statements += [_statement(part, [name]) for name, part in shares.items() if len(part) > 1]
    return statements


def _weights(config):
    """(our name, {name in a checkpoint: how many equal shares of ours it is}) of each weight of the decoder layers."""
    family = family_of(config)
    names = {slot.parts[0]: slot.name for slot in hf_layout(family=family).layer}
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for slot in te_layout(family=family).layer:
            parts = {f"model.layers.{layer}.{names[part]}": heads.get(part, 1) for part in slot.parts}
            yield f"layers.{layer}.{slot.name}", parts


def lora_names(model):
    """{name in our model: name in an adapter's files, that of PaddleFormers' own layers} of LoRA's weights on all parts
    of the decoder layers; `models.lora` says which those are."""
    prefix, names = f"{model.base_model_prefix}.", {}
    for ours, stored in _weights(model.config):
        for theirs in stored:
            projection, _, leaf = theirs.rpartition(".")
            if leaf == "weight" and projection.endswith("_proj"):
                layer, part = ours.rpartition(".")[0], projection.rpartition(".")[2]
                for name in ("lora_A", "lora_B"):
                    names[f"{prefix}{layer}.{part}.{name}"] = f"{projection}.{name}"
    return names


def _statement(left, right):
    return f"{', '.join(left)} -> {', '.join(right)}" + (", axis=0" if len(left) + len(right) > 2 else "")
