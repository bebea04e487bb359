"""Tensor parallelism's forward in chunks, two ranks in one process on one GPU: what GEMMs compute, not what hides what.

tests/unit/ops/test_te_parallel.py has the same to the bit; cuBLAS may add up in another order for fewer rows, so that
more numbers round to a neighbour.
"""

import paddle
import pytest

from tests.te_weights import relative
from tests.thread_ranks import LAYERS, RANKS, RECIPES, Group, draw_case, make, train_ranks


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("recipe, bound", [("bf16", 1e-2), ("delayed", 0.1), ("current", 0.2)])
def test_communication_beside_gemms(gpu, poisoned, seed, monkeypatch, recipe, bound, kind):
    paddle.set_device(gpu)
    case = draw_case(seed, make(monkeypatch, **LAYERS[kind]))

    def ranks(chunks):
        group = Group(RANKS)
        found = train_ranks(monkeypatch, group, True, *case, RECIPES[recipe], LAYERS[kind], chunks)
        assert (paddle.uint8 in group.gathered) == (recipe == "delayed" or recipe == "current" and chunks > 0)
        return found

    whole = ranks(0)
    for chunks in (1, 2, 4):
        for want, got in zip(whole, ranks(chunks), strict=True):
            for name, value in want.items():
                assert relative(got[name], value) < bound, (chunks, name)
