"""Sequences that are split over ranks, in several processes on nvgpu's host runtime, against one process.

test_parallel.py has the layouts in which ranks have whole sequences, and test_own_model.py SEP beside sharding; te's
kernels are emulated likewise.
"""

import pytest

from tests.multiprocess.distributed import jobs

# heads and key heads that two ranks of tensor parallelism and two that share sequences divide
SIZES = dict(hidden_size=128, num_attention_heads=8, num_key_value_heads=4)
EXACT, BF16, FP8 = (1e-5, 1e-5), (5e-3, 2e-2), (4e-3, 1e-1)
# {layout: (processes, flags, {variant: (reference, tolerances)}, variants to resume)}
LAYOUTS = {
    "sep2": (
        *jobs.LAYOUTS["sep2"],
        {
            "none": ("none", EXACT),
            "pd_core": ("pd", EXACT),
            "pd_fused": ("pd", EXACT),
            "pd_packed": ("pd_packed", EXACT),
            "pd_ring_core": ("pd", EXACT),
            "te_fp8_dpa_full": ("te_fp8_dpa", FP8),
            "te_fp8_ring_full": ("te_fp8", FP8),
        },
        ["te_fp8_dpa_full", "te_fp8_ring_full"],
    ),
    # sequence parallelism splits a rank's tokens further; clipped by a norm that the ranks have parts of, and copies
    "sep2_sp_tp2": (
        4,
        {jobs.SEP: 2, jobs.TP: 2, "sequence_parallel": "true"},
        {
            "none": ("none", EXACT),
            "pd_tight": ("pd_tight", EXACT),
            "te_fp8_packed_full": ("te_fp8_packed", FP8),
            "te_fp8_ring": ("te_fp8", FP8),
        },
        [],
    ),
    "sep2_pp2": (
        4,
        {jobs.SEP: 2, jobs.PP: 2},
        {"none": ("none", EXACT), "pd_packed": ("pd_packed", EXACT), "te_bf16_ring": ("te_bf16", BF16)},
        [],
    ),
}


@pytest.fixture(scope="module")
def initial_weights(tmp_path_factory):
    return jobs.make_initial_weights(tmp_path_factory.mktemp("weights"), 2, **SIZES)


@pytest.fixture(scope="module")
def references(tmp_path_factory, initial_weights, warm_host):
    return jobs.references(tmp_path_factory.mktemp("reference"), LAYOUTS, initial_weights, warm_host)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout, tmp_path, references, initial_weights, warm_host):
    jobs.check_layout(LAYOUTS[layout], tmp_path, initial_weights, references, warm_host)
