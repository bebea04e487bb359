"""Text from prompts, through PaddleNLP's `generate` and its key-value cache, in every backend.

In fp8 backend transformer_engine cannot: GEMMs take multiples of 16 tokens, and decoding has one a prompt at a time.
"""

from collections.abc import Collection, Sequence
from typing import Any

import paddle
from paddle import Tensor

from paddle_te.configs.rope import longest_sequence
from paddle_te.data.tokenizer import AnyTokenizer
from paddle_te.host import HostConfig, HostModel
from paddle_te.hosts.paddlenlp.loading import check_token_ids
from paddle_te.options import FP8_RECIPES, LayerOptions


def left_padded(prompts: Sequence[Sequence[int]], pad_token_id: int = 0) -> dict[str, Tensor]:
    """Return a batch of prompts (lists of token ids) that end together, as `generate` needs them.

    Returns {"input_ids", "attention_mask", "position_ids"}, int64 [b, s]: the mask is 0 on padding, and positions begin
    with 0 at each prompt's first token. Raises ValueError for a prompt without tokens.
    """
    if not all(prompts):
        raise ValueError("a prompt has no tokens")
    length = max(map(len, prompts))
    padding = [length - len(prompt) for prompt in prompts]
    rows = {
        "input_ids": [[pad_token_id] * n + list(prompt) for n, prompt in zip(padding, prompts, strict=True)],
        "attention_mask": [[0] * n + [1] * (length - n) for n in padding],
        "position_ids": [[0] * n + list(range(length - n)) for n in padding],
    }
    return {name: paddle.to_tensor(values, dtype="int64") for name, values in rows.items()}


def check_generates(settings: Any) -> None:
    """Raise ValueError where a model cannot generate.

    settings: a model's configuration or a script's arguments, with its pipeline_parallel_degree.
    """
    if settings.pipeline_parallel_degree > 1:
        raise ValueError(
            "PaddleNLP's pipeline models generate no text: they have no key-value cache; leave "
            "--pipeline_parallel_degree at 1, with which all processes share each layer"
        )
    layers = LayerOptions.of(settings)
    backend, recipe = layers.transformer_engine_backend, layers.fp8_recipe
    if layers.use_fp8 and (backend == "transformer_engine" or recipe == "block"):
        raise ValueError(
            f"backend {backend} generates no text with {recipe} scaling in fp8: GEMMs take {FP8_RECIPES[recipe]} "
            "tokens at a time, and decoding has one; leave out --use_fp8"
        )


def check_room(prompts: Sequence[Sequence[int]], max_new_tokens: int, config: HostConfig) -> None:
    """Raise ValueError for prompts, lists of token ids, whose continuations go beyond the model's positions.

    Beyond them a model computes something, but was trained for nothing; rope type dynamic is made for that.
    """
    number, length = max(enumerate(map(len, prompts), 1), key=lambda pair: pair[1], default=(0, 0))
    if length + max_new_tokens > (positions := longest_sequence(config)):
        room = f"at most {positions - length}, or " if length < positions else ""
        raise ValueError(
            f"--max_new_tokens {max_new_tokens}: with the {length} tokens of prompt {number} that is beyond the "
            f"model's {positions} positions (max_position_embeddings); give {room}a shorter prompt"
        )


def generate_tokens(
    model: HostModel, tokenizer: AnyTokenizer, prompts: Sequence[Sequence[int]], batch_size: int = 8, **settings: Any
) -> list[list[int]]:
    """Return the tokens after each prompt, lists of token ids as the prompts are, up to the first that ends a text.

    model: in evaluation mode, of any family. tokenizer: of `load_tokenizer`, whose `end_token_ids` end a text.
    settings: PaddleNLP's GenerationConfig, such as max_new_tokens, decode_strategy ("greedy_search" or "sampling"),
    top_k, top_p, temperature; `paddle.seed` makes samples repeatable.
    """
    check_generates(model.config)
    if "max_new_tokens" in settings:
        check_room(prompts, settings["max_new_tokens"], model.config)
    ends = tokenizer.end_token_ids
    pad = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
    rows = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        check_token_ids(batch, model.config)
        tokens, _ = model.generate(**left_padded(batch, pad), eos_token_id=ends or None, pad_token_id=pad, **settings)
        rows += [up_to_end(row, ends) for row in tokens.tolist()]
    return rows


def up_to_end(row: list[int], ends: Collection[int]) -> list[int]:
    """Return the tokens of a row before the first one of `ends`: what follows is padding."""
    return row[: next((i for i, token in enumerate(row) if token in ends), len(row))]


def generate_text(
    model: HostModel, tokenizer: AnyTokenizer, prompts: Sequence[str | list[int]], batch_size: int = 8, **settings: Any
) -> list[str]:
    """Return the continuation of each prompt, a text or token ids; arguments as `generate_tokens`'s."""
    tokens = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    rows = generate_tokens(model, tokenizer, tokens, batch_size, **settings)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
