"""Generation with a key-value cache against PaddleNLP's own models."""

import itertools

import numpy as np
import paddle
import pytest

from paddle_te.hosts.paddlenlp.generation import generate_text, generate_tokens, left_padded
from tests.te_weights import relative
from tests.unit.hosts.paddlenlp.native import FAMILIES, two_models


def make_pair(family="llama"):
    """PaddleNLP's model and ours with the same weights, large enough that no two tokens are nearly as likely."""
    native, ours = two_models(family, initializer_range=0.3)
    native.eval(), ours.eval()
    return native, ours


@pytest.fixture
def pair(seed):
    return make_pair()


def random_prompts(lengths):
    return [np.random.randint(3, 96, length).tolist() for length in lengths]


def tokens(model, batch, **settings):
    settings = dict(max_new_tokens=16, eos_token_id=1000, pad_token_id=0) | settings  # 1000: never ends
    return model.generate(**batch, **settings)[0].tolist()


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_tokens_are_paddlenlps(pair, use_cache):
    native, ours = pair
    batch = left_padded(random_prompts([7, 7, 7]))
    want = tokens(native, batch, decode_strategy="greedy_search")
    assert tokens(ours, batch, decode_strategy="greedy_search", use_cache=use_cache) == want
    assert len(set(want[0])) > 2


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_with_left_padding_is_that_of_each_prompt_alone(seed, family):
    native, ours = make_pair(family)
    prompts = random_prompts([3, 9, 6])
    got = tokens(ours, left_padded(prompts), decode_strategy="greedy_search")
    if family != "gpt":  # whose own model sees the padding
        assert got == tokens(native, left_padded(prompts), decode_strategy="greedy_search")
    for prompt, row in zip(prompts, got, strict=True):
        for model in native, ours:
            assert tokens(model, left_padded([prompt]), decode_strategy="greedy_search") == [row]


@pytest.mark.parametrize("settings", [dict(top_k=8), dict(top_k=0, top_p=0.8), dict(temperature=1.5, top_k=20)])
def test_sampled_tokens_are_paddlenlps(pair, seed, settings):
    native, ours = pair
    batch = left_padded(random_prompts([5, 8]))
    results = []
    for model in (native, ours):
        paddle.seed(seed)
        results.append(tokens(model, batch, decode_strategy="sampling", **settings))
    assert results[0] == results[1]
    assert tokens(ours, batch, decode_strategy="sampling", **settings) != results[1], "another seed, the same sample"


def test_a_prompt_without_mask_is_whole(pair):
    ours = pair[1]
    prompt = random_prompts([6])
    want = tokens(ours, left_padded(prompt))
    assert tokens(ours, dict(input_ids=paddle.to_tensor(prompt))) == want
    padded = left_padded([prompt[0], random_prompts([9])[0]])  # padding is 0, and no prompt has a 0
    assert tokens(ours, dict(input_ids=padded["input_ids"]))[0] == want[0]


@pytest.mark.parametrize("explicit_positions", [True, False])
@pytest.mark.parametrize("pieces", [[12], [7, 1, 1, 3], [1] * 12])
def test_logits_from_the_cache_are_those_of_the_whole(pair, pieces, explicit_positions):
    ours = pair[1]
    ids = paddle.randint(0, 96, [2, 12])
    want = ours(ids)
    want = want[0] if isinstance(want, tuple) else want
    cache, got, start = None, [], 0
    for size in pieces:
        positions = paddle.arange(start, start + size).expand([2, size]) if explicit_positions else None
        piece = ids[:, start : start + size]
        logits, cache = ours(piece, position_ids=positions, past_key_values=cache, use_cache=True)[:2]
        got.append(logits)
        start += size
    assert relative(paddle.concat(got, 1), want) < 1e-5
    assert len(cache) == 2 and cache[0][0].shape == [2, 12, 2, 16]


def test_positions_of_their_own_are_paddlenlps(pair):
    native, ours = pair
    ids = paddle.randint(0, 96, [2, 10])
    positions = paddle.to_tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5], list(range(5, 15))])
    got, want = ours(ids, position_ids=positions), native(ids, position_ids=positions)
    assert relative(got, want) < 1e-5
    assert relative(ours(ids), want) > 1e-3


class Letters:
    """A tokenizer of single letters."""

    bos_token_id, eos_token_id, pad_token_id, end_token_ids = 1, 2, None, [2]

    def encode(self, text):
        return [1] + [ord(letter) - ord("a") + 3 for letter in text]

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(i) for i in ids if not (skip_special_tokens and i == 2))


def test_texts_do_not_depend_on_the_batch(pair):
    ours = pair[1]
    prompts = ["abc", "quitelong", "z", "middle"]
    settings = dict(max_new_tokens=8, decode_strategy="greedy_search")
    want = [generate_text(ours, Letters(), [prompt], **settings)[0] for prompt in prompts]
    assert generate_text(ours, Letters(), prompts, batch_size=3, **settings) == want


def test_a_text_ends_before_each_of_the_end_tokens(pair):
    """Chat models have several, and generation_config.json lists them."""
    prompts = random_prompts([5, 9, 4])
    settings = dict(max_new_tokens=12, decode_strategy="greedy_search")
    tokenizer = Letters()
    tokenizer.end_token_ids = [1000]
    whole = generate_tokens(pair[1], tokenizer, prompts, **settings)
    tokenizer.end_token_ids = ends = [whole[0][3], whole[1][6], 2]
    cut = lambda row: list(itertools.takewhile(lambda token: token not in ends, row))  # noqa: E731
    got = generate_tokens(pair[1], tokenizer, prompts, **settings)
    assert got == [cut(row) for row in whole]
    assert min(map(len, got)) < 7


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="no tokens"):
        left_padded([[1], []])
