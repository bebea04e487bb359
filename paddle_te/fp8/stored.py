"""Store the weights of a frozen base in fp8 only, without a copy in higher precision."""

from __future__ import annotations

import paddle
from paddle import Tensor

from paddle_te.fp8.recipe import FP8_MAX, DelayedScaling, Recipe
from paddle_te.fp8.scaling import StoredScaling, TensorScaling
from paddle_te.fp8.state import Block, check_aligned


def stored_scaling(recipe: Recipe, keeps_transpose: bool = False) -> StoredScaling:
    """Return the StoredScaling of weights that are multiplied under a recipe. They are e4m3, as a recipe's weights."""
    made_by = recipe.scalings.weight if recipe.kind == "block" else TensorScaling("current", "e4m3")
    return StoredScaling(made_by, keeps_transpose)


class StoredWeight:
    """How to read a weight in fp8: e4m3 numbers and the inverses of their scales.

    A StoredWeight replaces the weight's Quantizer in a Gemm, although no step quantizes the weight. The layer's
    parameter has the bytes of the numbers, uint8 of the weight's shape. A backend's `quantize_weight` writes the bytes,
    scale_inv and transpose.
    recipe: under which it is to be multiplied. With block scaling each block of the weight has a scale, else all of it
    one. keeps_transpose: a StoredScaling's.
    scale_inv: float32 on the present device, at a 16-byte aligned address: [1]; in te of experts' weights [E], all
    alike; of blocks as the backend's GEMM reads them, None until `quantize_weight` has made them.
    transpose: in te with keeps_transpose the transposed copy, bytes [in, out], of experts' weights [E, in, out]; else
    None. No checkpoint has it, as it is no parameter.
    """

    kind = "stored"
    scale_ptr = amax_ptr = statistics_ptr = 0  # a Quantizer has these addresses, a StoredWeight only scale_inv's

    def __init__(
        self,
        recipe: Recipe = DelayedScaling(),  # noqa: B008, it is immutable
        keeps_transpose: bool = False,
    ) -> None:
        self.scaling = stored_scaling(recipe, keeps_transpose)
        self.dtype, self.fp8_max = self.scaling.dtype, FP8_MAX[self.scaling.dtype]
        self._scale_inv: Tensor | None = None
        self.transpose: Tensor | None = None
        if not self.scaling.in_blocks:
            self.scale_inv = paddle.ones([1], "float32")

    @property
    def scale_inv(self) -> Tensor:
        assert self._scale_inv is not None  # a backend's `quantize_weight` has made them
        return self._scale_inv

    @scale_inv.setter
    def scale_inv(self, tensor: Tensor) -> None:
        check_aligned(tensor)
        self._scale_inv = tensor

    @property
    def scale_inv_ptr(self) -> int:
        """The address of scale_inv."""
        return self.scale_inv.data_ptr()

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise RuntimeError for a recipe under which GEMMs cannot read it."""
        if self.scaling.in_blocks != (recipe.kind == "block"):
            scales = "a scale for each block" if self.scaling.in_blocks else "one scale"
            raise RuntimeError(
                f"a weight that exists in fp8 only, with {scales}, cannot be multiplied under {type(recipe).__name__}: "
                "give fp8_model_init the recipe of fp8_autocast"
            )

    def move_to(self, block: Block, column: int) -> None:
        """Do nothing: no step updates this scale, so its column in a block of delayed scaling stays empty."""
