"""The optimizer: momentum of matrices and their update, beside AdamW's of all other weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import paddle
from paddle import Tensor

from paddle_te import device
from paddle_te.distributed.tensor_parallel import TensorParallel
from paddle_te.ops import get_ops
from paddle_te.ops.interface import Ops
from paddle_te.optimizer import multiplied
from paddle_te.optimizer.adamw import Pair
from paddle_te.optimizer.compact_states import CompactAdamW, replace_weight, whole_weight
from paddle_te.optimizer.holding import held_by, layers_of, shares_of
from paddle_te.optimizer.muon.matrices import units_of
from paddle_te.optimizer.muon.plan import Chunk, Precision, TensorRanks, chunks_of
from paddle_te.weights.dims import Dims
from paddle_te.weights.layout import Layout

MOMENTUM = 0.95  # torch.optim.Muon's and Moonlight's


def use_muon(optimizer: paddle.optimizer.AdamW, backend: str, momentum: float = MOMENTUM) -> None:
    """Let a CompactAdamW, before its first step, be a Muon, which `bind_muon` must tell of a model's matrices.

    backend: whose Newton–Schulz it is, a name of `ops.get_ops`. momentum: the share of it that a step keeps.
    """
    optimizer.__class__ = Muon
    optimizer.ops, optimizer.momentum = get_ops(backend), momentum


def bind_muon(
    optimizer: Any, parameters: Mapping[str, Tensor], layout: Layout, dims: Dims, tp: TensorParallel | None
) -> None:
    """Tell a Muon which of a model's weights are matrices, and which ranks divide them; leave others alone.

    optimizer: the outermost one, wrapped for its kind of sharding, before its first step and before it gets the state
    of a checkpoint. parameters: the model's, by their names in the layout.
    """
    inner = layers_of(optimizer)[-1]
    if not isinstance(inner, Muon):
        return
    shares = shares_of(optimizer)
    known = {*shares, *held_by(optimizer, parameters.values())}
    units = [
        units_of(name, parameter, layout, shares[parameter.name].ranks.size if parameter.name in shares else 1)
        for name, parameter in parameters.items()
        if not parameter.stop_gradient and parameter.name in known
    ]
    inner.matrices = {of_weight[0].weight for of_weight in units if of_weight}
    wide = all(parameter.dtype == paddle.float32 for parameter in parameters.values())
    inner.precision = "float32" if wide else "bfloat16"
    inner.chunks = [*chunks_of([of_weight for of_weight in units if of_weight], shares, TensorRanks(dims, tp))]


class Muon(CompactAdamW):
    """Paddle's AdamW, for whose matrices there is a momentum, called moment1, and no other state.

    ops: the backend. momentum: the share of it that a step keeps. matrices: the names of weights that are matrices.
    chunks: those that are updated together. precision: dtype of the updates that Newton–Schulz reads and gives.
    """

    ops: Ops
    momentum: float
    matrices: set[str] = set()
    chunks: Sequence[Chunk] = ()
    precision: Precision = "bfloat16"
    _making = ""  # the parameter whose states are made

    def _create_accumulators(self, block: Any, parameters: Sequence[Tensor]) -> None:
        for param in parameters:
            self._making = param.name
            super()._create_accumulators(block, [param])

    def _add_moments_pows(self, p: Tensor) -> None:
        if self._making in self.matrices:
            self._add_accumulator(self._moment1_acc_str, p, dtype=self.moments, shape=list(p.shape))
        else:
            super()._add_moments_pows(p)

    def _goes_together(self, pairs: Sequence[Pair]) -> bool:
        return True  # also where this rank has nothing: others may wait for it

    def _prepared(self, pairs: Sequence[Pair]) -> Callable[[], None]:
        mine = {param.name: (param, grad) for param, grad in pairs if param.name in self.matrices}
        others = [pair for pair in pairs if pair[0].name not in mine]
        block = paddle.static.default_main_program().global_block()
        self._create_accumulators(block, [param for param, _ in pairs])
        on_nvgpu = bool(others) and device.kind(others[0][0].place) == "nvgpu"
        update_others = super()._prepared(others) if on_nvgpu else None

        def update() -> None:
            for pair in () if update_others else others:
                self._update_elsewhere(block, pair)
            if update_others:
                update_others()
            for chunk in self.chunks:
                self._update_chunk(chunk, mine)

        return update

    @paddle.no_grad()
    def _update_chunk(self, chunk: Chunk, pairs: Mapping[str, Pair]) -> None:
        """Update the matrices of a Chunk; a weight without a gradient stays, and takes part with zeros."""
        mine = [pairs[name] for name in chunk.sizes if name in pairs]
        updates = {
            name: paddle.zeros([size], self.precision) for name, size in chunk.sizes.items() if name not in pairs
        }
        updates |= self._momenta(mine)
        results = chunk.orthogonal(updates, self.ops, self.precision)
        for alike in self._alike(mine):
            self._apply([(param, _padded(results[param.name], param.size)) for param, _ in alike])

    def _alike(self, pairs: Sequence[Pair]) -> list[list[Pair]]:
        """Return the pairs by what one call has alike: rate, factor, master weights."""
        alike: defaultdict[Hashable, list[Pair]] = defaultdict(list)
        for pair in pairs:
            alike[self._call_of(pair[0])].append(pair)
        return [*alike.values()]

    def _momenta(self, pairs: Sequence[Pair]) -> dict[str, Tensor]:
        """Add gradients to the momenta. Return {weight's name: Nesterov's update, flat, of `precision`}."""
        updates = {param.name: paddle.empty([param.size], self.precision) for param, _ in pairs}
        for alike in self._alike(pairs):
            factor = self._factor_of(alike[0][0])
            momenta = [self._momentum_of(param) for param, _ in alike]
            mine = [updates[param.name] for param, _ in alike]
            grads = [grad for _, grad in alike]
            if device.kind(grads[0].place) == "nvgpu":
                arguments = grads, factor, momenta, mine, self.momentum
                device.nvgpu_operator("nvgpu_multi_tensor_muon_momentum", *arguments)
                continue
            for grad, momentum, update in zip(grads, momenta, mine, strict=True):
                add_to_momentum(multiplied(grad, factor), momentum, update, self.momentum)
        return updates

    def _momentum_of(self, param: Tensor) -> Tensor:
        key = self._master_weights[param.name].name if self.has_master(param) else param.name
        return self._states(self._moment1_acc_str)[key]

    def _apply(self, updates: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Change weights that one call can, by their updates, flat; see MuonStep in nvgpu/csrc/math/math.h."""
        params, flat = [param for param, _ in updates], [update for _, update in updates]
        masters = [self._master_weights[param.name] for param in params] if self.has_master(params[0]) else None
        decays = [float(self._ratio_and_decay(param, param.name)[1]) for param in params]
        rate = self._create_param_lr((params[0], None))
        if device.kind(params[0].place) == "nvgpu":
            device.nvgpu_operator("nvgpu_multi_tensor_muon", params, flat, rate, masters, decays)
            return
        for number, (param, update) in enumerate(updates):
            apply_in_paddle(param, update, rate, None if masters is None else masters[number], decays[number])


