"""Make random tokens instead of data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class MockDataset:
    """Random tokens in the form of the hosts' causal datasets, for Paddle's DataLoader; sample i depends on (seed, i).

    Args:
        num_samples: length of the dataset.
        max_seq_length: tokens in a sequence; a sample has one more, because labels are inputs shifted by one.
        vocab_size: token ids are uniform in [0, vocab_size).
        seed: an int, or a sequence of ints.

    Each item is ``{"text": int64 array [max_seq_length + 1]}``.
    """

    def __init__(self, num_samples: int, max_seq_length: int, vocab_size: int, seed: int | Sequence[int] = 0) -> None:
        self.num_samples, self.length, self.vocab_size = num_samples, max_seq_length + 1, vocab_size
        self.seed = list(np.atleast_1d(seed))

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[np.int64]]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        generator = np.random.default_rng([*self.seed, index])
        return {"text": generator.integers(0, self.vocab_size, self.length, dtype=np.int64)}
