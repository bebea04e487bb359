"""The losses of preferences against their formulas in float64, gradients by differences.

tests/end_to_end/training/test_preferences.py compares them with TRL on a model.
"""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddlenlp.transformers.dpo_criterion import DPOCriterion

from paddle_te.hosts.paddlenlp.training.preference_trainer import DPOConfig
from paddle_te.options.tuning import LOSS_TYPES
from paddle_te.training.preference_loss import Answer, Answers, KTOLoss, PairLoss

PAIRS = 5
COUNTS = np.array([1, 1, 0, 1, 1.0])  # the third pair is a filler's


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


def draw(seed):
    """Log-probabilities of four kinds, and tokens of both answers, float64 [5]."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(2, 30, (2, PAIRS)).astype("float64")
    policy, reference = (-tokens * generator.uniform(0.1, 3, (2, PAIRS)) for _ in range(2))
    return policy, reference, tokens, generator.integers(0, 2, PAIRS).astype("float64")


def answers(policy, reference, tokens, good=None, counts=COUNTS):
    arrays = [[array.astype("float32") for array in pair] for pair in (policy, reference, tokens)]
    made = [[paddle.to_tensor(array) for array in pair] for pair in arrays]
    for tensor in made[0]:
        tensor.stop_gradient = False
    first, second = (Answer(*(kind[place] for kind in made)) for place in (0, 1))
    counts = paddle.to_tensor(counts.astype("float32"))
    return Answers(first, second, counts, None if good is None else paddle.to_tensor(good.astype("float32")))


def kl_of(policy, reference):
    """kto_pair's KLs of the better and of the worse answers, which have no gradient."""
    return np.maximum((policy - reference)[:, COUNTS > 0].mean(axis=1), 0)


def formulas(settings, policy, reference, tokens, kl):
    """Each pair's loss in float64, written out as the papers have them."""
    beta, name = settings.beta, settings.loss_type
    if name in ("ipo", "or", "orpo", "simpo"):
        policy, reference = policy / tokens, reference / tokens
    reward = policy - reference
    margin = reward[0] - reward[1]
    odds = policy - np.log1p(-np.exp(policy))
    sigma = lambda x: np.exp(log_sigmoid(x))  # noqa: E731
    smooth = lambda x, by: -(1 - by) * log_sigmoid(x) - by * log_sigmoid(-x)  # noqa: E731
    return {
        "sigmoid": lambda: smooth(beta * margin, settings.label_smoothing),
        "hinge": lambda: np.maximum(0, 1 - beta * margin),
        "ipo": lambda: (margin - 0.5 / beta) ** 2,
        "simpo": lambda: smooth(beta * (margin - settings.simpo_gamma / beta), settings.label_smoothing),
        "or": lambda: -log_sigmoid(odds[0] - odds[1]),
        "orpo": lambda: -log_sigmoid(odds[0] - odds[1]),
        "dpop": lambda: -log_sigmoid(beta * margin) + settings.dpop_lambda * np.maximum(0, -reward[0]),
        "sppo_hard": lambda: (reward[0] - 0.5 / beta) ** 2 + (reward[1] + 0.5 / beta) ** 2,
        "kto_pair": lambda: 1 - (sigma(beta * (reward[0] - kl[1])) + sigma(beta * (kl[0] - reward[1]))) / 2,
        "nca_pair": lambda: (
            -log_sigmoid(beta * reward[0]) - 0.5 * log_sigmoid(-beta * reward[0]) - 0.5 * log_sigmoid(-beta * reward[1])
        ),
    }[name]()


def total(settings, policy, reference, tokens, kl):
    losses = formulas(settings, policy, reference, tokens, kl)
    sft = 1.0 if settings.loss_type == "orpo" else settings.sft_loss_ratio
    nll = -(policy[0] * COUNTS).sum() / (tokens[0] * COUNTS).sum()
    return settings.pref_loss_ratio * (losses * COUNTS).sum() / COUNTS.sum() + sft * nll


def differences(of, at, step=1e-6):
    """The gradient of a function of an array, by central differences."""
    found = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        there = [at.copy() for _ in range(2)]
        there[0][place] += step
        there[1][place] -= step
        found[place] = (of(there[0]) - of(there[1])) / (2 * step)
    return found


@pytest.mark.parametrize("settings", [{}, dict(label_smoothing=0.2, sft_loss_ratio=0.3, pref_loss_ratio=0.7, beta=0.5)])
@pytest.mark.parametrize("name", LOSS_TYPES)
def test_a_pair_has_its_formulas_loss_and_gradients(seed, name, settings):
    settings = PairLoss(loss_type=name, **settings)
    policy, reference, tokens, _ = draw(seed)
    if not settings.needs_reference:
        reference = np.zeros_like(reference)
    given = answers(policy, reference, tokens)
    outcome = settings(given)
    kl = kl_of(policy, reference)
    want = total(settings, policy, reference, tokens, kl)
    assert sum(outcome.parts).item() == pytest.approx(want, rel=2e-5)
    sum(outcome.parts).backward()
    got = np.stack([given.first.policy.grad.numpy(), given.second.policy.grad.numpy()])
    slope = differences(lambda at: total(settings, at, reference, tokens, kl), policy)
    np.testing.assert_allclose(got, slope, rtol=1e-4, atol=1e-6 + 1e-5 * np.abs(slope).max())
    assert not got[:, 2].any()
    metrics = settings.metrics({key: value.item() for key, value in outcome.sums.items()})
    assert metrics["loss"] == pytest.approx(want, rel=2e-5)


