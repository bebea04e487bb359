"""Where packed documents begin and end: by hand, and from FlashMask's rows back."""

import numpy as np
import paddle
import pytest

from paddle_te.ops import documents
from paddle_te.ops.kept import copy_with_kept
from tests.packed_cases import random_rows

ROWS = [[3, 5], [8], [1, 1, 6]]


def test_by_hand():
    assert documents.cu_seqlens(ROWS).tolist() == [0, 3, 8, 16, 17, 18, 24, 24, 24]
    assert documents.positions(ROWS).tolist() == [
        [0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 2, 3, 4, 5]
    ]  # fmt: skip
    assert documents.flash_mask(ROWS).tolist() == [[[3, 3, 3, 8, 8, 8, 8, 8]], [[8] * 8], [[1, 2, 8, 8, 8, 8, 8, 8]]]


@pytest.mark.parametrize("count, bucket", [(1, 8), (7, 8), (8, 8), (9, 16), (16, 16), (17, 32), (100, 128)])
def test_the_number_of_documents_is_padded_with_empty_ones(count, bucket):
    got = documents.cu_seqlens([[2] * count])
    assert got.dtype == "int32" and got.shape == (bucket + 1,)
    assert got.tolist() == [2 * min(i, count) for i in range(bucket + 1)]


@pytest.mark.parametrize("shape", ["[b, s]", "[b, 1, s]", "[b, 1, s, 1]"])
def test_flash_masks_of_documents_are_translated(seed, shape):
    rows = random_rows(np.random.default_rng(seed), 3, 20)
    mask = paddle.to_tensor(documents.flash_mask(rows))
    mask = {"[b, s]": mask[:, 0], "[b, 1, s]": mask, "[b, 1, s, 1]": mask.unsqueeze(-1)}[shape]
    got = documents.from_flash_mask(mask)
    assert got.dtype == paddle.int32 and got.tolist() == documents.cu_seqlens(rows).tolist()
    assert documents.boundaries(got) is got and documents.boundaries(None) is None


def test_hidden_tokens_at_the_end_of_a_row_are_a_document():
    """PaddleNLP pads rows with 0, whose tokens nobody sees."""
    assert documents.from_flash_mask(paddle.to_tensor([[2, 2, 5, 5, 5, 0, 0]], "int32")).tolist() == [
        0, 2, 5, *[7] * 6
    ]  # fmt: skip


@pytest.mark.parametrize("mask, row, start", [
    ([[4, 4, 3, 4]], 0, 0),
    ([[4, 4, 4, 4], [2, 2, 4, 3]], 1, 2),
    ([[2, 3, 3, 4]], 0, 0),  # a window
    ([[3, 3, 3, 5]], 0, 3),  # ends after the row
    ([[1, 0, 4, 4]], 0, 1),  # hidden, but not at the row's end
])  # fmt: skip
def test_other_patterns_are_refused(mask, row, start):
    message = f"attn_mask_startend_row_indices: .*row {row} from {start} on .*attention_mask"
    with pytest.raises(NotImplementedError, match=message):
        documents.from_flash_mask(paddle.to_tensor(mask, "int32"))


def test_a_mask_is_translated_once_unless_it_changes_in_place():
    mask = paddle.to_tensor([[4, 4, 4, 4]], "int32")
    first = documents.boundaries(mask)
    assert first[1] == 4 and documents.boundaries(mask) is first
    copy = copy_with_kept(mask)
    assert copy is not mask and documents.boundaries(copy) is first
    mask[0, :2] = 2
    assert documents.boundaries(mask).tolist()[:3] == [0, 2, 4]
    assert documents.boundaries(copy) is first and documents.boundaries(copy_with_kept(mask))[1] == 2


@pytest.mark.parametrize("shape", [[2, 4, 2], [2, 1, 4, 2], [2, 1, 4, 4], [2, 3, 4], [4]])
def test_other_shapes_are_refused(shape):
    with pytest.raises(NotImplementedError, match=r"attn_mask_startend_row_indices \[.*\]: .*\[b, 1, s\]"):
        documents.from_flash_mask(paddle.full(shape, 4, "int32"))


def test_what_cannot_be_cu_seqlens_is_refused():
    documents.check_cu_seqlens(None)
    documents.check_cu_seqlens(paddle.to_tensor([0, 4], "int32"))
    with pytest.raises(TypeError, match="cu_seqlens is paddle.int64"):
        documents.check_cu_seqlens(paddle.to_tensor([0, 4]))
    for wrong in ([[0, 4]], [0]):
        with pytest.raises(ValueError, match=r"must be \[documents \+ 1\]"):
            documents.check_cu_seqlens(paddle.to_tensor(wrong, "int32"))
