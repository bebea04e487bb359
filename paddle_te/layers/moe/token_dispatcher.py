"""Take tokens to the ranks that have their experts, and what these add up to back, as Megatron-Core's dispatchers.

Both give a rank tokens, with the columns of its own experts in probs and routing_map, so that `ops.moe.experts_mlp`
computes their sums over these experts. A token goes to a rank once, however many of its experts are there.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_te.distributed import ExpertParallel, TensorParallel
from paddle_te.ops.routing import apply_routing

STEPS = 8  # a rank's tokens are divided by; see `MoEAlltoAllTokenDispatcher`


class Routes(NamedTuple):
    """Say which tokens go where in an all-to-all.

    sent, received: rows to each rank, and from each. tokens, targets: int64 [rows sent], a row's token and rank.
    places: int64 [tokens, ranks], a token's row for each rank, behind the last row where it does not go there.
    room: rows of what is received, padding included. pairs: of such a row and an expert of it here, at most.
    """

    ranks: TensorParallel
    sent: list[int]
    received: list[int]
    tokens: Tensor
    targets: Tensor
    places: Tensor
    room: int
    pairs: int


class Arrived(NamedTuple):
    """Hold what a rank's experts compute: tokens [n, h], probs and routing_map [n, experts of this rank]."""

    tokens: Tensor
    probs: Tensor
    routing_map: Tensor
    routes: Routes | None = None

    @property
    def pairs(self) -> int | None:
        """Return how many pairs of a token and an expert of it there are at most; None where nobody knows."""
        return None if self.routes is None else self.routes.pairs


class TokenDispatcher(Protocol):
    """The interface of the ranks that divide a MoELayer's experts."""

    def dispatch(self, x: Tensor, probs: Tensor, routing_map: Tensor) -> Arrived:
        """Return what arrives here of all ranks' tokens [tokens, h], probs and routing_map [tokens, experts]."""

    def combine(self, y: Tensor, arrived: Arrived) -> Tensor:
        """Return [tokens, h] of this rank: the sums over all ranks of y, which the experts made of `arrived`."""


def make_dispatcher(kind: str, ep: ExpertParallel) -> TokenDispatcher:
    """Return the dispatcher of one of `options.layers.DISPATCHERS`."""
    return MoEAllGatherTokenDispatcher(ep) if kind == "allgather" else MoEAlltoAllTokenDispatcher(ep)


class MoEAllGatherTokenDispatcher:
    """Gather all tokens on each rank, and scatter the sums.

    Sizes follow from the tensors, so the host never waits. Ranks with different tokens must have the same number of
    them. If all ranks have the same tokens, nothing is gathered, and the sums are all-reduced.
    """

    def __init__(self, ep: ExpertParallel) -> None:
        self.ranks = ep.ranks

    def dispatch(self, x: Tensor, probs: Tensor, routing_map: Tensor) -> Arrived:
        """Return all tokens."""
        ranks = self.ranks
        if ranks.sequence_parallel:
            return Arrived(ranks.enter(x), *apply_routing(_ExchangeColumns, probs, routing_map, ranks))
        local = probs.shape[1] // ranks.size
        mine = slice(ranks.rank * local, (ranks.rank + 1) * local)
        # each rank has the gradients of its own experts' probabilities; their sum is the router's
        probs, routing_map = ranks.enter(probs)[:, mine].contiguous(), routing_map[:, mine].contiguous()
        return Arrived(ranks.enter(x), probs, routing_map)

    def combine(self, y: Tensor, arrived: Arrived) -> Tensor:
        """Return the sums."""
        return self.ranks.leave(y)


def _marked(probs: Tensor, routing_map: Tensor) -> Tensor:
    """Return both in one: a probability, or -1 where an expert is not chosen."""
    return paddle.where(routing_map, probs, paddle.full_like(probs, -1.0))


def _unmarked(marked: Tensor) -> tuple[Tensor, Tensor]:
    """Return (probs, routing_map). NaN, which is not below 0, stays."""
    routing_map = paddle.logical_not(marked < 0)
    return paddle.where(routing_map, marked, paddle.zeros_like(marked)), routing_map


