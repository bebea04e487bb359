"""The record that accompanies hidden_states through a decoder layer, from a host's layer down to attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import paddle
from paddle import Tensor

Result = TypeVar("Result")
KeyValue = tuple[Tensor, Tensor]


class Context(NamedTuple):
    """Hold the companions of hidden_states, under Transformer Engine's names.

    attention_mask: as DotProductAttention's.
    rotary_pos_emb: angles, float32 [s, d] or [b, s, d] where sequences have their own, of `RotaryPositionEmbedding`;
        None: nothing is rotated.
    recompute_core_attention: keep the fused projection only, and compute rotation and attention again in backward.
    is_first_microbatch: True quantizes the weights and keeps their fp8 copies, False uses the kept ones, None keeps
        nothing. Matters under `fp8_autocast` only.
    past_key_value: (k, v) of the tokens before these, each [b, past, kv heads, d], k rotated, in either format.
    use_cache: return (output, (k, v)), with these tokens' keys and values appended.
    cu_seqlens: int32 [documents + 1], where packed documents begin and end, as DotProductAttention's; with angles of
        their own positions where those restart.
    position_ids: [b, s], of which a model's decoder layer makes rotary_pos_emb; None for tokens that follow
        past_key_value, or nothing. The layers do not read it.
    """

    attention_mask: Tensor | None = None
    rotary_pos_emb: Tensor | None = None
    recompute_core_attention: bool = False
    is_first_microbatch: bool | None = None
    past_key_value: KeyValue | None = None
    use_cache: bool = False
    cu_seqlens: Tensor | None = None
    position_ids: Tensor | None = None

    @property
    def with_cache(self) -> bool:
        """Say whether keys of earlier tokens come in or go out."""
        return self.past_key_value is not None or self.use_cache

    def behind_past(self, k: Tensor, v: Tensor) -> KeyValue:
        """Return the keys and values of all tokens so far: past_key_value's, then k and v, [b, s, kv heads, d]."""
        if self.past_key_value is None:
            return k, v
        past_k, past_v = self.past_key_value
        return paddle.concat([past_k, k], 1), paddle.concat([past_v, v], 1)


ALONE = Context()  # hidden_states without companions


def takes_context(
    *order: str,
) -> Callable[[Callable[[Any, Tensor, Context], Result]], Callable[..., Result]]:
    """Let a forward that takes a Context take its fields as arguments, too: first those of `order`."""
    names = (*order, *(name for name in Context._fields if name not in order))

    def decorate(forward: Callable[[Any, Tensor, Context], Result]) -> Callable[..., Result]:
        @wraps(forward)
        def face(self: Any, hidden_states: Tensor, *given: Any, **named: Any) -> Result:
            if given and type(given[0]) is Context:
                return forward(self, hidden_states, *given)
            return forward(self, hidden_states, Context(**dict(zip(names[: len(given)], given, strict=True)), **named))

        return face

    return decorate
