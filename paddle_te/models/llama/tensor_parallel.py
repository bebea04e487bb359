"""How the fused weights of a decoder layer are split over tensor parallel ranks.

PaddleNLP asks a model class for a table {parameter name: action}; an action turns a whole weight into one rank's
share, or the list of all shares into the whole. A stacked weight (q, k, v or gate, up) is split part by part.
"""

from functools import partial

import numpy as np
import paddle


def _concat(parts, axis):
    return np.concatenate(parts, axis) if isinstance(parts[0], np.ndarray) else paddle.concat(parts, axis)


def _sections(sizes, degree):
    """[(start, stop)] of each stacked part, for sizes divided by degree."""
    stops = np.cumsum([size // degree for size in sizes]).tolist()
    return list(zip([0] + stops[:-1], stops, strict=True))


def split_rows(weight, sizes, degree, rank):
    """Rank's share of a stacked [sum(sizes), in] weight: its rows of each part, stacked again."""
    parts = []
    for (start, stop), (low, high) in zip(_sections(sizes, 1), _sections(sizes, degree), strict=True):
        rows = high - low
        if rows * degree != stop - start:
            raise ValueError(f"{stop - start} rows cannot be split over {degree} tensor parallel ranks")
        parts.append(weight[start + rank * rows : start + (rank + 1) * rows])
    return _concat(parts, 0)


def merge_rows(shares, sizes):
    """The inverse of `split_rows`, from the shares of all ranks in order."""
    parts = _sections(sizes, len(shares))
    return _concat([share[low:high] for low, high in parts for share in shares], 0)


def split_columns(weight, degree, rank):
    """Rank's columns of an [out, in] weight."""
    width = weight.get_shape()[1] if hasattr(weight, "get_shape") else weight.shape[1]
    if width % degree:
        raise ValueError(f"{width} columns cannot be split over {degree} tensor parallel ranks")
    width //= degree
    return weight[:, rank * width : (rank + 1) * width]


def layer_mappings(config, is_split):
    """{name: action} of every decoder layer's split weights, names without the "llama." prefix."""
    degree, rank = config.tensor_parallel_degree, config.tensor_parallel_rank
    head_dim = config.hidden_size // config.num_attention_heads
    kv = config.num_key_value_heads * head_dim
    stacked = {
        "self_attention.layernorm_qkv.weight": [config.hidden_size, kv, kv],
        "layernorm_mlp.fc1_weight": [config.intermediate_size] * 2,
    }
    rows = ["self_attention.proj.weight", "layernorm_mlp.fc2_weight"]
    if is_split:
        actions = {n: partial(split_rows, sizes=sizes, degree=degree, rank=rank) for n, sizes in stacked.items()}
        actions |= {name: partial(split_columns, degree=degree, rank=rank) for name in rows}
    else:
        actions = {name: partial(merge_rows, sizes=sizes) for name, sizes in stacked.items()}
        actions |= {name: partial(_concat, axis=1) for name in rows}
    return {
        f"layers.{layer}.transformer.{name}": action
        for layer in range(config.num_hidden_layers)
        for name, action in actions.items()
    }