class _ExchangeColumns(PyLayer):
    """Give each rank its experts' columns of all tokens, a rank's behind the other's, as `enter` gathers tokens."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, routing_map: Tensor, ranks: TensorParallel) -> tuple[Tensor, Tensor]:
        ctx.ranks, (tokens, experts) = ranks, probs.shape
        columns = _marked(probs, routing_map).reshape([tokens, ranks.size, -1]).transpose([1, 0, 2])
        found = _unmarked(ranks.all_to_all(columns.reshape([-1, experts // ranks.size])))
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, dprobs: Tensor, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # Paddle takes None
        ranks, (rows, local) = ctx.ranks, dprobs.shape
        of_ranks = ranks.all_to_all(dprobs).reshape([ranks.size, rows // ranks.size, local])
        return of_ranks.transpose([1, 0, 2]).reshape([rows // ranks.size, ranks.size * local]), None


class MoEAlltoAllTokenDispatcher:
    """Send each token only to the ranks that have one of its experts.

    The numbers of rows must be known to the host: it waits for the router once a layer, in forward. What arrives gets
    rows without experts behind it, up to a multiple of an eighth of this rank's tokens: te records a program for each
    number of rows. So is the number of rows that the experts have, for which te makes room.
    """

    def __init__(self, ep: ExpertParallel) -> None:
        self.ranks = ep.ranks

    def dispatch(self, x: Tensor, probs: Tensor, routing_map: Tensor) -> Arrived:
        """Return the tokens that have experts here."""
        routes = self._routes(routing_map)
        tokens = _ToExperts.apply(x, routes)
        probs, routing_map = apply_routing(_ProbsToExperts, probs, routing_map, routes)
        return Arrived(tokens, probs, routing_map, routes)

    def combine(self, y: Tensor, arrived: Arrived) -> Tensor:
        """Return the sums, which are added in float32 and rounded once."""
        return _ToTokens.apply(y, arrived.routes)

    @paddle.no_grad()
    def _routes(self, routing_map: Tensor) -> Routes:
        ranks, tokens = self.ranks, routing_map.shape[0]
        chosen = routing_map.reshape([tokens, ranks.size, -1]).astype("int64").sum(-1).transpose([1, 0])
        goes = (chosen > 0).astype("int64")
        counts = paddle.stack([goes.sum(1), chosen.sum(1)], 1)  # for each rank, rows, and pairs of these and experts
        mine, theirs = paddle.stack([counts, ranks.all_to_all(counts)]).numpy().tolist()  # the host waits
        (sent, pairs_sent), (received, pairs) = zip(*mine, strict=True), zip(*theirs, strict=True)
        rows, flat = sum(sent), goes.flatten()
        order = paddle.argsort(1 - flat, stable=True)[:rows]
        places = paddle.where(flat > 0, flat.cumsum() - 1, paddle.full_like(flat, rows))
        places = places.reshape([ranks.size, tokens]).transpose([1, 0])
        of_a_token = -(-sum(pairs_sent) // tokens)
        rooms = _room(sum(received), tokens), _room(sum(pairs), of_a_token * tokens)
        return Routes(ranks, [*sent], [*received], order % tokens, order // tokens, places, *rooms)


def _room(number: int, whole: int) -> int:
    """Return the multiple of an eighth of `whole`, from 1 on, that has room for a number."""
    step = max(whole // STEPS, 1)
    return max(-(-number // step), 1) * step


def _sent(rows: Tensor, routes: Routes, padding: float) -> Tensor:
    """Return what all ranks send here, and padding behind it."""
    arrived = routes.ranks.all_to_all(rows, routes.sent, routes.received)
    lacking = routes.room - arrived.shape[0]
    return paddle.concat([arrived, paddle.full([lacking, arrived.shape[1]], padding, arrived.dtype)])


def _sent_back(rows: Tensor, routes: Routes) -> Tensor:
    """Return what the ranks have made of the rows that went to them, and a row of zeros behind it."""
    there = rows[: sum(routes.received)]
    back = routes.ranks.all_to_all(there, routes.received, routes.sent)
    return paddle.concat([back, paddle.zeros([1, back.shape[1]], back.dtype)])


def _to_experts(x: Tensor, routes: Routes) -> Tensor:
    """Send tokens [tokens, h] to their ranks."""
    return _sent(x.index_select(routes.tokens, 0), routes, 0.0)


def _to_tokens(y: Tensor, routes: Routes) -> Tensor:
    """Send rows back and add each token's up."""
    found = _sent_back(y, routes).index_select(routes.places.flatten(), 0)
    return found.reshape([*routes.places.shape, -1]).astype("float32").sum(1).astype(y.dtype)


class _ToExperts(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return _to_experts(x, routes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return _to_tokens(dy, ctx.routes)


class _ToTokens(PyLayer):
    @staticmethod
    def forward(ctx: Any, y: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return _to_tokens(y, routes)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return _to_experts(dx, ctx.routes)


class _ProbsToExperts(PyLayer):
    """Send each row's columns of its rank's experts."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, routing_map: Tensor, routes: Routes) -> tuple[Tensor, Tensor]:
        ctx.routes, size = routes, routes.ranks.size
        of_ranks = _marked(probs, routing_map).reshape([-1, probs.shape[1] // size])
        rows = of_ranks.index_select(routes.tokens * size + routes.targets, 0)
        found = _unmarked(_sent(rows, routes, -1.0))
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, dprobs: Tensor, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # Paddle takes None
        routes = ctx.routes
        of_ranks = _sent_back(dprobs, routes).index_select(routes.places.flatten(), 0)
        return of_ranks.reshape([routes.places.shape[0], -1]), None
