"""Rotary embeddings in float64, and what their kernels read."""

import numpy as np

from tests.unit.native.cuda_on_cpu import aligned


def draw_angles(random, positions, width):
    """[positions, width], whose halves are the same."""
    half, angles = random.uniform(-50, 50, (positions, width // 2)), aligned((positions, width))
    angles[:] = np.concatenate([half, half], axis=1)
    return angles


def rotated(x, angles, sign, turn):
    """x: [b, s, h, d]; angles: [s, numbers that are turned], of which the first half is read. In float64."""
    width = angles.shape[1]
    interleaved = turn.interleaved
    turns = turn.factor * np.exp(1j * sign * angles[:, : width // 2].astype("float64"))[:, None]
    pairs = x[..., :width].reshape(*x.shape[:-1], *((-1, 2) if interleaved else (2, -1))).astype("float64")
    first, second = np.moveaxis(pairs, -1 if interleaved else -2, 0)
    turned = (first + 1j * second) * turns
    turned = np.stack([turned.real, turned.imag], -1 if interleaved else -2).reshape(*x.shape[:-1], width)
    return np.concatenate([turned, x[..., width:]], -1)


def split(x, heads, kv_heads):
    """q, k and v of [b, s, heads, d]."""
    return np.split(x, [heads, heads + kv_heads], axis=2)
