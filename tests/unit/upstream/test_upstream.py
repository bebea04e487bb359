"""The room of repairs: names, versions, applying and undoing; repairs that have no suite of their own."""

import ctypes
import importlib
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from fast_dataindex import helpers
from paddle.base.framework import EagerParamBase
from paddle.distributed.fleet.layers.mpu.random import RNGStatesTracker
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import hybrid_parallel_optimizer
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_parallel import PipelineLayer
from paddle.distributed.fleet.utils import tensor_fusion_helper
from paddlenlp.transformers import segment_parallel_utils

from paddle_te import upstream
from paddle_te.upstream import (
    REPAIRS,
    deferred_imports,
    flash_attention_flags,
    index_progress,
    promotion_notices,
    rng_tracker,
    segment_exchange,
    segment_gradient_norm,
    sharding_alignment,
    shared_weights,
    threaded_store,
)


@pytest.mark.parametrize("name", REPAIRS)
def test_every_repair_says_what_it_is_for(name):
    module = importlib.import_module(f"paddle_te.upstream.{name}")
    assert module.PACKAGE in ("paddle", "paddlenlp") and module.VERSION
    assert module.SYMPTOM.endswith(".") and module.__doc__


def test_all_are_applied_and_undone():
    changed = (RNGStatesTracker.add, PipelineLayer._synchronize_shared_weights)
    try:
        assert upstream.apply() == list(REPAIRS)
        assert upstream.apply() == list(REPAIRS)  # again
        assert (RNGStatesTracker.add, PipelineLayer._synchronize_shared_weights) != changed
    finally:
        upstream.undo()
    assert (RNGStatesTracker.add, PipelineLayer._synchronize_shared_weights) == changed


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="no_such: there is no such repair; there are deferred_imports"):
        upstream.apply("no_such")


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(paddle, "__version__", "3.4.0")
    with pytest.raises(ValueError, match=r"paddle 3\.4\.0 is installed.*made for 3\.3\.: install paddlepaddle 3\.3\.1"):
        upstream.apply("threaded_store")


USES_OF_DEFERRED_NAMES = """
import json, sys
from paddle_te.upstream import deferred_imports
deferred_imports.apply()
deferred_imports.apply()
import paddle_te.hosts.paddlenlp.training.trainer, paddlenlp
from datasets import Dataset
from paddlenlp.trl import SFTTrainer
found = {"imported": [name for name in ("sklearn.base", "scipy.stats", "pandas", "pyarrow") if name in sys.modules]}
found["instance"] = isinstance(3, Dataset), issubclass(int, Dataset)
class Mine(SFTTrainer): pass
found["bases"] = [base.__name__ for base in Mine.__mro__]
found["called"] = len(Dataset.from_dict({"a": [1, 2]}))
found["of_a_class"] = isinstance(Dataset.from_dict({}), Dataset), isinstance(3, Dataset)
found["whole"] = "pandas" in sys.modules, sys.modules["datasets"].__file__.endswith("__init__.py")
deferred_imports.undo()
import seqeval
found["undone"] = seqeval.__file__.endswith("__init__.py")
print(json.dumps(found))
"""


