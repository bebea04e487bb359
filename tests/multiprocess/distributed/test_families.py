"""Qwen2, with biases, and Mistral, with a sliding window, over ranks that share each GEMM and the states: against one
process. Further layouts of Qwen2 are in test_tied_embeddings.py.

What divides a model does not know its family, so few runs serve for both: a launch trains the variants of both.
"""

import pytest

from tests.multiprocess.distributed import jobs

PROCESSES, FLAGS = 4, {jobs.SHARDING: 2, "sharding": "stage2", jobs.TP: 2}
FAMILIES = {
    "qwen2": dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2"),
    "mistral": dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=9, layers=2),
}
# PaddleNLP's own Mistral has no window. Qwen2's loss in chunks in fp8 is in test_tied_embeddings.py.
BACKENDS = {"qwen2": ["none", "pd", "te_bf16"], "mistral": ["pd", "te_bf16", "te_fp8_fused"]}


def variants(initial_weights, families, backends):
    return [
        jobs.variant(backend, initial_weights[family]) | dict(name=f"{backend} of {family}")
        for family in families
        for backend in BACKENDS[family]
        if backend in backends
    ]


@pytest.fixture(scope="module")
def initial_weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    return {family: jobs.make_initial_weights(folder / family, **changes) for family, changes in FAMILIES.items()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory, initial_weights, warm_start):
    made = variants(initial_weights, FAMILIES, ("none", "pd"))
    return jobs.launch(tmp_path_factory.mktemp("one"), 1, {}, made, "cpu", warm_start)


def test_none_and_pd_agree(reference):
    assert jobs.loss_difference(reference["pd of qwen2"], reference["none of qwen2"]) < 1e-5


def test_over_ranks(tmp_path, initial_weights, reference, warm_host):
    environment = warm_host | dict(EMULATED_TE="1")
    made = variants(initial_weights, FAMILIES, ("none", "pd", "te_bf16", "te_fp8_fused"))
    runs = jobs.launch(tmp_path, PROCESSES, FLAGS, made, "nvgpu", environment)
    for family in FAMILIES:
        pd = f"pd of {family}"
        jobs.check_same(runs[pd], reference[pd], 1e-5, 1e-5)
        assert jobs.loss_difference(runs[f"te_bf16 of {family}"], reference[pd]) < 5e-3
        jobs.check_sizes(FLAGS, runs[pd].sizes, reference[pd].sizes[0])
    jobs.check_same(runs["none of qwen2"], reference["none of qwen2"], 1e-5, 1e-5)
    assert jobs.loss_difference(runs["te_fp8_fused of mistral"], reference["pd of mistral"]) < 1e-2
