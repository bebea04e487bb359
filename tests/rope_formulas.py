"""Frequencies and attention factors of scaled rotary positions, pair by pair in Python's floats, from the papers."""

import math


def plain(pair, dim, base):
    """Of a head's pair number `pair`: Su et al., 2021."""
    return base ** (-2 * pair / dim)


def ntk(pair, dim, base, factor):
    """θ stretched so that the last pair turns `factor` times as slowly, and the first one as before."""
    return plain(pair, dim, base) * factor ** (-2 * pair / (dim - 2))


def dynamic(pair, dim, base, factor, trained, length):
    """ntk, by what the sequence is longer than the model was trained for; `factor` at so many times the length."""
    return ntk(pair, dim, base, factor * length / trained - factor + 1) if length > trained else plain(pair, dim, base)


def yarn(pair, dim, base, factor, trained, fast=32, slow=1):
    """Peng et al., 2023: a mean of the frequency and of that divided by `factor`."""

    def number_of_pair(turns):  # the pair whose wave has so many turns within the trained length
        return dim / 2 * math.log(trained / (2 * math.pi * turns), base)

    begin, end = max(math.floor(number_of_pair(fast)), 0), min(math.ceil(number_of_pair(slow)), dim - 1)
    slowed = 0.0 if pair <= begin else 1.0 if pair >= end else (pair - begin) / (end - begin)
    return plain(pair, dim, base) * (1 - slowed) + plain(pair, dim, base) / factor * slowed


def yarn_attention_factor(factor):
    """By which YaRN multiplies queries, and keys."""
    return 0.1 * math.log(factor) + 1
