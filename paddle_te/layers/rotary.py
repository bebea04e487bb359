"""Rotary position embedding: the angles; ops apply them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import paddle
from paddle import Tensor, nn

_LENGTH = "original_max_position_embeddings"


def _llama3(inv_freq: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Return Llama 3.1's frequencies (Meta's llama-models, `apply_scaling`): long wavelengths slowed by `factor`."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    length = scaling[_LENGTH]
    wavelength = 2 * math.pi / inv_freq
    smooth = ((length / wavelength - low) / (high - low)).clip(0.0, 1.0)
    return inv_freq * ((1 - smooth) / factor + smooth)


def _yarn(inv_freq: Tensor, rotary_base: float, scaling: Mapping[str, Any]) -> Tensor:
    """Return YaRN's frequencies (Peng et al., 2023, section 3.2).

    Pairs that turn more than beta_fast times within the original length keep their frequency. Pairs that turn less than
    beta_slow times are slowed by `factor`. Between the two the factor is a ramp over the pairs' numbers.
    """
    dim = 2 * inv_freq.shape[0]

    def pair_that_turns(times: float) -> float:
        length = scaling[_LENGTH]
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(rotary_base))

    first, last = pair_that_turns(scaling.get("beta_fast") or 32), pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    pairs = paddle.arange(dim // 2).astype("float32")
    slowed = ((pairs - first) / (last - first or 0.001)).clip(0.0, 1.0)
    return inv_freq * ((1 - slowed) + slowed / scaling["factor"])


def _longrope_attention_factor(scaling: Mapping[str, Any], grown: float) -> float:
    """Return LongRoPE's factor for queries and keys (Ding et al., 2024, section 3.3).

    grown: how many times as long sequences are as those of the first training.
    """
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    return math.sqrt(1 + math.log(grown) / math.log(scaling[_LENGTH])) if grown > 1 else 1.0


def _yarn_mscale(scaling: Mapping[str, Any], mscale: float = 1.0) -> float:
    """Return YaRN's √(1/t) for queries and keys (its section 3.4), as far as mscale says."""
    return 0.1 * mscale * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """Return what YaRN multiplies rotated numbers by; with mscale_all_dim as DeepSeek's models have it."""
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return _yarn_mscale(scaling, scaling["mscale"]) / _yarn_mscale(scaling, scaling["mscale_all_dim"])
    return _yarn_mscale(scaling)


def _in_long_documents(position_ids: Tensor, length: int) -> Tensor:
    """Return bool [b, s], whether a token is in a document of more than `length` tokens; each begins at position 0."""
    positions = position_ids.flatten()
    begins, last = paddle.arange(positions.shape[0]) - positions, positions.shape[0] - 1
    ahead = begins + length  # where that document has a token more
    found = (ahead <= last) & (begins.gather(ahead.clip(max=last)) == begins)
    return found.reshape(position_ids.shape)


