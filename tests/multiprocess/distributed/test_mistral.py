"""Mistral over two ranks of tensor parallelism trains as in one process.

It has a sliding window and a forward of ours. PaddleNLP's class supports no parallelism but this and sharding. Other
families are in test_tied_embeddings.py and test_own_model.py.
"""

from tests.multiprocess.distributed import jobs

MISTRAL = dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=9)


def test_over_ranks(tmp_path, warm_start, warm_host):
    """PaddleNLP's own Mistral has no window, and is no reference."""
    init = jobs.make_initial_weights(tmp_path / "weights", layers=2, **MISTRAL)
    pd, te = (jobs.variant(name, init) for name in ("pd", "te_fp8_fused"))
    one = jobs.launch(tmp_path / "one", 1, {}, [pd], "cpu", warm_start)["pd"]
    processes, flags = jobs.LAYOUTS["tp2"]
    runs = jobs.launch(tmp_path / "tp2", processes, flags, [pd, te], "nvgpu", warm_host | dict(EMULATED_TE="1"))
    jobs.check_same(runs["pd"], one, 1e-5, 1e-5)
    jobs.check_sizes(flags, runs["pd"].sizes, one.sizes[0])
    assert jobs.loss_difference(runs["te_fp8_fused"], one) < 1e-2
