"""Which checkpoints are read here, and what of a parameter a rank's optimizer holds."""

import pickle
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddle_te.hosts.paddlenlp.training.resharding import Share, broken_state, check_resumable, open_share
from paddle_te.optimizer.holding import Held, held_by
from paddle_te.weights import CheckpointError, convert, opened
from paddle_te.weights.layouts import te_layout
from tests.unit.weights.models import Model
from tests.unit.weights.test_optimizer import save_trained


def arguments(**changes):
    """Of a run in one process."""
    degrees = dict.fromkeys(("tensor", "pipeline", "sharding"), 1)
    flags = {f"{name}_parallel_degree": degree for name, degree in degrees.items()} | dict(virtual_pp_degree=1)
    flags |= dict(optim_moments="float32", master_weights="float32")
    flags |= dict(optim="adamw", sharding_parallel_config="", unified_checkpoint=False, unified_checkpoint_config=[""])
    return SimpleNamespace(
        **flags
        | dict(world_size=1, ignore_load_lr_and_optim=False, model_dtype="float32", offload_optimizer=0.0)
        | changes
    )


@pytest.fixture
def saved(tmp_path, seed):
    """{degree of tensor parallelism: a checkpoint}."""
    rng = np.random.default_rng(seed)
    model = Model(rng, kv_heads=4)
    state_of = {kind: Model(rng, kv_heads=4) for kind in ("moment1_0", "moment2_0")}
    folders = {1: tmp_path / "one", 2: tmp_path / "tp2"}
    for degree, folder in folders.items():
        for tp in range(degree):
            save_trained(folder, model, state_of, tp, degree)
        (folder / "trainer_state.json").write_text("{}")
        (folder / "scheduler.pdparams").write_bytes(pickle.dumps({"last_epoch": 3}, protocol=4))
    return folders


@pytest.mark.parametrize("degree, changes, read_here", [
    (1, {}, False),
    (2, {}, True),
    (1, dict(tensor_parallel_degree=2), True),
    (2, dict(tensor_parallel_degree=2), False),
    (2, dict(tensor_parallel_degree=2, world_size=4), False),  # data parallelism leaves no trace
    (1, dict(pipeline_parallel_degree=2), True),
    (1, dict(sharding_parallel_degree=2), True),
    (2, dict(tensor_parallel_degree=2, sharding_parallel_degree=2), True),
])  # fmt: skip
def test_paddlenlp_loads_a_runs_own_files_only(saved, degree, changes, read_here):
    assert (open_share(saved[degree], arguments(**changes)) is not None) == read_here
    check_resumable(saved[degree], arguments(**changes))


def test_another_layout_of_weights_and_a_unified_checkpoint_are_read_here(saved, tmp_path):
    assert open_share(saved[1], arguments(), te_layout()) is not None
    convert(saved[1], tmp_path / "unified", "reshard", with_optimizer=True, progress=False)
    for unified in (False, True):
        assert open_share(tmp_path / "unified", arguments(unified_checkpoint=unified)) is not None


def test_a_checkpoint_is_opened_once_to_resume(saved, monkeypatch):
    """To judge whether it is whole, whether this run can go on from it, and to read each rank's share."""
    calls = []
    for name in ("open_checkpoint", "open_optimizer"):
        plain = getattr(opened, name)
        monkeypatch.setattr(opened, name, lambda *a, plain=plain, name=name: calls.append(name) or plain(*a))
    args = arguments(tensor_parallel_degree=2, world_size=2)
    assert broken_state(saved[1], args) == []
    check_resumable(saved[1], args)
    share = open_share(saved[1], args, te_layout())
    assert share is opened.opened(saved[1]).checkpoint and opened.opened(saved[1]).optimizer
    assert calls == ["open_checkpoint", "open_optimizer"]
    (saved[1] / "trainer_state.json").write_text("{}")
    assert opened.opened(saved[1]).checkpoint is not share, "a file has changed"


