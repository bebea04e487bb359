"""Rotary position embedding: the angles; ops apply them."""

import math

import paddle
from paddle import nn


def _llama3_scaling(inv_freq, scaling):
    """Llama 3.1's frequencies (Meta's llama-models, `apply_scaling`): long wavelengths slowed by `factor`."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    length = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    smooth = ((length / wavelength - low) / (high - low)).clip(0.0, 1.0)
    return inv_freq * ((1 - smooth) / factor + smooth)


class RotaryPositionEmbedding(nn.Layer):
    """Angles of RoPE (Su et al., 2021).

    dim: of one head. rotary_base: θ. seq_len_interpolation_factor: positions are divided by it (linear scaling).
    rope_scaling: Llama 3.1's dictionary ("rope_type": "llama3", ...) or None.
    """

    def __init__(self, dim, rotary_base=10000.0, seq_len_interpolation_factor=None, rope_scaling=None):
        super().__init__()
        inv_freq = 1.0 / rotary_base ** (paddle.arange(0, dim, 2).astype("float32") / dim)
        if rope_scaling:
            inv_freq = _llama3_scaling(inv_freq, rope_scaling)
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        # In tuples: a tensor that is an attribute is a buffer, which Layer.to(dtype) rounds. At position 4096 an angle
        # from bfloat16 would be off by up to 8.
        self._inv_freq, self._freqs = (inv_freq,), ()

    def forward(self, max_seq_len):
        """Float32 [max_seq_len, dim]: position · frequency, both halves alike."""
        if not self._freqs or self._freqs[0].shape[0] < max_seq_len:
            self._freqs = (self.at(paddle.arange(max_seq_len)),)
        (freqs,) = self._freqs
        return freqs if freqs.shape[0] == max_seq_len else freqs[:max_seq_len]

    def at(self, position_ids):
        """The same for any positions: integers [...] -> float32 [..., dim]."""
        position = position_ids.astype("float32").unsqueeze(-1)
        if self.seq_len_interpolation_factor:
            position = position / self.seq_len_interpolation_factor
        freqs = position * self._inv_freq[0]
        return paddle.concat([freqs, freqs], -1)
