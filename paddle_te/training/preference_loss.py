"""Losses of preference tuning, of the log-probabilities that the model and a reference give to answers.

With r = log π(y|x) − log π_ref(y|x) of the better answer (r₊) and the worse one (r₋), and σ the logistic function:

sigmoid    −log σ(β (r₊ − r₋))                          DPO, Rafailov et al., 2023, arXiv 2305.18290
hinge      max(0, 1 − β (r₊ − r₋))                      SLiC, Zhao et al., 2023, arXiv 2305.10425
ipo        (r₊ − r₋ − 1 / 2β)²                          Azar et al., 2023, arXiv 2310.12036
simpo      −log σ(β (r₊ − r₋) − γ)                      Meng et al., 2024, arXiv 2405.14734
or, orpo   −log σ(odds₊ − odds₋)                        Hong et al., 2024, arXiv 2403.07691
dpop       −log σ(β (r₊ − r₋)) + λ max(0, −r₊)          Pal et al., 2024, arXiv 2402.13228
sppo_hard  (r₊ − 1 / 2β)² + (r₋ + 1 / 2β)²              Wu et al., 2024, arXiv 2405.00675
nca_pair   −log σ(βr₊) − ½ log σ(−βr₊) − ½ log σ(−βr₋)  Chen et al., 2024, arXiv 2402.05369
kto_pair   1 − ½ σ(β (r₊ − KL₋)) − ½ σ(β (KL₊ − r₋))    of HALOs' report, whose KL₊ and KL₋ are means of r₊ and of r₋
kto        1 − σ(β (r − KL)), of an answer that is not wanted 1 − σ(β (KL − r)); arXiv 2402.01306

The names and the parameters are PaddleNLP's (`paddlenlp/transformers/dpo_criterion.py`, 3.0.0b4). ipo, simpo, or and
orpo take the mean over an answer's tokens for its log-probability. simpo, or and orpo have no reference. A loss may
have a second part, the mean loss of the better answers' tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_te.options.tuning import NO_REFERENCE

MEAN_OF_TOKENS = ("ipo", *NO_REFERENCE)
OF_FILLERS = -1.0  # the log-probability of an answer that does not count, with which every loss is finite


@dataclass(frozen=True)
class Answer:
    """One of the two answers of each of m pairs.

    policy, reference: the log-probabilities that the model and the reference give to it, summed over its tokens.
    tokens: how many it has. All float32 [m].
    """

    policy: Tensor
    reference: Tensor
    tokens: Tensor

    def scored(self, mean: bool, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return (policy, reference), the mean over tokens or their sum; of the model OF_FILLERS where counts is 0."""
        over = self.tokens.clip(min=1) if mean else 1
        return self.policy / over * counts + OF_FILLERS * (1 - counts), self.reference / over * counts


@dataclass(frozen=True)
class Answers:
    """The answers of a micro-batch of m pairs.

    first: the better ones, or for KTO those that are judged. second: the worse ones, or for KTO other records'. counts:
    1, or 0 for the pairs of a filler. good: for KTO, 1 for a wanted answer and 0 for one that is not. Both float32 [m].
    """

    first: Answer
    second: Answer
    counts: Tensor
    good: Tensor | None = None


@dataclass(frozen=True)
class Outcome:
    """What a micro-batch gives.

    parts: the means that a step's loss is the sum of, over pairs, and over tokens of the better answers, float32 []
    each. sums: {name: what adds up over micro-batches and ranks, float32 []}.
    """

    parts: tuple[Tensor, Tensor]
    sums: Mapping[str, Tensor]


