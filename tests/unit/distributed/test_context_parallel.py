"""The order of tokens and heads in the exchange of "a2a"; tests/multiprocess/distributed has it between processes."""

import numpy as np
import paddle
import pytest

from paddle_te.distributed.context_parallel import ContextParallel

RANKS, WIDTHS = 2, (8, 4, 4)  # of q, k and v


def exchange(monkeypatch, method, inputs):
    """What each of RANKS ranks has of ContextParallel's method, whose all-to-all is made of what all of them send."""
    sent, results = [], []

    def send(self, pieces):
        sent.append(pieces)
        return pieces

    def receive(self, pieces):
        return paddle.stack([of_rank[self.rank] for of_rank in sent])

    for all_to_all, outputs in ((send, []), (receive, results)):
        monkeypatch.setattr(ContextParallel, "_all_to_all", all_to_all)
        for rank, x in enumerate(inputs):
            ranks = ContextParallel(None, rank, RANKS, "a2a")
            outputs.append(getattr(ranks, method)(x, WIDTHS))
    return results


@pytest.mark.parametrize("batch", [1, 3])
def test_heads_for_tokens_and_back(monkeypatch, batch):
    whole = np.random.default_rng(batch).standard_normal([batch, 6, sum(WIDTHS)]).astype("float32")
    tokens = [paddle.to_tensor(part) for part in np.split(whole, RANKS, 1)]
    heads = exchange(monkeypatch, "heads_for_tokens", tokens)
    parts = [np.split(part, RANKS, -1) for part in np.split(whole, np.cumsum(WIDTHS)[:-1], -1)]
    for rank, got in enumerate(heads):
        np.testing.assert_array_equal(got.numpy(), np.concatenate([part[rank] for part in parts], -1))
    back = exchange(monkeypatch, "tokens_for_heads", heads)
    for got, want in zip(back, tokens, strict=True):
        np.testing.assert_array_equal(got.numpy(), want.numpy())
