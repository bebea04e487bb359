"""Text from te's key-value cache against pd in float32 without one."""

import numpy as np
import paddle
import pytest

from paddle_te.configs.spec import spec_of
from paddle_te.hosts.paddlenlp.generation import left_padded
from paddle_te.models.backend import check_backend
from tests.small_models import MIXTURES, TE, TE_FAMILIES, VOCABULARY, array, first, make, truth
from tests.te_weights import relative

HALF = "bfloat16"
NEVER = 1000  # an end-of-text token that no model makes


@pytest.fixture
def pair(gpu, seed):
    """(pd in float32 on the CPU, te in bf16), in evaluation mode, the GPU being the current device."""
    return make_pair(gpu)


def make_pair(gpu, **settings):
    exact, weights = truth(**settings)
    te = make(gpu, TE, HALF, weights, **settings)
    exact.eval(), te.eval()
    return exact, te


def prompts(*lengths):
    return [np.random.randint(1, VOCABULARY, length).tolist() for length in lengths]


def generate(model, batch, n=12, **settings):
    settings = dict(max_new_tokens=n, eos_token_id=NEVER, pad_token_id=0, decode_strategy="greedy_search") | settings
    return model.generate(**batch, **settings)[0].numpy()


def exact_logits(exact, tokens):
    """Of pd in float32 for one sequence by itself, [s, vocabulary]."""
    device = paddle.get_device()
    paddle.set_device("cpu")
    logits = array(first(exact(paddle.to_tensor([tokens]))))[0]
    paddle.set_device(device)
    return logits


@pytest.mark.parametrize(
    "family, pieces",
    [("llama", pieces) for pieces in ([24], [13, 1, 1, 9], [60, 1, 1, 1, 1, 1, 1])]
    + [(family, [13, 1, 1, 9]) for family in TE_FAMILIES if family != "llama"],
)
def test_logits_from_the_cache_are_those_of_the_whole(gpu, seed, family, pieces):
    exact, te = make_pair(gpu, family=family)
    tokens = prompts(sum(pieces))[0]
    cache, got, start = None, [], 0
    with paddle.no_grad():
        for size in pieces:
            piece = paddle.to_tensor([tokens[start : start + size]])
            logits, cache = te(piece, past_key_values=cache, use_cache=True)[:2]
            got.append(array(logits)[0])
            start += size
    # 24 tokens, of which another expert for one moved the logits by 4 %; a wrong cache gives other tokens' logits
    assert relative(np.concatenate(got), exact_logits(exact, tokens)) < (0.2 if family in MIXTURES else 3e-2)
    attention = spec_of(te.config).layer.attention
    assert list(cache[0][0].shape) == [1, sum(pieces), attention.groups, attention.head_dim]


@pytest.mark.parametrize("lengths", [[9], [7, 7], [3, 12, 8, 1]])
def test_greedy_tokens_are_as_likely_as_the_likeliest(pair, lengths):
    """Where two tokens are nearly as likely, bf16 may take the other one. Then their logits in float32 lie no further
    apart than te's rounding can explain, which is measured for each token on the sequence without a cache."""
    exact, te = pair
    given = prompts(*lengths)
    found = generate(te, left_padded(given))
    for prompt, new in zip(given, found.tolist(), strict=True):
        tokens, at = prompt + new, slice(len(prompt) - 1, -1)
        with paddle.no_grad():
            rounded = array(first(te(paddle.to_tensor([tokens]))))[0, at]
        logits = exact_logits(exact, tokens)[at]
        rounding = np.sqrt(np.mean((rounded - logits) ** 2, -1))
        assert relative(rounded, logits) < 5e-2
        regret = logits.max(-1) - logits[np.arange(len(new)), new]
        assert (regret < 8 * rounding).all(), (regret, rounding)  # a difference of two errors


def test_sampling_repeats_with_the_seed(pair, seed):
    _, te = pair
    batch, samples = left_padded(prompts(5, 9)), []
    for number in (seed, seed, seed + 1):
        paddle.seed(number)
        samples.append(generate(te, batch, decode_strategy="sampling", top_k=20, temperature=2.0).tolist())
    assert samples[0] == samples[1] != samples[2]


def test_float32_is_refused_before_work(gpu):
    with pytest.raises(ValueError, match="computes in bfloat16"):
        check_backend(TE, "float32")
