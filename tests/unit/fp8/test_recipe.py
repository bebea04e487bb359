import dataclasses

import pytest

from paddle_te.fp8 import (
    BlockScaling,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    GemmScalings,
    TensorScaling,
)
from paddle_te.fp8.recipe import FP8_MAX


def test_defaults_are_transformer_engines():
    assert dataclasses.asdict(DelayedScaling()) == dict(
        margin=0,
        fp8_format=Format.HYBRID,
        amax_history_len=1024,
        amax_compute_algo="max",
        reduce_amax=True,
        fp8_dpa=False,
        fp8_dpa_bwd=True,  # TE's environment variable NVTE_FP8_DPA_BWD
        first_step="current",
    )
    assert Float8CurrentScaling().fp8_format is Format.HYBRID
    block = Float8BlockScaling()
    assert (block.fp8_format, block.power_2_scale, block.amax_epsilon) == (Format.E4M3, True, 0.0)


def test_scalings():
    """What recipes say of a GEMM's tensors, delayed scaling also of those in its first step."""
    e4m3, e5m2 = (TensorScaling("current", dtype) for dtype in ("e4m3", "e5m2"))
    assert Float8CurrentScaling().scalings == GemmScalings(e4m3, e4m3, e5m2)
    assert DelayedScaling(first_step="current").first_scalings == GemmScalings(e4m3, e4m3, e5m2)
    assert DelayedScaling(first_step="delayed").first_scalings == DelayedScaling().scalings
    assert Float8CurrentScaling(Format.E4M3).scalings == GemmScalings(e4m3, e4m3, e4m3)
    assert {scaling.kind for scaling in DelayedScaling().scalings} == {"delayed"}
    vectors, blocks = (BlockScaling("e4m3", dim, False, 0.5) for dim in (1, 2))
    recipe = Float8BlockScaling(power_2_scale=False, amax_epsilon=0.5)
    assert recipe.scalings == recipe.first_scalings == GemmScalings(vectors, blocks, vectors)
    assert Float8BlockScaling(Format.HYBRID).scalings.grad_output.dtype == "e5m2"


def test_formats():
    assert Format.HYBRID.value == ("e4m3", "e5m2")
    assert Format.E4M3.value == ("e4m3", "e4m3")
    import ml_dtypes

    assert FP8_MAX == {
        "e4m3": float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max),
        "e5m2": float(ml_dtypes.finfo(ml_dtypes.float8_e5m2).max),
    }


def test_equal_recipes_are_equal_and_frozen():
    assert DelayedScaling(margin=1) == DelayedScaling(margin=1) != DelayedScaling()
    assert len({DelayedScaling(), DelayedScaling(), Float8CurrentScaling()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        DelayedScaling().margin = 1


@pytest.mark.parametrize(
    "arguments",
    [
        dict(margin=-1),
        dict(margin=0.5),
        dict(margin=19),
        dict(amax_history_len=0),
        dict(amax_history_len=True),
        dict(amax_history_len="16"),
        dict(amax_compute_algo="mean"),
        dict(amax_compute_algo=max),
        dict(reduce_amax=1),
        dict(fp8_dpa=1),
        dict(fp8_dpa_bwd=None),
        dict(first_step="block"),
        dict(fp8_format="HYBRID"),
        dict(fp8_format=None),
    ],
)
def test_wrong_arguments_are_named(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}="):
        DelayedScaling(**arguments)
    if name == "fp8_format":
        with pytest.raises(ValueError, match="Format.HYBRID"):
            Float8CurrentScaling(**arguments)


@pytest.mark.parametrize("arguments", [dict(power_2_scale=1), dict(amax_epsilon=-1.0), dict(fp8_format="E4M3")])
def test_wrong_arguments_of_block_scaling_are_named(arguments):
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}="):
        Float8BlockScaling(**arguments)


@pytest.mark.parametrize("recipe", [Float8CurrentScaling, Float8BlockScaling])
def test_only_delayed_scaling_has_attention(recipe):
    with pytest.raises(ValueError, match=f"no fp8 attention with {recipe.kind} scaling.*DelayedScaling"):
        recipe(fp8_dpa=True)