class RotaryPositionEmbedding(nn.Layer):
    """Make the angles of RoPE (Su et al., 2021).

    dim: of one head. rotary_base: θ. seq_len_interpolation_factor: positions are divided by it.
    rope_scaling: Hugging Face's dictionary for long contexts, or None: "rope_type" llama3, yarn, longrope, linear (as
    the interpolation factor), dynamic or ntk, and its numbers (`paddle_te.configs.rope`).
    max_position_embeddings: of the model; only dynamic and longrope need it.
    rotary_percent: how much of a head is rotated, from its beginning.

    attention_factor: what the rotated numbers of attention's queries and keys are to be multiplied by, each; 1.0 but
    for yarn and longrope. Rotation keeps lengths, so its square belongs into the scale of the softmax, where all of a
    head is rotated.
    latent_factor: what latent attention multiplies whole queries and keys by, each: yarn's of mscale_all_dim, 1.0 else.
    switches_at: the longest sequence for which longrope's short_factor holds; None with other kinds.
    """

    def __init__(
        self,
        dim: int,
        rotary_base: float = 10000.0,
        seq_len_interpolation_factor: float | None = None,
        rope_scaling: Mapping[str, Any] | None = None,
        max_position_embeddings: int | None = None,
        rotary_percent: float = 1.0,
    ) -> None:
        super().__init__()
        self.dim, self.rotary_base = int(dim * rotary_percent), rotary_base
        self.attention_factor = self.latent_factor = 1.0
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.switches_at: int | None = None
        self._dynamic: tuple[float, int] | None = None  # dynamic scaling's factor and max_position_embeddings
        self._of_length: tuple[Tensor, ...] = ()  # dynamic's, of the last sequence beyond max_position_embeddings
        # In tuples: a tensor that is an attribute is a buffer, which Layer.to(dtype) rounds. At position 4096 an angle
        # from bfloat16 would be off by up to 8.
        self._inv_freq: tuple[Tensor, Tensor] = self._scaled(rope_scaling or {}, max_position_embeddings)
        self._freqs: dict[bool, Tensor] = {}  # whether of longrope's long sequences: angles

    def _scaled(self, scaling: Mapping[str, Any], trained: int | None) -> tuple[Tensor, Tensor]:
        """Return the frequencies, float32 [dim / 2], of a rope_scaling, and those of longrope's long sequences.

        Set the factors that come with them. trained: max_position_embeddings.
        """
        kind, factor = scaling.get("rope_type"), scaling.get("factor")
        inv_freq = self._frequencies(self._stretch(scaling["factor"]) if kind == "ntk" else 1.0)
        if kind == "linear":
            self.seq_len_interpolation_factor = factor
        elif kind == "llama3":
            inv_freq = _llama3(inv_freq, scaling)
        elif kind == "yarn":
            inv_freq = _yarn(inv_freq, self.rotary_base, scaling)
            self.attention_factor = _yarn_attention_factor(scaling)
            self.latent_factor = _yarn_mscale(scaling, scaling.get("mscale_all_dim") or 0.0)
        elif kind == "longrope":
            if trained is None:
                raise ValueError("rope type longrope needs max_position_embeddings")
            self.switches_at = scaling[_LENGTH]
            self.attention_factor = _longrope_attention_factor(scaling, trained / scaling[_LENGTH])
            short, long = (paddle.to_tensor(scaling[name]) for name in ("short_factor", "long_factor"))
            return inv_freq / short, inv_freq / long
        elif kind == "dynamic":
            if factor is None or trained is None:
                raise ValueError("rope type dynamic needs rope_scaling's factor and max_position_embeddings")
            self._dynamic = factor, trained
        return inv_freq, inv_freq

    def _frequencies(self, stretch: float) -> Tensor:
        """Return float32 [dim / 2], one for each pair of a head's numbers, of a θ `stretch` times as large."""
        exponents = paddle.arange(0, self.dim, 2).astype("float32") / self.dim
        return 1.0 / (self.rotary_base * stretch) ** exponents

    def _stretch(self, factor: float) -> float:
        """Say by what θ must grow for the slowest pair to turn `factor` times as slowly (bloc97, "NTK-aware")."""
        return factor ** (self.dim / (self.dim - 2))

    def forward(self, max_seq_len: int) -> Tensor:
        """Return float32 [max_seq_len, dim]: position · frequency, both halves alike."""
        if (dynamic := self._stretching(max_seq_len)) is not None:
            return self._stretched_for(max_seq_len, *dynamic)
        is_long = self._is_long(max_seq_len)
        if is_long not in self._freqs or self._freqs[is_long].shape[0] < max_seq_len:
            self._freqs[is_long] = self._angles(paddle.arange(max_seq_len), self._inv_freq[is_long])
        freqs = self._freqs[is_long]
        return freqs if freqs.shape[0] == max_seq_len else freqs[:max_seq_len]

    def at(self, position_ids: Tensor, length: int = 1, packed: bool = False) -> Tensor:
        """Return the same for any positions: integers [...] -> float32 [..., dim].

        length: of the longest sequence, all that came before included. packed: position_ids, [b, s], are of documents,
        each of which begins at 0: the length of each counts. See `check_any_position`.
        """
        if not packed or not self._is_long(length):
            return self._angles(position_ids, self._inv_freq[self._is_long(length)])
        assert self.switches_at is not None  # else nothing is long
        short, long = (self._angles(position_ids, inv_freq) for inv_freq in self._inv_freq)
        return paddle.where(_in_long_documents(position_ids, self.switches_at).unsqueeze(-1), long, short)

    def _is_long(self, length: int) -> bool:
        """Say whether longrope's long_factor holds for a sequence of that many tokens."""
        return self.switches_at is not None and length > self.switches_at

    def check_any_position(self, length: int, past: int = 0) -> None:
        """Raise ValueError where an angle is not told by its position, or keys were turned by other ones.

        That is with dynamic scaling in a sequence of `length` tokens, `past` of which came before, which is longer than
        max_position_embeddings; and with longrope where it grows beyond the length of the first training.
        """
        if past and self._is_long(length) and not self._is_long(past):
            raise ValueError(
                f"rope type longrope: the keys of {past} tokens were turned as in a sequence of at most "
                f"{self.switches_at} (original_max_position_embeddings), and with these it has {length}: compute them "
                "again, without past_key_value"
            )
        if (dynamic := self._stretching(length)) is not None:
            raise ValueError(
                f"rope type dynamic: in a sequence of {length} tokens, beyond max_position_embeddings="
                f"{dynamic[1]}, angles depend on the length, so there are no position_ids (packed documents that "
                "begin at 0, padding on the left) and no cache of keys that were turned at another length"
            )

    def _stretching(self, length: int) -> tuple[float, int] | None:
        """Return dynamic scaling's (factor, max_position_embeddings) where a sequence is longer than the latter."""
        return self._dynamic if self._dynamic is not None and length > self._dynamic[1] else None

    def _stretched_for(self, length: int, factor: float, trained: int) -> Tensor:
        """Return the angles of dynamic scaling in a sequence of that length (emozilla, "dynamically scaled RoPE")."""
        if not self._of_length or self._of_length[0].shape[0] != length:
            inv_freq = self._frequencies(self._stretch(factor * length / trained - (factor - 1)))
            self._of_length = (self._angles(paddle.arange(length), inv_freq),)
        return self._of_length[0]

    def _angles(self, positions: Tensor, inv_freq: Tensor) -> Tensor:
        position = positions.astype("float32").unsqueeze(-1)
        if self.seq_len_interpolation_factor:
            position = position / self.seq_len_interpolation_factor
        freqs = position * inv_freq
        return paddle.concat([freqs, freqs], -1)
