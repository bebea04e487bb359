"""TP, SP, PP, virtual PP, sharding and DP in several processes on nvgpu's host runtime, against one process on the CPU.

tests/gpu/test_parallel.py has the same for te on GPUs.
"""

import pytest

from tests.distributed import jobs

FLOAT32 = ["none", "none_full", "pd", "pd_core_attn", "pd_full"]
BF16 = ["none_bf16", "pd_bf16"]
RESUMED = ["none", "pd"]


@pytest.fixture(scope="module")
def initial_weights(tmp_path_factory):
    return jobs.make_initial_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory, initial_weights, nvgpu_host):
    """One process: float32 on the plain CPU, bf16 (which that cannot) on nvgpu."""
    folder = tmp_path_factory.mktemp("reference")
    runs = {}
    for device, names, environment in (("cpu", ["none", "pd"], {}), ("nvgpu", BF16, nvgpu_host)):
        variants = jobs.variants(names, initial_weights, folder / device)
        runs |= jobs.launch(folder / device, 1, {}, variants, device, environment)
    return runs


def test_one_process_none_and_pd_agree(reference):
    losses = reference["none"].losses
    assert losses[6] < losses[1] - 1e-2
    assert jobs.loss_difference(reference["pd"], reference["none"]) < 1e-5


@pytest.mark.parametrize("layout", [name for name in jobs.LAYOUTS if name != "sharding4"])
def test_layout(layout, tmp_path, reference, initial_weights, nvgpu_host):
    processes, flags = jobs.LAYOUTS[layout]
    variants = jobs.variants(FLOAT32 + BF16, initial_weights, tmp_path, RESUMED)
    environment = nvgpu_host | dict(NVGPU_HOST_DEVICES=str(processes))
    runs = jobs.launch(tmp_path, processes, flags, variants, "nvgpu", environment)

    for name in FLOAT32:
        jobs.check_same(runs[name], reference[name.partition("_")[0]], 1e-5, 1e-5)
    for name in BF16:
        jobs.check_same(runs[name], reference[name], 5e-3, 2e-2)
    for name in RESUMED:
        jobs.check_resumed(runs, name)
    jobs.check_sizes(flags, runs["pd"].sizes, reference["pd"].sizes[0])