def test_kto_pair_takes_its_kl_from_all_ranks_as_paddlenlp_does_from_one(seed):
    """PaddleNLP's criterion, whose means are those of one process, over a micro-batch that two ranks have."""
    policy, reference, tokens, _ = draw(seed)
    policy[0] = reference[0] + np.abs(policy[0] - reference[0])  # so that a KL is above 0
    config = SimpleNamespace(tensor_parallel_output=False, dpo_config=None)
    theirs = DPOCriterion(config, DPOConfig(loss_type="kto_pair", beta=0.3))
    kept = COUNTS > 0
    tensors = [paddle.to_tensor(each[kept].astype("float32")) for each in (*policy, *reference)]
    want = theirs.dpo_loss(*tensors).item()
    halves, others = [], []
    for own, other in ((slice(0, 2), slice(3, 5)), (slice(3, 5), slice(0, 2))):
        sums = (policy - reference)[:, other].sum(axis=1)
        others.append(paddle.to_tensor([*sums, 2], "float32"))
        given = answers(policy[:, own], reference[:, own], tokens[:, own], counts=np.ones(2))
        of_both = PairLoss("kto_pair", beta=0.3, total=lambda tensor, more=others[-1]: tensor + more)
        halves.append(of_both(given).parts[0].item())
    assert np.mean(halves) == pytest.approx(want, rel=1e-5)


def test_rewards(seed):
    policy, reference, tokens, _ = draw(seed)
    outcome = PairLoss(beta=0.5)(answers(policy, reference, tokens))
    found = PairLoss(beta=0.5).metrics({key: value.item() for key, value in outcome.sums.items()})
    chosen, rejected = 0.5 * (policy - reference)[:, COUNTS > 0]
    want = {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).mean(),
        "logps/chosen": policy[0, COUNTS > 0].mean(),
        "logps/rejected": policy[1, COUNTS > 0].mean(),
    }
    assert {name: found[name] for name in want} == pytest.approx(want, rel=1e-5)


def test_a_micro_batch_of_fillers_has_a_loss_of_zero_and_no_gradients():
    nothing = paddle.zeros([2])
    for name in LOSS_TYPES:
        policy = paddle.zeros([2])
        policy.stop_gradient = False
        answer = Answer(policy * 1, nothing, nothing)
        parts = PairLoss(loss_type=name)(Answers(answer, answer, nothing)).parts
        sum(parts).backward()
        assert [part.item() for part in parts] == [0, 0] and not policy.grad.any(), name


def kto(settings, policy, reference, good, others=()):
    ratio = policy - reference
    distances = np.concatenate([ratio[1, COUNTS > 0], *others])
    kl = max(distances.mean(), 0)
    sigmoid = lambda x: np.exp(log_sigmoid(x))  # noqa: E731
    wanted = settings.desirable_weight * (1 - sigmoid(settings.beta * (ratio[0] - kl)))
    unwanted = settings.undesirable_weight * (1 - sigmoid(settings.beta * (kl - ratio[0])))
    return (np.where(good > 0, wanted, unwanted) * COUNTS).sum() / COUNTS.sum(), kl


@pytest.mark.parametrize("far", [-3.0, 4.0])  # the KL is cut at 0, or is above it
def test_kto(seed, far):
    policy, reference, tokens, good = draw(seed)
    policy[1] = reference[1] + far * np.abs(np.random.default_rng(seed).standard_normal(PAIRS))
    others = np.array([1.0, 2.5, -0.5]) + far  # on another rank

    def all_reduce(tensor):
        return tensor + paddle.to_tensor([others.sum(), len(others)], "float32")

    settings = KTOLoss(0.3, 1.2, 0.8, all_reduce)
    given = answers(policy, reference, tokens, good)
    outcome = settings(given)
    want, kl = kto(settings, policy, reference, good, [others])
    assert sum(outcome.parts).item() == pytest.approx(want, rel=2e-5)
    sum(outcome.parts).backward()

    def of_judged(at):
        return kto(settings, np.stack([at, policy[1]]), reference, good, [others])[0]

    np.testing.assert_allclose(given.first.policy.grad.numpy(), differences(of_judged, policy[0]), rtol=1e-3, atol=1e-6)
    assert given.second.policy.grad is None or not given.second.policy.grad.any()  # the KL is a number to the gradient
    found = settings.metrics({key: value.item() for key, value in outcome.sums.items()})
    assert found["kl"] == pytest.approx(kl, rel=1e-5, abs=1e-7) and found["loss"] == pytest.approx(want, rel=2e-5)
    rewards = 0.3 * (policy - reference)[0]
    for name, chooses in (("chosen", good), ("rejected", 1 - good)):
        of_these = (chooses * COUNTS) > 0
        assert found[f"count/{name}"] == of_these.sum()
        assert found[f"rewards/{name}"] == pytest.approx(rewards[of_these].mean() if of_these.any() else 0, rel=1e-5)
    right = np.where(good > 0, rewards > 0.3 * kl, rewards <= 0.3 * kl)[COUNTS > 0]
    assert found["rewards/accuracies"] == pytest.approx(right.mean())