def test_packages_that_training_does_not_use_are_imported_when_they_are_used():
    done = subprocess.run([sys.executable, "-c", USES_OF_DEFERRED_NAMES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "imported": [],
        "instance": [False, False],
        "bases": ["Mine", "SFTTrainer", "Trainer", "object"],
        "called": 2,
        "of_a_class": [True, False],
        "whole": [True, True],
        "undone": True,
    }


def test_deferring_comes_too_late_where_paddlenlp_is_imported(repair):
    importlib.import_module("paddlenlp")
    before = list(sys.meta_path)
    repair(deferred_imports)
    assert sys.meta_path == before


@pytest.mark.parametrize("chosen", [None, "1"])
def test_ranks_meet_through_the_threaded_store(monkeypatch, repair, chosen):
    """Unless the user chose otherwise."""
    monkeypatch.delenv(threaded_store.FLAG, raising=False)
    if chosen:
        monkeypatch.setenv(threaded_store.FLAG, chosen)
    paddle.set_flags({threaded_store.FLAG: True})
    repair(threaded_store)
    assert paddle.get_flags(threaded_store.FLAG)[threaded_store.FLAG] is bool(chosen)


def test_gradients_are_aligned_on_nvgpu(repair):
    assert "nvgpu" not in tensor_fusion_helper.alignment
    repair(sharding_alignment)
    assert tensor_fusion_helper.alignment["nvgpu"] == 256


def test_flags_of_builds_for_cuda(repair):
    """FlashMask asks for them; others are Paddle's as before."""
    flags, other = ["FLAGS_cudnn_deterministic", "FLAGS_flash_attn_version"], "FLAGS_check_nan_inf"
    with pytest.raises(ValueError, match="cannot get its value"):
        paddle.get_flags(flags)
    repair(flash_attention_flags)
    for get_flags in (paddle.get_flags, paddle.base.framework.get_flags):
        assert get_flags([*flags, other]) == dict(zip([*flags, other], [False, 2, False], strict=True))
    with pytest.raises(ValueError, match="cannot get its value"):
        paddle.get_flags("FLAGS_no_such_flag")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_stage_counts_a_shared_weight(monkeypatch, repair, rank):
    monkeypatch.setattr(paddle.distributed, "broadcast", lambda *args, **kwargs: None)
    weight = SimpleNamespace(name="embedding_0.w_0", is_firstly_shared=None)
    layer = SimpleNamespace(embedding_weight=weight, parameters=lambda: [weight])
    shared = {"weight_attr": ["embedding_weight"], "layer": layer, "ranks": [0, 1], "group": None}
    pipeline = SimpleNamespace(shared_comm={"key": shared}, global_rank=rank)
    PipelineLayer._synchronize_shared_weights(pipeline)
    assert weight.is_firstly_shared is None, "Paddle marks it now: the repair can go"
    repair(shared_weights)
    PipelineLayer._synchronize_shared_weights(pipeline)
    assert weight.is_firstly_shared is (rank == 0)


@pytest.mark.parametrize("first", [True, False])
def test_slices_of_a_shared_weight_count_as_it_does(repair, first):
    """Sharding stage 1 with split_param clips them."""
    repair(shared_weights)
    weight = EagerParamBase(shape=[2], dtype="float32")
    weight.is_firstly_shared = first
    optimizer = object.__new__(DygraphShardingOptimizerV2)
    optimizer._slice_params = {}
    assert optimizer._create_slice_param(weight).is_firstly_shared is first


def test_heads_are_exchanged_for_tokens(monkeypatch, repair, seed):
    """The first of two ranks with the same numbers: it gets its half of the heads twice, for each rank's tokens."""

    def alltoall(received, sent, group=None):
        for target in received:
            target.set_value(sent[0])

    monkeypatch.setattr(paddle.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(paddle.distributed, "alltoall", alltoall)
    x = paddle.rand([3, 4, 6])
    for repaired in (False, True):
        if repaired:
            repair(segment_exchange)
        got = segment_parallel_utils._reshard_qkv(x.clone(), "a group", split_axis=2, concat_axis=1)
        assert bool((got == paddle.concat([x[:, :, :3]] * 2, 1)).all()) == repaired


def test_ranks_that_share_sequences_count_once_in_the_norm(monkeypatch, repair):
    """Of 2 × 2 ranks that share weights' parts and sequences: those that share sequences have equal gradients."""
    ranks = {"both": 4, "tensor parallel": 2}
    hcg = SimpleNamespace(
        get_sep_parallel_world_size=lambda: 2,
        get_model_parallel_world_size=lambda: 2,
        get_data_parallel_world_size=lambda: 1,
        get_sharding_parallel_world_size=lambda: 1,
        get_pipe_parallel_world_size=lambda: 1,
        get_check_parallel_group=lambda sharding: "both",
        get_model_parallel_group=lambda: "tensor parallel",
    )
    monkeypatch.setattr(paddle.distributed, "all_reduce", lambda x, group: x.scale_(float(ranks[group])))
    for repaired, total in (False, 4), (True, 2):
        if repaired:
            repair(segment_gradient_norm)
        clip = hybrid_parallel_optimizer.HybridParallelClipGrad(paddle.nn.ClipGradByGlobalNorm(1.0), hcg)
        squares = paddle.ones([1])
        clip._global_norm(squares, paddle.ones([1]))
        assert squares.item() == total


def draws(tracker, name):
    with tracker.rng_state(name):
        return paddle.rand([3]).tolist()


def test_the_trackers_states_stay_what_they_were(repair, seed):
    """On one device the repaired tracker draws what Paddle's does."""
    drawn = []
    for repaired in (False, True):
        if repaired:
            repair(rng_tracker)
        tracker = RNGStatesTracker()
        tracker.reset()
        tracker.add("a", seed + 1)
        tracker.add("b", seed + 2)
        kept = tracker.get_states_tracker()
        drawn.append([draws(tracker, "a"), draws(tracker, "b"), draws(tracker, "a")])
        tracker.set_states_tracker(kept)
        drawn[-1].append(draws(tracker, "a"))
        assert drawn[-1][3] == drawn[-1][0]
    assert drawn[0] == drawn[1]


def test_building_an_index_fills_no_screen(repair, capfd, caplog):
    arguments = np.ones(3, np.int32), np.arange(3, dtype=np.int32), 1, 1, 3
    helpers.build_sample_idx(*arguments)
    ctypes.CDLL(None).fflush(None)
    assert "number of documents" in capfd.readouterr().out
    repair(index_progress)
    with caplog.at_level("DEBUG"):
        assert len(helpers.build_sample_idx(*arguments)) == 3
    assert not capfd.readouterr().out and "number of documents" in caplog.text


MIXES_TYPES = """
import logging, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
import paddle
from paddle_te import upstream
upstream.apply("promotion_notices")
main, gradient = paddle.ones([2]), paddle.ones([2], "bfloat16")
main.add_(gradient), main * gradient
"""


def test_mixing_types_says_nothing_after_the_repair():
    done = subprocess.run([sys.executable, "-c", MIXES_TYPES], capture_output=True, text=True, check=True)
    notice = " different data type, run type promotion automatically"
    assert done.stdout.count(notice) == len(promotion_notices.OPERATIONS), done.stdout
    assert notice not in done.stderr
