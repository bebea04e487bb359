import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from paddle_te.weights import CheckpointError, safetensors
from paddle_te.weights.tensors import TensorSpec
from tests.unit.weights.models import assert_same, random_bits


def write(path, specs, state, **kwargs):
    writer = safetensors.Writer(path, specs, **kwargs)
    for array in state.values():
        writer.add([array])
    writer.close()


def read_all(path):
    return {name: ref.read() for name, ref in safetensors.read(path).items()}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_both_ways_with_the_library(tmp_path, rng, dtype):
    state = {
        "a": random_bits(rng, (3, 5), dtype),
        "b": random_bits(rng, (7,), dtype),
        "c": random_bits(rng, (2, 3), dtype),
    }
    save_file(state, tmp_path / "theirs.safetensors")
    assert {ref.dtype for ref in safetensors.read(tmp_path / "theirs.safetensors").values()} == {dtype}
    assert_same(read_all(tmp_path / "theirs.safetensors"), state)
    specs = [TensorSpec(name, dtype, tensor.shape) for name, tensor in state.items()]
    write(tmp_path / "ours.safetensors", specs, state)
    assert_same(load_file(tmp_path / "ours.safetensors"), state)
    with safe_open(tmp_path / "ours.safetensors", "np") as file:
        assert file.metadata() == {"format": "np"}
    write(tmp_path / "hf.safetensors", specs, state, framework="pt")
    assert_same({k: v.view(state[k].dtype) for k, v in load_file(tmp_path / "hf.safetensors").items()}, state)
    codes = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    with safe_open(tmp_path / "hf.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert {file.get_slice(name).get_dtype() for name in state} == {codes[dtype]}


def test_mixed_dtypes_stay_aligned(tmp_path, rng):
    state = {"half": random_bits(rng, (3,), "bfloat16"), "single": random_bits(rng, (2,), "float32")}
    specs = [TensorSpec("half", "bfloat16", (3,)), TensorSpec("single", "float32", (2,))]
    write(tmp_path / "x.safetensors", specs, state)
    assert_same(load_file(tmp_path / "x.safetensors"), state)
    assert safetensors.read(tmp_path / "x.safetensors")["single"].offset % 4 == 0


def test_truncated_anywhere(tmp_path, rng):
    path = tmp_path / "x.safetensors"
    save_file({"a": random_bits(rng, (3, 5), "float32")}, path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="x.safetensors"):
            safetensors.read(path)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"a": {"dtype": "F32", "shape": "ab", "data_offsets": [0, 8]}},
        ["a"],
        "not JSON",
    ],
)
def test_damaged_headers(tmp_path, header):
    text = json.dumps(header).encode() if header != "not JSON" else b"{{{{"
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + np.zeros(2, np.float32).tobytes())
    with pytest.raises(CheckpointError, match="x.safetensors"):
        safetensors.read(path)
