"""Samples that fill up a step and do not count."""

import pickle

import numpy as np

from paddle_te.data.fillers import Filler, WithFillers, filled


def kinds(numbers):
    return [(int(number), isinstance(number, Filler)) for number in numbers]


def test_the_last_step_is_filled_up_with_its_own_samples():
    assert kinds(filled([4, 0, 3, 1, 2], 4)) == [(n, False) for n in (4, 0, 3, 1, 2)] + [(2, True)] * 3
    assert kinds(filled([4, 0, 3], 8))[3:] == [(n, True) for n in (4, 0, 3, 4, 0)]


def test_whole_steps_stay_as_they_are():
    assert kinds(filled([1, 0, 3, 2], 2)) == [(n, False) for n in (1, 0, 3, 2)]


def test_a_filler_has_tokens_and_no_label():
    samples = [{"input_ids": [n, n + 1], "labels": np.array([n, n])} for n in (5, 7)]
    dataset = WithFillers(samples)
    filler = pickle.loads(pickle.dumps(Filler(1)))  # as a loader's worker gets it
    assert len(dataset) == 2 and dataset[1] is samples[1]
    assert dataset[filler] == {"input_ids": [7, 8], "labels": [-100, -100]} and samples[1]["labels"][0] == 7
