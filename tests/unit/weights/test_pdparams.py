import os
import pickle
from collections import OrderedDict

import numpy as np
import paddle
import pytest

from paddle_te.weights import CheckpointError, pdparams
from paddle_te.weights.tensors import TensorSpec
from tests.unit.weights.models import assert_same, random_bits, save_pdparams

DTYPES = ["float32", "float16", "bfloat16"]


def tensors(rng, dtype):
    # small ones lie in the pickle's frames, one above 64 KiB outside them
    return {
        "a": random_bits(rng, (3, 5), dtype),
        "b": random_bits(rng, (7,), dtype),
        "c": random_bits(rng, (200, 300), dtype),
    }


def write(path, specs, state, **kwargs):
    writer = pdparams.Writer(path, specs, **kwargs)
    for array in state.values():
        writer.add([array])
    writer.close()


def read_all(path):
    return {name: ref.read() for name, ref in pdparams.read(path).items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_what_paddle_saves(tmp_path, rng, dtype):
    state = tensors(rng, dtype)
    save_pdparams(tmp_path / "x.pdparams", state, dtype)
    assert {ref.dtype for ref in pdparams.read(tmp_path / "x.pdparams").values()} == {dtype}
    assert_same(read_all(tmp_path / "x.pdparams"), state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_paddle_loads_what_is_written(tmp_path, rng, dtype):
    state, path = tensors(rng, dtype), tmp_path / "x.pdparams"
    specs = [TensorSpec(name, dtype, tensor.shape) for name, tensor in state.items()]
    write(path, specs, state)
    loaded = paddle.load(str(path))
    assert {str(tensor.dtype) for tensor in loaded.values()} == {f"paddle.{dtype}"}
    assert_same({name: tensor.numpy() for name, tensor in loaded.items()}, state)
    assert_same(paddle.load(str(path), return_numpy=True), state)
    assert_same(read_all(path), state)
    with pytest.raises(FileExistsError):
        write(path, specs, state)


def test_other_ways_to_save(tmp_path, rng):
    state, path = tensors(rng, "float32"), tmp_path / "x.pdparams"
    paddle.save(OrderedDict((k, v) for k, v in state.items()), str(path))  # plain arrays
    assert_same(read_all(path), state)
    paddle.save({k: paddle.to_tensor(v) for k, v in state.items()}, str(path), protocol=3)
    assert_same(read_all(path), state)
    path.write_bytes(pickle.dumps({"t": np.asfortranarray(state["c"])}, protocol=4))
    assert_same(read_all(path), {"t": state["c"]})
    path.write_bytes(pickle.dumps({"t": ("linear_0.w_0", state["a"])}, protocol=4))  # a Tensor in a nested container
    assert_same(read_all(path), {"t": state["a"]})
    path.write_bytes(pickle.dumps({"t": state["a"], "tied": state["a"]}, protocol=4))  # memoised
    assert_same(read_all(path), {"t": state["a"], "tied": state["a"]})


def test_truncated_anywhere(tmp_path, rng):
    path = tmp_path / "x.pdparams"
    save_pdparams(path, {"a": random_bits(rng, (3, 5), "float32"), "b": random_bits(rng, (2,), "float32")}, "float32")
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="x.pdparams"):
            pdparams.read(path)


class Runs:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_malicious_files_do_not_run(tmp_path, protocol):
    marker, path = tmp_path / "ran", tmp_path / "x.pdparams"
    array = np.zeros(2, np.float32)
    for call in [
        (os.system, (f"touch {marker}",)),
        (eval, (f"open({str(marker)!r}, 'w')",)),
        (open, (str(marker), "w")),
    ]:
        for evil in ({"a": Runs(*call)}, {"a": array, "b": [Runs(*call)]}, Runs(*call), {Runs(*call): array}):
            path.write_bytes(pickle.dumps(evil, protocol=protocol))
            with pytest.raises(CheckpointError, match="x.pdparams"):
                pdparams.read(path)
            assert not marker.exists()
            # the test's own premise: an ordinary unpickler runs it
    pickle.loads(pickle.dumps(Runs(os.system, (f"touch {marker}",)), protocol=protocol))
    assert marker.exists()


def test_other_contents_are_errors(tmp_path):
    path = tmp_path / "x.pdparams"
    cases = {
        "a list": pickle.dumps([np.zeros(2, np.float32)], protocol=4),
        "not a tensor": pickle.dumps({"a": 3}, protocol=4),
        "integers": pickle.dumps({"a": np.zeros(2, np.int64)}, protocol=4),
        "objects": pickle.dumps({"a": np.array([{}, []], dtype=object)}, protocol=4),
        "a class": pickle.dumps({"a": np.float32}, protocol=4),
        "text": b"this is no pickle at all",
        "nothing": b"",
        "zeros": bytes(1000),
    }
    for what, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="x.pdparams"):
            pdparams.read(path)
            pytest.fail(f"{what} was accepted")


BOMBS = {
    "a number to remember": (
        pickle.EMPTY_DICT + pickle.LONG_BINPUT + b"\xff\xff\xff\xff" + pickle.STOP,
        "it remembers",
    ),
    "a frame": (
        pickle.PROTO + b"\x04" + pickle.FRAME + b"\xff" * 5 + b"\0\0\0" + pickle.EMPTY_DICT + b".",
        "truncated",
    ),
}


@pytest.mark.parametrize("content, said", BOMBS.values(), ids=BOMBS)
def test_pickles_that_make_other_readers_allocate(tmp_path, content, said):
    """A hundred bytes, for which Python's own unpickler asks for 16 GiB and more."""
    path = tmp_path / "scheduler.pdparams"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"scheduler.pdparams: .*{said}"):
        pdparams.check(path)


def test_random_damage_is_an_error_or_harmless(tmp_path, rng):
    path = tmp_path / "x.pdparams"
    save_pdparams(path, {"a": random_bits(rng, (3, 5), "float32"), "b": random_bits(rng, (2,), "float32")}, "float32")
    data = bytearray(path.read_bytes())
    for _ in range(1000):
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            read_all(path)
        except CheckpointError:
            pass
