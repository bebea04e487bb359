"""Computes the least time that a step of a model with experts can take on a GPU.

Each part is taken at the rate that the best kernels have shown on Hopper: GEMMs, attention, and passes over activations
and weights that no fusion saves. Launches and routing, which a framework may hide, count nothing.
"""

import re
from dataclasses import dataclass

GEMMS = {"bf16": 790e12, "fp8": 1450e12}  # FLOP/s
ATTENTION_FORWARD, ATTENTION_BACKWARD = 560e12, 480e12  # FLOP/s of causal attention, half of the products counted
BANDWIDTH = {"H200": 4.0e12, "H100": 2.8e12}  # bytes/s of passes over memory
UPDATE = 12  # bytes that AdamW reads and writes for a weight, with its state in 6 bytes


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of one decoder layer with experts: see `problem.Dims`, and `expert_peers.ExpertDims`."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    topk: int

    @property
    def attention_weights(self) -> int:
        """Return the elements of attention's weights."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def weights(self) -> int:
        """Return the elements of all weights."""
        return self.attention_weights + self.experts * (3 * self.hidden * self.ffn + self.hidden)

    @property
    def active(self) -> int:
        """Return the elements of the weights that a token is multiplied with, without the router's."""
        return self.attention_weights + self.topk * 3 * self.hidden * self.ffn

    @property
    def numbers_of_a_token(self) -> int:
        """Return the numbers that forward and backward read or write for a token, beside GEMMs and attention.

        Norms and residuals 16 times hidden, permutation and its inverse each way 4 · (1 + topk) times, the activation
        8 times ffn for each expert of the token.
        """
        return (16 + 4 * (1 + self.topk)) * self.hidden + 8 * self.topk * self.ffn


def bandwidth_of(gpu: str) -> float | None:
    """Return BANDWIDTH of a GPU by the name that its driver has; None for one that is not there."""
    return next((rate for name, rate in BANDWIDTH.items() if re.search(rf"\b{name}\b", gpu)), None)


def layer_seconds(layer: LayerSizes, batch: int, sequence: int, precision: str, bandwidth: float) -> float:
    """Return the seconds of a layer's forward and backward: weights are read twice, their gradients written once."""
    tokens = batch * sequence
    forward = 2 * batch * sequence**2 * layer.heads * layer.head_dim
    attention = forward / ATTENTION_FORWARD + 2.5 * forward / ATTENTION_BACKWARD
    moved = 2 * tokens * layer.numbers_of_a_token + 6 * layer.weights
    return 6 * tokens * layer.active / GEMMS[precision] + attention + moved / bandwidth


def head_seconds(tokens: int, hidden: int, vocabulary: int) -> float:
    """Return the seconds of the head's GEMMs, in bf16."""
    return 6 * tokens * hidden * vocabulary / GEMMS["bf16"]


def update_seconds(weights: int, bandwidth: float) -> float:
    """Return the seconds of AdamW."""
    return UPDATE * weights / bandwidth