@dataclass(frozen=True)
class PairLoss:
    """The losses of pairs, by their name.

    total: as KTOLoss's, for the KLs of kto_pair.
    """

    loss_type: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    dpop_lambda: float = 50.0
    pref_loss_ratio: float = 1.0
    sft_loss_ratio: float = 0.0
    total: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def __call__(self, answers: Answers) -> Outcome:
        """Return the loss and the rewards of a micro-batch."""
        counts, mean = answers.counts, self.loss_type in MEAN_OF_TOKENS
        pair = _Pair(*answers.first.scored(mean, counts), *answers.second.scored(mean, counts), counts)
        losses = _LOSSES[self.loss_type](self, pair)
        of_tokens, learned = -(answers.first.policy * counts).sum(), (answers.first.tokens * counts).sum()
        parts = self.pref_loss_ratio * _mean(losses, counts), self._sft_ratio * of_tokens / learned.clip(min=1)
        with paddle.no_grad():
            sums = self._sums(counts, losses, pair) | {"learned": learned, "nll": of_tokens.detach()}
        return Outcome(parts, sums)

    @property
    def _sft_ratio(self) -> float:
        """ORPO is the odds ratio's loss beside the tokens' own, as PaddleNLP has it."""
        return 1.0 if self.loss_type == "orpo" else self.sft_loss_ratio

    def _sums(self, counts: Tensor, losses: Tensor, pair: _Pair) -> dict[str, Tensor]:
        chosen, rejected = self.beta * pair.better, self.beta * pair.worse
        values = {
            "loss": losses,
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).astype("float32"),
            "rewards/margins": chosen - rejected,
            "logps/chosen": pair.chosen,
            "logps/rejected": pair.rejected,
        }
        return {"pairs": counts.sum()} | {name: (value.detach() * counts).sum() for name, value in values.items()}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the means of sums over all micro-batches and ranks, under PaddleNLP's names."""
        pairs = max(sums["pairs"], 1)
        names = [name for name in sums if "/" in name]
        pref = self.pref_loss_ratio * sums["loss"] / pairs
        sft = self._sft_ratio * sums["nll"] / max(sums["learned"], 1)
        means = {name: sums[name] / pairs for name in names}
        return {"loss": pref + sft, **means, f"{self.loss_type}_loss": pref, "sft_loss": sft}

    @property
    def needs_reference(self) -> bool:
        """Say whether the formula has the reference's log-probabilities."""
        return self.loss_type not in NO_REFERENCE


@dataclass(frozen=True)
class _Pair:
    """The log-probabilities of the better and the worse answers, as a loss takes them, and `Answers.counts`, [m]."""

    chosen: Tensor
    reference_chosen: Tensor
    rejected: Tensor
    reference_rejected: Tensor
    counts: Tensor

    @property
    def better(self) -> Tensor:
        """Return r₊."""
        return self.chosen - self.reference_chosen

    @property
    def worse(self) -> Tensor:
        """Return r₋."""
        return self.rejected - self.reference_rejected

    @property
    def margin(self) -> Tensor:
        """Return r₊ − r₋."""
        return self.better - self.worse


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    return (values * counts).sum() / counts.sum().clip(min=1)


def _log_sigmoid(x: Tensor) -> Tensor:
    """Return log σ(x), of operations that every device has."""
    return paddle.minimum(x, paddle.zeros_like(x)) - paddle.log(1 + paddle.exp(-paddle.abs(x)))


def _of_margin(loss: PairLoss, margin: Tensor) -> Tensor:
    """Return −log σ(margin), with label_smoothing for the chance that a pair is the wrong way round."""
    smoothing = loss.label_smoothing
    return -_log_sigmoid(margin) * (1 - smoothing) - _log_sigmoid(-margin) * smoothing


def _sigmoid(loss: PairLoss, pair: _Pair) -> Tensor:
    return _of_margin(loss, loss.beta * pair.margin)


def _simpo(loss: PairLoss, pair: _Pair) -> Tensor:
    return _of_margin(loss, loss.beta * pair.margin - loss.simpo_gamma)


def _hinge(loss: PairLoss, pair: _Pair) -> Tensor:
    return (1 - loss.beta * pair.margin).clip(min=0)


def _ipo(loss: PairLoss, pair: _Pair) -> Tensor:
    return (pair.margin - 1 / (2 * loss.beta)) ** 2


def _dpop(loss: PairLoss, pair: _Pair) -> Tensor:
    return -_log_sigmoid(loss.beta * pair.margin) + loss.dpop_lambda * (-pair.better).clip(min=0)


def _sppo_hard(loss: PairLoss, pair: _Pair) -> Tensor:
    return (pair.better - 0.5 / loss.beta) ** 2 + (pair.worse + 0.5 / loss.beta) ** 2


