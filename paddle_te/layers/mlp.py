"""LayerNormMLP."""

from __future__ import annotations

from dataclasses import replace

from paddle import Tensor

from paddle_te.layers.base import GemmLayerBehindNorm, local_size
from paddle_te.layers.dropout import add_to_residual
from paddle_te.layers.norm import norm_of
from paddle_te.layers.settings import LayerSettings, MLPSettings, takes
from paddle_te.ops.activations import FC1_WIDTHS
from paddle_te.ops.recompute import MLPRecompute


class LayerNormMLP(GemmLayerBehindNorm):
    """Compute y = x + dropout(act(norm(x) · fc1ᵀ (+ fc1_bias)) · fc2ᵀ (+ fc2_bias)), the residual included.

    Parameters: ln_weight [hidden_size], LayerNorm's ln_bias [hidden_size], fc1_weight [ffn_hidden_size / tp,
    hidden_size], fc2_weight [hidden_size, ffn_hidden_size / tp]. A gated activation has an fc1_weight of
    [2 · ffn_hidden_size / tp, hidden_size]: this rank's gate rows, then its up rows. With `bias` there are fc1_bias, as
    long as fc1_weight has rows, and fc2_bias [hidden_size]. With norms "after" or "both" there is post_norm.weight, and
    with norms "after" no ln_weight.
    Arguments: MLPSettings'.
    """

    GEMM_WEIGHTS = ("fc1_weight", "fc2_weight")

    slot = "layernorm_mlp"

    @takes(MLPSettings)
    def __init__(self, settings: MLPSettings) -> None:
        hidden_size = settings.hidden_size
        super().__init__(replace(settings, normalization=settings.norm_before), hidden_size, settings.eps)
        self.post_norm = norm_of(settings.norm_after(hidden_size, settings.eps), settings.normalization)
        self.dropout_in_training, self.activation = settings.hidden_dropout, settings.activation
        ffn = local_size(settings.ffn_hidden_size, self.tp, "ffn_hidden_size")
        fc1_rows = FC1_WIDTHS[self.activation] * ffn
        self.recompute = MLPRecompute(settings.mlp_again, settings.mlp_chunk_tokens, settings.input_store(ffn))
        self.create_weight("fc1_weight", [fc1_rows, hidden_size], settings.weight_init, 0)
        self.create_weight("fc2_weight", [hidden_size, ffn], settings.output_init, 1)
        self.fc1_bias = self.create_bias(fc1_rows, split=True) if settings.bias else None
        self.fc2_bias = self.create_bias(hidden_size) if settings.bias else None

    @classmethod
    def of_layer(cls, settings: LayerSettings) -> LayerNormMLP:
        """Make the feed-forward of a TransformerLayer."""
        return cls.of(settings.mlp)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute [..., hidden_size] -> the same shape and dtype.

        is_first_microbatch: as TransformerLayer's.
        """
        fc1, fc2 = self.projections(is_first_microbatch)
        out = self.ops.layernorm_mlp(
            x,
            self.norm(),
            fc1,
            fc2,
            activation=self.activation,
            add_residual=self.adds_at_once,
            recompute=self.recompute,
            tp=self.tp,
        )
        return self.added(*out) if isinstance(out, tuple) else out

    @property
    def adds_at_once(self) -> bool:
        """Say whether the residual is added in the GEMM."""
        return not self.dropout and self.post_norm is None

    def added(self, out: Tensor, x: Tensor) -> Tensor:
        """Return x and what the MLP adds to it."""
        return add_to_residual(out, x, self.post_norm, self.dropout, self.tp)
