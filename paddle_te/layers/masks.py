"""The tokens that a token sees: Transformer Engine's attn_mask_type, attention_mask and window_size."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import Tensor

from paddle_te.layers.checks import one_of
from paddle_te.ops.kept import kept_on

MASK_TYPES = ("causal", "no_mask", "padding", "padding_causal")


def is_causal(attn_mask_type: str) -> bool:
    """Say whether a token sees none after it."""
    return one_of(MASK_TYPES, attn_mask_type=attn_mask_type).endswith("causal")


def keys_before(window_size: Sequence[int] | None, causal: bool) -> int:
    """Return how many keys before its own a query sees by TE's window_size, -1 for all of them.

    Raises ValueError for a window that is no pair, reaches to later keys, or is one of attention that is not causal.
    """
    if window_size is None:
        return -1
    if len(window_size) != 2 or window_size[0] < -1 or window_size[1] not in (-1, 0):
        raise ValueError(f"window_size={window_size}: it must be (left, 0), left the keys before a query's own, or -1")
    if window_size[0] >= 0 and not causal:
        raise ValueError(f"window_size={window_size}: only causal attention has a window")
    return window_size[0]


def additive_mask(
    attn_mask_type: str, attention_mask: Tensor | None, cu_seqlens: Tensor | None, queries: int
) -> Tensor | None:
    """Return what is added to the scores, [b, 1, queries, keys]; None where the type, or cu_seqlens, say all.

    attention_mask: as DotProductAttention's. Kept on it for the next layers.
    Raises ValueError where type, mask and cu_seqlens do not fit each other.
    """
    padding = attn_mask_type.startswith("padding")
    if padding and attention_mask is None and cu_seqlens is None:
        raise ValueError(f"attn_mask_type={attn_mask_type!r} needs an attention_mask, or cu_seqlens")
    if attn_mask_type == "no_mask" and cu_seqlens is not None:
        raise ValueError("cu_seqlens: with attn_mask_type='no_mask' documents see each other; set it to 'padding'")
    if attention_mask is None or attention_mask.is_floating_point():
        return attention_mask
    if attention_mask.dtype is not paddle.bool or not padding:
        raise ValueError(
            f"attention_mask is {attention_mask.dtype} and attn_mask_type={attn_mask_type!r}: it must be additive, or "
            "with a padding type bool, [b, 1, 1, keys], True for padding"
        )
    return kept_on(attention_mask, _hides_padding, queries, is_causal(attn_mask_type))


def _hides_padding(padding: Tensor, queries: int, causal: bool) -> Tensor:
    """Return the additive mask, float32, of bool [b, 1, 1, keys]."""
    if padding.ndim != 4 or padding.shape[1:3] != [1, 1]:
        raise ValueError(f"attention_mask {padding.shape}: a padding mask must be [b, 1, 1, keys]")
    keys = padding.shape[-1]
    hidden = padding.expand([-1, 1, queries, keys])
    if causal:
        hidden = hidden | paddle.ones([queries, keys]).triu(1 + keys - queries).astype("bool")
    return hidden.astype("float32") * paddle.finfo(paddle.float32).min