def add_to_momentum(grad: Tensor, momentum: Tensor, update: Tensor, beta: float) -> None:
    """Set momentum to beta · momentum + grad, and update to grad + beta · momentum, in float32 before they are rounded.

    bfloat16 rounds to the nearest: a step changes 1 - beta of a momentum, many times its last place.
    """
    kept, g = paddle.full([], beta, "float32"), grad.astype("float32").reshape(momentum.shape)
    m = kept * momentum.astype("float32") + g
    paddle.assign(m.astype(momentum.dtype), output=momentum)
    paddle.assign((kept * m + g).astype(update.dtype).reshape(update.shape), output=update)


def apply_in_paddle(param: Tensor, update: Tensor, rate: Tensor, master: Tensor | None, decay: float) -> None:
    """Set a weight to weight · (1 - rate · decay) - rate · update, in float32 before it is rounded."""
    rate = rate.reshape([])
    kept = paddle.ones([]) - rate * paddle.full([], decay, "float32")
    p = whole_weight(param, master)
    replace_weight(param, master, p * kept - rate * update.astype("float32").reshape(p.shape))


def _padded(flat: Tensor, size: int) -> Tensor:
    """Return a flat tensor with zeros behind it, as there are behind a weight's end in a sharding rank's slice."""
    missing = size - flat.shape[0]
    return paddle.concat([flat, paddle.zeros([missing], flat.dtype)]) if missing else flat
