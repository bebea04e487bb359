"""What fine-tuning refuses of its samples."""

from types import SimpleNamespace

import numpy as np
import pytest

from paddle_te import configs
from paddle_te.data.preference_samples import Pair
from paddle_te.data.samples import Sample
from paddle_te.hosts.paddlenlp.training import finetune
from paddle_te.hosts.paddlenlp.training.finetune_datasets import Samples
from paddle_te.hosts.paddlenlp.training.preference_datasets import Rows


def sample(length):
    return Sample(np.zeros(length, np.int32), np.zeros(length, np.int32))


@pytest.mark.parametrize("dataset, flags, message", [
    (Samples([sample(60), sample(65)]), dict(max_length=128), "--max_length 128: a sample has 65 tokens, and the model "
     "has 64 positions .*; give --max_length 64"),
    (Rows([Pair((sample(65), sample(3)))], [[0]]), dict(max_length=128, max_seq_len=128), "--max_seq_len 128: a"),
    (Samples([sample(64), sample(64)], [[0, 1]]), dict(max_length=128), None),  # each begins at position 0
])  # fmt: skip
@pytest.mark.parametrize("scaling", [{}, dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0})])
def test_samples_beyond_the_models_positions(dataset, flags, message, scaling):
    """They would be trained on with angles that the weights have not seen, in silence."""
    config = SimpleNamespace(**configs.read("tiny-llama-demo") | dict(max_position_embeddings=64) | scaling)
    if message is None or scaling:
        finetune._check_length(dataset.longest, SimpleNamespace(**flags), config)
        return
    with pytest.raises(ValueError, match=message):
        finetune._check_length(dataset.longest, SimpleNamespace(**flags), config)
