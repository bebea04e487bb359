"""Experts that ranks have divided, as they lie in files: joined into one tensor, with the optimizer's state."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_te.hosts.paddlenlp.families import model_class
from paddle_te.hosts.paddlenlp.loading import read_config
from paddle_te.weights import CheckpointError, optimizer
from paddle_te.weights.folder import open_checkpoint
from paddle_te.weights.tensors import StackedRef
from tests.multiprocess.distributed.jobs import write_config
from tests.multiprocess.distributed.test_experts_trained import MODEL


@dataclass(frozen=True)
class InMemory:
    """A StoredTensor."""

    array: np.ndarray
    path: Path = Path("optimizer.shard00.pdopt")
    dtype: str = "float32"

    @property
    def shape(self):
        return self.array.shape

    def read(self):
        return self.array


@pytest.mark.parametrize("divided", [1, 2, 4])
def test_slices_of_four_sharding_ranks(divided):
    """Of `divided` ranks each has other experts; those that have the same ones keep slices, with zeros at the end."""
    whole = np.random.default_rng(37).standard_normal((4, 3, 7)).astype("float32")
    parts, copies, slices = np.split(whole, divided), 4 // divided, {}
    for rank in range(4):
        flat = parts[rank % divided].reshape(-1)
        padded = np.concatenate([flat, np.zeros(-len(flat) % (copies * 8), "float32")])
        slices[rank] = InMemory(np.split(padded, copies)[rank // divided])
    weight = StackedRef(tuple(InMemory(part) for part in parts))
    found = optimizer._of_experts(slices, "moment1_0", "experts", weight, 4)
    assert found.shape == whole.shape and (found.read() == whole).all()


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of two ranks that have divided four experts."""
    write_config(tmp_path, MODEL)
    config = read_config(tmp_path / "model")
    config.transformer_engine_backend = "paddle"
    model = model_class(config)(config)
    model.save_pretrained(str(tmp_path / "saved"))
    (tmp_path / "saved/model_state.pdparams").unlink()
    for rank in range(2):
        weights = {
            name: value.split(2)[rank] if ".experts." in name else value for name, value in model.state_dict().items()
        }
        paddle.save(weights, str(tmp_path / f"saved/model_state.ep{rank:02d}.pdparams"))
    return tmp_path / "saved", {name: value.numpy() for name, value in model.state_dict().items()}


def test_files_of_ranks_are_one_checkpoint(folder):
    path, weights = folder
    (rank,) = open_checkpoint(path).ranks.values()
    assert rank.ep == 2 and rank.tensors.keys() == weights.keys()
    assert all((rank.tensors[name].read() == value).all() for name, value in weights.items())


@pytest.mark.parametrize("gone", [0, 1])
def test_a_missing_file_is_named(folder, gone):
    path, _ = folder
    (path / f"model_state.ep{gone:02d}.pdparams").unlink()
    words = "model_state.ep01.pdparams: the file with the experts before" if gone == 0 else "experts.fc1_weight"
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)
