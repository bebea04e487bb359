"""How long sequences may be, under each scaling of rotary positions."""

import pytest

from paddle_te import configs
from paddle_te.configs.rope import ENDLESS, longest_sequence

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
VICUNA = dict(model_type="llama", max_position_embeddings=4096)


@pytest.mark.parametrize(
    "published, tokens",
    [
        (configs.read("meta-llama/Llama-2-7b"), 4096),
        (configs.read("meta-llama/Meta-Llama-3.1-8B"), 131072),
        (configs.read("google/gemma-3-4b-pt"), 131072),
        (configs.read("openai/gpt-oss-20b"), 131072),
        (configs.read("deepseek-ai/DeepSeek-V3"), 163840),
        (configs.read("microsoft/Phi-4-mini-instruct"), 131072),
        # as their model cards say: Qwen2.5's of long contexts keeps the length of the first training, Qwen3's may not
        (dict(model_type="qwen2", max_position_embeddings=32768, rope_scaling=YARN), 131072),
        (dict(model_type="qwen3", max_position_embeddings=131072, rope_scaling=YARN), 131072),
        (VICUNA | dict(rope_scaling={"type": "linear", "factor": 4.0}), 16384),  # lmsys/vicuna-7b-v1.5-16k
        (VICUNA | dict(rope_scaling_type="linear", rope_scaling_factor=4.0), 16384),
        (VICUNA | dict(rope_scaling={"type": "dynamic", "factor": 4.0}), ENDLESS),
    ],
)
def test_the_longest_sequence_counts_the_scaling_in(published, tokens):
    assert longest_sequence(published) == tokens
