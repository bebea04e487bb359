"""Linear and LayerNormLinear."""

from __future__ import annotations

from paddle import Tensor

from paddle_te.layers.base import GemmLayer, GemmLayerBehindNorm, local_size
from paddle_te.layers.settings import LayerNormLinearSettings, LinearSettings, takes


class Linear(GemmLayer):
    """Compute y = x · weightᵀ (+ bias) (+ residual).

    Parameters: weight [out_features, in_features], split over the tensor parallel ranks on axis 0 (`parallel_mode`
    "column") or 1 ("row"); with `bias`, bias [out_features], zeros at first, split where it is column parallel.
    sequence_parallel: a column-parallel one's input, and a row-parallel one's output, are this rank's tokens.
    Arguments: LinearSettings'. Raises ValueError for another parallel_mode, and for sizes that the ranks do not divide.
    """

    GEMM_WEIGHTS = ("weight",)

    @takes(LinearSettings)
    def __init__(self, settings: LinearSettings) -> None:
        super().__init__(settings, settings.parallel_mode is not None)
        self.parallel_mode = settings.parallel_mode if self.tp is not None else None
        split_axis = {"column": 0, "row": 1, None: None}[self.parallel_mode]
        shape = [settings.out_features, settings.in_features]
        if split_axis is not None:
            shape[split_axis] = local_size(shape[split_axis], self.tp, ("out_features", "in_features")[split_axis])
        self.create_weight("weight", shape, settings.weight_init, split_axis)
        self.bias = self.create_bias(shape[0], split_axis == 0) if settings.bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute [..., in_features of this rank] -> [..., out_features of this rank].

        residual, if any, is of that shape and added. is_first_microbatch: as TransformerLayer's.
        """
        (quantizers,) = self.begin_forward(is_first_microbatch)
        projection = self.projection("weight", quantizers, x)
        return self.ops.linear(x, projection, residual=residual, parallel_mode=self.parallel_mode, tp=self.tp)


class LayerNormLinear(GemmLayerBehindNorm):
    """Compute y = norm(x) · weightᵀ (+ bias), column parallel.

    Parameters: ln_weight [in_features], LayerNorm's ln_bias [in_features], weight [out_features / tp, in_features];
    with `bias`, bias [out_features / tp], zeros at first.
    Arguments: LayerNormLinearSettings'.
    """

    GEMM_WEIGHTS = ("weight",)

    @takes(LayerNormLinearSettings)
    def __init__(self, settings: LayerNormLinearSettings) -> None:
        super().__init__(settings, settings.in_features, settings.eps)
        rows = local_size(settings.out_features, self.tp, "out_features")
        self.create_weight("weight", [rows, settings.in_features], settings.weight_init, 0)
        self.bias = self.create_bias(rows, split=True) if settings.bias else None

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> tuple[Tensor, Tensor]:
        """Compute [..., in] -> ([..., out of this rank], x).

        The second value is x again: use it for the residual branch, so that backward adds both gradients of x
        inside RMSNorm's kernel.
        """
        (projection,) = self.projections(is_first_microbatch)
        return self.ops.layernorm_linear(x, self.norm(), projection, tp=self.tp)
