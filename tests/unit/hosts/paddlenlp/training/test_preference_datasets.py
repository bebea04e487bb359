"""Batches of preferences: what each of the ranks that share rows gets of the answers."""

import numpy as np
import pytest

from paddle_te.data.questions import IGNORED
from paddle_te.hosts.paddlenlp.training.preference_datasets import (
    LENGTHS,
    MEMBERS,
    PRESENT,
    REFERENCE,
    PreferenceCollator,
)
from paddle_te.training.loss_weights import COUNTS

LENGTH = 64


def row(rng, pairs):
    """A row of pairs, with questions and answers of random lengths."""
    lengths = rng.integers(4, LENGTH // (2 * pairs), 2 * pairs).tolist()
    labels = [np.where(np.arange(each) < each // 2, IGNORED, rng.integers(1, 9, each)) for each in lengths]
    answers = np.repeat(np.arange(2 * pairs, dtype=np.int32), lengths)
    tokens, labels = rng.integers(1, 9, sum(lengths)), np.concatenate(labels)
    good = [1.0] * pairs
    return {
        "input_ids": tokens, "labels": labels, "answers": answers, "lengths": lengths, "good": good, REFERENCE: None
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_rows_have_each_label_once(seed, ranks):
    """Sums of what a token gives, a function of its place and label, over the ranks are those of one rank."""
    rng = np.random.default_rng(seed)
    rows = [row(rng, 2), row(rng, 3)]
    values = rng.random([len(rows) * LENGTH, 9])
    whole = PreferenceCollator(LENGTH, masked=False)(rows)
    places, tokens = whole["labels"]
    want = (whole[MEMBERS] * np.where(tokens == IGNORED, 0, values[places, np.maximum(tokens, 0)])).sum(-1)
    total, part = np.zeros_like(want), LENGTH // ranks
    for rank in range(ranks):
        batch = PreferenceCollator(LENGTH, masked=False, rank=rank, ranks=ranks)(rows)
        own = values.reshape([len(rows), ranks, part, 9])[:, rank].reshape([-1, 9])  # as `own_tokens` splits rows
        places, tokens = batch["labels"]
        total += (batch[MEMBERS] * np.where(tokens == IGNORED, 0, own[places, np.maximum(tokens, 0)])).sum(-1)
        for name in (LENGTHS, PRESENT):
            assert (batch[name] == whole[name]).all()
        assert batch[COUNTS] == whole[COUNTS]
    np.testing.assert_allclose(total, want, rtol=1e-6)
    assert (whole[LENGTHS] == whole[MEMBERS].sum(-1)).all()