def _nca_pair(loss: PairLoss, pair: _Pair) -> Tensor:
    good, bad = loss.beta * pair.better, loss.beta * pair.worse
    return -_log_sigmoid(good) - 0.5 * _log_sigmoid(-good) - 0.5 * _log_sigmoid(-bad)


def _kto_pair(loss: PairLoss, pair: _Pair) -> Tensor:
    """Compare each answer with the mean of the other kind, which has no gradient (PaddleNLP's has one)."""
    sums = [(reward.detach() * pair.counts).sum() for reward in (pair.better, pair.worse)]
    of_better, of_worse, count = loss.total(paddle.stack([*sums, pair.counts.sum()])).unbind(0)
    kl_better, kl_worse = ((each / count.clip(min=1)).clip(min=0) for each in (of_better, of_worse))
    wanted = F.sigmoid(loss.beta * (pair.better - kl_worse))
    unwanted = F.sigmoid(loss.beta * (kl_better - pair.worse))
    return 1 - (wanted + unwanted) / 2


def _odds_ratio(loss: PairLoss, pair: _Pair) -> Tensor:
    return -_log_sigmoid(_log_odds(pair.chosen) - _log_odds(pair.rejected))


def _log_odds(logp: Tensor) -> Tensor:
    """Return log(p / (1 − p)) of log p."""
    return logp - paddle.log(1 - paddle.exp(logp))


_LOSSES: dict[str, Callable[..., Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "simpo": _simpo,
    "or": _odds_ratio,
    "orpo": _odds_ratio,
    "dpop": _dpop,
    "sppo_hard": _sppo_hard,
    "nca_pair": _nca_pair,
    "kto_pair": _kto_pair,
}


@dataclass(frozen=True)
class KTOLoss:
    """The loss of single answers that are wanted or not.

    total: sums a tensor over the ranks with other answers; the KL of a micro-batch is the mean over all of them.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    total: Callable[[Tensor], Tensor] = lambda tensor: tensor
    needs_reference = True

    def __call__(self, answers: Answers) -> Outcome:
        """Return the loss and the rewards of a micro-batch."""
        assert answers.good is not None
        counts, good = answers.counts, answers.good
        judged, other = (each.policy - each.reference for each in (answers.first, answers.second))
        sums = self.total(paddle.stack([(other.detach() * counts).sum(), counts.sum()]))
        kl = (sums[0] / sums[1].clip(min=1)).clip(min=0)
        wanted = self.desirable_weight * (1 - F.sigmoid(self.beta * (judged - kl)))
        unwanted = self.undesirable_weight * (1 - F.sigmoid(self.beta * (kl - judged)))
        losses = good * wanted + (1 - good) * unwanted
        loss = _mean(losses, counts)
        return Outcome((loss, paddle.zeros_like(loss)), self._sums(answers, losses, judged, kl))

    @paddle.no_grad()
    def _sums(self, answers: Answers, losses: Tensor, judged: Tensor, kl: Tensor) -> dict[str, Tensor]:
        assert answers.good is not None
        counts, good, judged = answers.counts, answers.good, judged.detach()
        right = ((judged > kl).astype("float32") - (1 - good)).abs()
        found = {"pairs": counts.sum(), "loss": (losses.detach() * counts).sum(), "kl": kl * counts.sum()}
        found |= {"learned": paddle.zeros([]), "nll": paddle.zeros([]), "rewards/accuracies": (right * counts).sum()}
        for name, chooses in (("chosen", good), ("rejected", 1 - good)):
            of_these = chooses * counts
            found |= {f"count/{name}": of_these.sum(), f"rewards/{name}": (self.beta * judged * of_these).sum()}
            found |= {f"logps/{name}": (answers.first.policy.detach() * of_these).sum()}
        return found

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the means of sums over all micro-batches and ranks, under PaddleNLP's names."""
        pairs = max(sums["pairs"], 1)
        found = {name: sums[name] / pairs for name in ("loss", "kl", "rewards/accuracies")}
        for name in ("chosen", "rejected"):
            count = sums[f"count/{name}"]
            found |= {f"count/{name}": count}
            found |= {f"{kind}/{name}": sums[f"{kind}/{name}"] / max(count, 1) for kind in ("rewards", "logps")}
        return found | {"rewards/margins": found["rewards/chosen"] - found["rewards/rejected"]}
