import dataclasses

import pytest

from paddle_te.fp8 import DelayedScaling, Float8CurrentScaling, Format
from paddle_te.fp8.recipe import FP8_MAX


def test_defaults_are_transformer_engines_but_for_the_first_step():
    assert dataclasses.asdict(DelayedScaling()) == dict(
        margin=0,
        fp8_format=Format.HYBRID,
        amax_history_len=1024,
        amax_compute_algo="max",
        reduce_amax=True,
        fp8_dpa=False,
        fp8_dpa_bwd=True,  # TE's environment variable NVTE_FP8_DPA_BWD
        first_step="current",  # TE begins with all scales 1
    )
    assert Float8CurrentScaling().fp8_format is Format.HYBRID


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


def test_current_scaling_has_no_attention():
    with pytest.raises(ValueError, match="no fp8 attention with current scaling.*DelayedScaling"):
        Float8CurrentScaling(fp8_dpa=True)
