"""paddle_te.weights.blocks: moments in 8 bits as elements that move like a weight's, and as bytes again."""

import math

import numpy as np
import pytest

from paddle_te.weights.blocks import BlocksRef, moment_shape, pack, row_bytes, unpack
from paddle_te.weights.tensors import CheckpointError, SlicedRef, TensorRef


@pytest.fixture
def generator(seed):
    return np.random.default_rng(seed)


def elements_of(generator, shape):
    """As `unpack` gives them: a unit a block, and codes with a 0 among them."""
    width = shape[-1]
    codes = generator.integers(0, 256, shape, dtype="uint64")
    units = generator.integers(1, 2**30, (*shape[:-1], -(-width // 256)), dtype="uint64")
    return np.where(codes > 0, units.repeat(256, -1)[..., :width] << 8 | codes, 0).astype("uint64")


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 256), (2, 700), (513,), (2, 2, 257)])
def test_elements_and_bytes_are_each_others(generator, shape):
    elements = elements_of(generator, shape)
    moment = pack(elements)
    assert (moment.dtype, moment.shape) == (np.int8, moment_shape(shape))
    first = moment.reshape(-1, moment.shape[-1])[0].view("uint8")
    assert first[:4].view("uint32")[0] == (elements.reshape(-1, shape[-1])[0, :256] >> 8).max()
    assert (first[4 : 4 + min(shape[-1], 256)] == elements.reshape(-1, shape[-1])[0, :256] & 0xFF).all()
    np.testing.assert_array_equal(unpack(moment, shape[-1]), elements)


def test_bytes_of_a_row():
    assert [row_bytes(width) for width in (1, 4, 5, 256, 257, 4096)] == [8, 8, 12, 260, 268, 4160]


def test_a_moment_that_is_not_a_number_stays_one():
    moment = pack(np.zeros(300, "uint64"))
    assert not moment.any()
    moment[:4] = np.array([0x7FC00000], "uint32").view("int8")
    np.testing.assert_array_equal(pack(unpack(moment, 300)), moment)


@pytest.mark.parametrize("cut", [256, 512, 100])
def test_a_cut_between_blocks_moves_and_another_is_refused(generator, cut):
    """Each half divides itself into blocks; put together again they are the whole."""
    elements = elements_of(generator, (4, 700))
    halves = [pack(elements[:, :cut]), pack(elements[:2])]
    assert halves[0].shape == (4, row_bytes(cut))
    if cut % 256:
        with pytest.raises(ValueError, match="elements of several blocks would share one"):
            pack(elements[:, cut:])
    else:
        back = np.concatenate([unpack(pack(part), part.shape[-1]) for part in np.split(elements, [cut], 1)], 1)
        np.testing.assert_array_equal(back, elements)


def ref_of(path, array):
    array.tofile(path)
    return TensorRef(path, 0, "int8", array.shape)


def test_slices_of_files_are_the_tensor(generator, tmp_path):
    """As sharding has them: flat slices, the last with zeros behind it, that begin blocks of their own."""
    whole, lengths = elements_of(generator, (1792,)), (600, 1192)
    first, second = (elements_of(generator, (length,)) for length in lengths)
    whole = np.concatenate([first, second])[: 7 * 255].copy()
    padded = np.zeros(1192, "uint64")
    padded[: 7 * 255 - 600] = whole[600:]
    refs = [ref_of(tmp_path / f"{n}", pack(part)) for n, part in enumerate((first, padded))]
    slices = [BlocksRef.of_slice(ref) for ref in refs]
    assert [part.shape for part in slices] == [(600,), (1192,)]
    got = SlicedRef(tuple(slices), (7, 255)).read()
    np.testing.assert_array_equal(got, whole.reshape(7, 255))
    with pytest.raises(ValueError, match="several blocks"):
        pack(got)
    again = np.concatenate([got.reshape(-1)[600:], np.zeros(1192 - (7 * 255 - 600), "uint64")])
    np.testing.assert_array_equal(pack(again), pack(padded))
    assert math.prod(slices[0].shape) == 600 and slices[0].path == tmp_path / "0"


def test_bytes_that_are_no_blocks_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="261 bytes are no moment in blocks of 256"):
        BlocksRef.of_slice(ref_of(tmp_path / "moment", np.zeros(261, "int8")))
