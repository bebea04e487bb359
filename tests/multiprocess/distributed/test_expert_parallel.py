"""Two ranks that divide the experts, on nvgpu's host runtime, beside one process that has all."""

from pathlib import Path

import numpy as np
import pytest

from tests.nvgpu_processes import run_ranks
from tests.te_weights import relative

SCRIPT = Path(__file__).with_name("experts.py")
RANKS = 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory, nvgpu_host, warm_start):
    """The folder's path and the beginning of the results' names."""
    out = tmp_path_factory.mktemp("experts") / "run"
    for ranks in (1, RANKS):
        codes, outputs = run_ranks(nvgpu_host["CUSTOM_DEVICE_ROOT"], ranks, SCRIPT, 37, out, **warm_start)
        assert codes == [0] * ranks, outputs
    return out


# te's sums of bfloat16 numbers: another order may round to the neighbour
@pytest.mark.parametrize("case, losses, weights", [
    ("pd_allgather", 1e-6, 1e-6),
    ("pd_alltoall", 1e-6, 1e-6),
    ("te_allgather", 1e-2, 2e-2),
    ("te_alltoall", 1e-2, 2e-2),
    ("pd_lora", 1e-6, 1e-6),
])  # fmt: skip
def test_sharding_ranks_are_one_process(trained, case, losses, weights):
    """Clipping counts every expert once, and each expert has learnt from all samples."""
    one = dict(np.load(f"{trained}.{case}.1.0.npz"))
    ranks = [dict(np.load(f"{trained}.{case}.{RANKS}.{rank}.npz")) for rank in range(RANKS)]
    for name, value in one.items():
        parts = [of_rank[name] for of_rank in ranks]
        if ".experts." in name:
            found = np.concatenate(parts)
        else:
            assert (parts[0] == parts[1]).all(), name
            found = parts[0]
        assert relative(found, value) < (losses if name == "losses" else weights), name