def test_refusals(saved):
    def refused(message, degree=2, **changes):
        with pytest.raises(CheckpointError, match=message):
            check_resumable(saved[degree], arguments(**changes))

    refused("cannot be divided by tensor_parallel_degree=3", tensor_parallel_degree=3)
    refused("the model has only 5 parts", pipeline_parallel_degree=6)
    refused("its weights are float32, this run's bfloat16", model_dtype="bfloat16")
    kept = (
        "saved with --optim_moments float32, and this run has --optim_moments bfloat16: resume with --optim_moments f"
    )
    refused(kept, optim_moments="bfloat16")
    refused(kept, optim_moments="bfloat16", degree=1)  # which PaddleNLP would load
    check_resumable(saved[2], arguments(optim_moments="bfloat16", ignore_load_lr_and_optim=True))
    (saved[2] / "scheduler.pdparams").unlink()
    refused("scheduler.pdparams: missing")
    check_resumable(saved[2], arguments(ignore_load_lr_and_optim=True, model_dtype="bfloat16"))
    (saved[2] / "optimizer.tp01.pdopt").unlink()
    refused("optimizer.tp01.pdopt: missing")


@pytest.mark.parametrize("other", ["adapter", "optimizer"])
def test_what_is_not_resharded_is_resumed_in_its_own_layout(tmp_path, other):
    """LoRA's adapters, and optimizers but AdamW."""
    changes = dict(optim="adafactor") if other == "optimizer" else {}
    if other == "adapter":
        (tmp_path / "lora_model_state.tp00.pdparams").touch()
    for rank in range(2):
        (tmp_path / f"optimizer.tp{rank:02d}.pdopt").touch()
    assert open_share(tmp_path, arguments(**changes, tensor_parallel_degree=2, world_size=2)) is None
    for degrees in ({}, dict(tensor_parallel_degree=2, sharding_parallel_degree=2)):
        with pytest.raises(CheckpointError, match=r"it has optimizer.tp00.pdopt, optimizer.tp01.pdopt\), and only"):
            open_share(tmp_path, arguments(**changes, **degrees))
    for rank in range(2):
        (tmp_path / f"optimizer.tp{rank:02d}.pdopt").unlink()
        (tmp_path / f"peft_model-{rank + 1:05d}-of-00002.safetensors").touch()
    if other == "adapter":  # of which PaddleNLP reads the first on one device
        with pytest.raises(CheckpointError, match="in the layout in which it was saved"):
            open_share(tmp_path, arguments(unified_checkpoint=True))


@pytest.mark.parametrize("begin, end, wanted", [
    (None, None, [[0, 1, 2], [3, 4, 5]]),
    (0, 3, [0, 1, 2]),
    (2, 6, [2, 3, 4, 5]),
    (4, 8, [4, 5, 0, 0]),
    (6, 8, [0, 0]),
    (7, 9, [0, 0]),
])  # fmt: skip
def test_a_share_of_a_tensor(begin, end, wanted):
    got = Held("w", begin, end).share(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert got.dtype == np.float32 and got.tolist() == wanted


def test_moments_in_8_bits_are_divided_anew_or_refused(seed):
    """Elements of two blocks cannot share one, which the error says with the flag and the layout to take."""
    elements = np.random.default_rng(seed).integers(1, 2**30, 2, dtype="uint64").repeat(256) << 8 | 1
    share = Share(SimpleNamespace(folder="checkpoint-3"), SimpleNamespace(state_dict=dict))
    assert share._moment(Held("w", 256, 520).share(elements), "w").size == 260 + 4 + 8
    with pytest.raises(CheckpointError, match="checkpoint-3: --optim_moments int8 keeps 'w' .*resume in the layout in"):
        share._moment(Held("w", 100, 356).share(elements), "w")


def test_without_sharding_a_rank_holds_everything():
    layer = paddle.nn.Linear(2, 3)
    layer.bias.stop_gradient = True
    optimizer = paddle.optimizer.AdamW(parameters=layer.parameters())
    assert held_by(optimizer, layer.parameters()) == {layer.weight.name: Held(layer.weight.name)}
