"""Keep AdamW's state in fewer bytes: moments in 16 or 8 bits, and master weights of which only half is kept.

--optim_moments bfloat16: both moments are rounded to bfloat16 after each step, up with the probability that makes the
expected value exact (stochastic rounding, Gupta et al. 2015, arXiv:1502.02551). To the nearest would not do: the second
moment changes by (1 - beta2) of itself in a step, which for 0.999 is less than half of bfloat16's last place.

--optim_moments int8: 8 bits an element, and a float32 unit for each block of 256 elements (weights/blocks.py says where
they lie). The first moment is unit * code**4 with the sign of its code, which goes from -127 to 127. Of the second
moment the square root is kept, as unit * code**4 with codes from 0 to 255. The unit is such that the block's greatest
number has the greatest code. Neighbours are about 4 / code of the number apart, and a number that is a thousandth of
the greatest still has the code 22 or 45. The dynamic maps of Dettmers et al. 2022 (arXiv:2110.02861) do the same by
tables. Codes are rounded stochastically, so that the expected values of the first moment and of the root are exact. A
root above 0 never becomes 0, as the next step would then be far too large. A block with a number that is not finite is
NaN.

--master_weights bf16_remainder: a bfloat16 weight is the upper half of its float32 master weight, and an int16 tensor
in the master weight's place holds the rest (Transformer Engine's FusedAdam calls it store_param_remainders). The
weight's bits, shifted by 16, plus the remainder are the master weight's bits, so nothing is lost. As with float32
master weights, the weight is its master weight rounded to the nearest; only a tie is rounded away from zero instead of
to the even number.

On nvgpu the step is a kernel (nvgpu/csrc/math/adamw.cu). Elsewhere it is `step_in_paddle`, which specifies that
kernel; both give the same bits. The random numbers of the rounding depend only on the seed, the step and the element's
place in its weight. Therefore a run that was resumed, and ranks that share a weight by sharding, round as one process
that never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor
from paddle.optimizer.lr import LRScheduler

from paddle_te.optimizer import FactorAdamW, Step, multiplied
from paddle_te.optimizer.adamw import Pair, has_groups
from paddle_te.optimizer.holding import held_by, layers_of
from paddle_te.weights.blocks import BLOCK, UNIT_BYTES, moment_shape, row_bytes

REMAINDER: Literal["int16"] = "int16"  # dtype of what stands in a master weight's place
SIGNED, UNSIGNED = 127, 255  # greatest codes of the first moment and of the second's root
Bits: TypeAlias = npt.NDArray[Any]  # uint32, of whose shifts NumPy's stubs make other types
_SMALLEST_UNIT = 2.0**-126  # float32's smallest normal number; smaller units are 0


def keep_compact(optimizer: paddle.optimizer.Optimizer, moments: str, master_weights: str, seed: int = 0) -> None:
    """Let Paddle's AdamW, before its first step, keep its state as --optim_moments and --master_weights say.

    States keep Paddle's names, and their dtypes tell how they are kept. Nothing changes where both flags are float32.

    Args:
        optimizer: an AdamW with a learning rate scheduler, without groups of parameters and without amsgrad. The
            random numbers of the rounding depend on the scheduler's count of steps.
        moments, master_weights: values of the two flags.
        seed: of the random numbers.

    Raises ValueError for another optimizer.
    """
    if moments == master_weights == "float32":
        return
    if not isinstance(optimizer, paddle.optimizer.AdamW) or has_groups(optimizer):
        raise ValueError("--optim_moments and --master_weights are AdamW's, without groups of parameters")
    if optimizer._amsgrad or not isinstance(optimizer._learning_rate, LRScheduler):
        raise ValueError("--optim_moments and --master_weights: AdamW without amsgrad, with a learning rate scheduler")
    optimizer.__class__ = CompactAdamW
    optimizer.moments, optimizer.master_weights, optimizer.seed = moments, master_weights, seed


def number_elements(optimizer: Any, parameters: Iterable[Tensor]) -> None:
    """Tell a CompactAdamW which elements of its weights a rank holds, so that it rounds them as one process would.

    optimizer: the outermost one, as it is wrapped for the run's kind of sharding, before its first step. Nothing
    happens where there is no CompactAdamW in it. parameters: the model's.
    """
    inner = layers_of(optimizer)[-1]
    if isinstance(inner, CompactAdamW):
        inner.first_elements = {held.name: held.begin or 0 for held in held_by(optimizer, parameters).values()}


class CompactAdamW(FactorAdamW):
    """Paddle's AdamW with a state of fewer bytes. `keep_compact` makes one."""

    moments = "float32"
    master_weights = "float32"
    seed = 0
    # {name of a parameter, as the optimizer has it: place of its first element in the whole one}
    first_elements: dict[str, int] = {}

    def _create_master_weight(self, param: Tensor) -> Tensor:
        """Return Paddle's, or zeros: a weight that has just been made is equal to its master weight."""
        if self.master_weights == "float32":
            return super()._create_master_weight(param)
        master = self._master_weights.get(param.name)  # sharding stages 2 and 3 have made a float32 one
        if master is None or master.dtype == paddle.float32:
            remainder = paddle.zeros(param.shape, REMAINDER)
            remainder.name = self._gen_master_weight_var_name(param) if master is None else master.name
            self._master_weights[param.name] = master = remainder
        return master

    def _add_moments_pows(self, p: Tensor) -> None:
        """Do as Paddle's, but give the moments their own dtype. p: the parameter, or what is its master weight."""
        shape = moment_shape(p.shape) if self.moments == "int8" else p.shape
        for name in (self._moment1_acc_str, self._moment2_acc_str):
            self._add_accumulator(name, p, dtype=self.moments, shape=list(shape))
        for name, beta in ((self._beta1_pow_acc_str, self._beta1), (self._beta2_pow_acc_str, self._beta2)):
            self._add_accumulator(name, p, dtype="float32", fill_value=beta, shape=[1], device="cpu")

    def _update_elsewhere(self, block: Any, param_and_grad: Pair) -> None:
        self._run(self.step_of(param_and_grad))

    def _run_elsewhere(self, step: Step) -> None:
        step_in_paddle(step)

    def _noise_key(self) -> int:
        assert isinstance(self._learning_rate, LRScheduler)  # `keep_compact` takes no other
        return noise_key(self.seed, self._learning_rate.last_epoch)

    def _first_element(self, name: str) -> int:
        return self.first_elements.get(name, 0)


def mix(x: Bits) -> Bits:
    """Return 32 random bits of each number.

    The hash is "lowbias32" of Chris Wellons (nullprogram.com, "Prospecting for Hash Functions"), as in
    nvgpu/csrc/math/adamw.cu.
    """
    x = (x ^ x >> 16) * np.uint32(0x7FEB352D)
    x = (x ^ x >> 15) * np.uint32(0x846CA68B)
    return x ^ x >> 16


@lru_cache(maxsize=1)  # all weights of a step have the same
def noise_key(seed: int, step: int) -> int:
    """Return a number below 2**32, by which the random numbers of a step differ from those of other steps and seeds."""
    numbers = np.array([seed & 0xFFFFFFFF, step], "uint32")
    return int(mix(mix(numbers[:1]) ^ numbers[1:])[0])


def noise(key: int, first: int, shape: Sequence[int]) -> list[Tensor]:
    """Return random numbers below 2**16 for the first and the second moment, two int32 tensors of the shape.

    first: the place of the first element in its whole weight. All weights have the same numbers, because copies of a
    weight must be rounded alike: those on tensor parallel ranks, and tied embeddings on a pipeline's two end stages.
    """
    index = (np.arange(math.prod(shape), dtype="uint64") + first).astype("uint32")
    bits = mix(index ^ np.uint32(key)).reshape(shape)
    return [paddle.to_tensor(part.astype("int32")) for part in (bits & 0xFFFF, bits >> 16)]


def _shifted(bits: Tensor, places: int, left: bool = False) -> Tensor:
    by = paddle.full([], places, "int32")
    return bits << by if left else bits >> by


def _bits(values: Tensor) -> Tensor:
    """Return the bits of float32 numbers as int32; of a NaN those of the one that stays a NaN in its upper half."""
    quiet = paddle.full_like(values, math.nan).view("int32")
    return paddle.where(paddle.isnan(values), quiet, values.view("int32"))


def round_stochastically(values: Tensor, random_bits: Tensor) -> Tensor:
    """Round float32 to bfloat16, up with the probability that makes the expected value exact.

    random_bits: int32, uniform below 2**16, as many bits as bfloat16 drops.
    """
    return _shifted(_bits(values) + random_bits, 16).astype("int16").view("bfloat16")


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master weight of a bfloat16 weight and its int16 remainder."""
    return (_shifted(weight.view("int16").astype("int32"), 16, left=True) + remainder.astype("int32")).view("float32")


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bfloat16 weight, int16 remainder) of a float32 master weight; the remainder of a NaN is 0."""
    bits = _bits(master)
    remainder = bits.astype("int16")  # the lower half, with its sign
    weight = _shifted(bits - remainder.astype("int32"), 16).astype("int16").view("bfloat16")
    return weight, remainder


def whole_weight(param: Tensor, master: Tensor | None) -> Tensor:
    """Return a weight in float32: its master weight, whole or the remainder of one, or where it has none itself."""
    if master is not None and master.dtype == paddle.int16:
        return join_master(param, master)
    return (param if master is None else master).astype("float32")


def replace_weight(param: Tensor, master: Tensor | None, value: Tensor) -> None:
    """Set a weight, and its master weight or the remainder of one, to a float32 tensor."""
    if master is not None and master.dtype == paddle.int16:
        weight, kept = split_master(value)
    else:
        weight, kept = value.astype(param.dtype), value
    for tensor, new in ((param, weight), (master, kept)):
        if tensor is not None:
            paddle.assign(new.reshape(tensor.shape), output=tensor)


# Paddle's square root and quotient of float32 are MKL's, which are not the nearest number on every CPU. Those of
# float64, rounded to float32, are.
def _square_root(x: Tensor) -> Tensor:
    return paddle.sqrt(x.astype("float64")).astype("float32")


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    return (x.astype("float64") / y.astype("float64")).astype("float32")


def _in_blocks(values: Tensor) -> Tensor:
    """Return [..., width] as [rows, blocks of a row, BLOCK], with zeros behind a row's end."""
    rows = values.reshape([-1, values.shape[-1] if values.ndim else 1])
    missing = -rows.shape[1] % BLOCK
    if missing:
        rows = paddle.concat([rows, paddle.zeros([rows.shape[0], missing], rows.dtype)], -1)
    return rows.reshape([rows.shape[0], -1, BLOCK])


def _fourth_power(codes: Tensor) -> Tensor:
    squares = codes * codes
    return squares * squares


def encode(magnitudes: Tensor, greatest: int, random_bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes, units): numbers of at least 0 as unit * code**4.

    Args:
        magnitudes: float32 [rows, blocks, 256]. A block is NaN where one of its numbers is not finite.
        greatest: of the codes.
        random_bits: int32 of the shape, uniform below 2**16, by which codes are rounded up or down.

    Returns float32 tensors [rows, blocks, 256] and [rows, blocks, 1].
    """
    largest = _bits(magnitudes).max(-1, keepdim=True).view("float32")  # as bits, among which a NaN is the greatest
    units = _quotient(largest, _fourth_power(paddle.full([], greatest, "float32")))
    zeros, ones = paddle.zeros_like(units), paddle.ones_like(units)
    units = paddle.where(units < _SMALLEST_UNIT, zeros, units)
    usable = (units > 0) & paddle.isfinite(units)
    inverses = paddle.where(usable, _quotient(ones, paddle.where(usable, units, ones)), zeros)
    in_units = magnitudes * inverses
    in_units = paddle.where(in_units > 0, in_units, paddle.zeros_like(in_units))  # a NaN becomes 0 too
    codes = paddle.floor(_square_root(_square_root(in_units))).clip(max=float(greatest))
    below = _fourth_power(codes)
    step = _fourth_power(codes + 1.0) - below
    up = (in_units - below) * 65536.0 > random_bits.astype("float32") * step
    return codes + (up & (codes < greatest)).astype("float32"), units


def join_blocks(moment: Tensor, shape: Sequence[int], signed: bool) -> Tensor:
    """Return the float32 numbers, unit * code**4 with the code's sign, of a moment of a weight of a shape.

    moment: int8 of `moment_shape(shape)`. signed: whether its codes are int8; or they are uint8.
    """
    width = shape[-1] if len(shape) else 1
    rows = moment.reshape([-1, row_bytes(width)])
    blocks = -(-width // BLOCK)
    missing = blocks * (BLOCK + UNIT_BYTES) - rows.shape[1]
    if missing:
        rows = paddle.concat([rows, paddle.zeros([rows.shape[0], missing], "int8")], -1)
    rows = rows.reshape([-1, BLOCK + UNIT_BYTES])
    units, codes = rows[:, :UNIT_BYTES].contiguous().view("float32"), rows[:, UNIT_BYTES:].astype("int32")
    codes = (codes if signed else codes % 256).astype("float32")
    return (units * _fourth_power(codes) * codes.sign()).reshape([-1, blocks * BLOCK])[:, :width].reshape(shape)


def split_blocks(codes: Tensor, units: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an int8 moment of a weight of a shape: the inverse of `join_blocks`.

    codes, units: `encode`'s, with signs.
    """
    codes = codes.astype("int32").astype("int8").reshape([-1, BLOCK])
    whole = paddle.concat([units.reshape([-1, 1]).view("int8"), codes], -1)
    width = shape[-1] if len(shape) else 1
    rows = whole.reshape([math.prod(shape) // width, -1])
    return rows[:, : row_bytes(width)].reshape(list(moment_shape(shape)))


def _moments_in_blocks(m1: Tensor, root2: Tensor, random_bits: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return both moments, the second by its root, as int8 tensors."""
    bits1, bits2 = (_in_blocks(bits) for bits in random_bits)
    blocks1, blocks2 = _in_blocks(m1), _in_blocks(root2)
    codes1, units1 = encode(blocks1.abs(), SIGNED, bits1)
    codes2, units2 = encode(blocks2, UNSIGNED, bits2)
    codes1 = paddle.where(blocks1 < 0, -codes1, codes1)
    codes2 = paddle.where((blocks2 > 0) & (codes2 == 0), paddle.ones_like(codes2), codes2)
    return split_blocks(codes1, units1, m1.shape), split_blocks(codes2, units2, m1.shape)


def _moments_of(step: Step) -> tuple[Tensor, Tensor]:
    """Return both moments as float32 of the weight's shape."""
    if step.moment1.dtype != paddle.int8:
        return step.moment1.astype("float32"), step.moment2.astype("float32")
    root2 = join_blocks(step.moment2, step.param.shape, signed=False)
    return join_blocks(step.moment1, step.param.shape, signed=True), root2 * root2


@paddle.no_grad()
def step_in_paddle(step: Step) -> None:
    """Make a Step in float32, operation by operation as nvgpu's kernel does it."""
    param, master = step.param, step.master
    beta1, beta2, epsilon, ratio, decay, power1, power2 = (
        paddle.full([], float(number), "float32")
        for number in (step.beta1, step.beta2, step.epsilon, step.rate_ratio, step.decay)
        + (step.beta1_power, step.beta2_power)
    )
    one = paddle.ones([])
    rate = step.learning_rate.reshape([]) * ratio
    scale, scaled_rate = _square_root(one - power2), _quotient(rate, one - power1)
    g = multiplied(step.grad, step.factor).astype("float32")
    p = whole_weight(param, master) * (one - rate * decay)
    m1, m2 = _moments_of(step)
    m1 = beta1 * m1 + (one - beta1) * g
    m2 = beta2 * m2 + (one - beta2) * g * g
    root2 = _square_root(m2)
    p = p - _quotient(scaled_rate * m1 * scale, root2 + epsilon * scale)
    if step.moment1.dtype != paddle.float32:
        random_bits = noise(step.noise_key, step.noise_first, param.shape)
    if step.moment1.dtype == paddle.bfloat16:
        m1, m2 = (round_stochastically(m, bits) for m, bits in zip((m1, m2), random_bits, strict=True))
    elif step.moment1.dtype == paddle.int8:
        m1, m2 = _moments_in_blocks(m1, root2, random_bits)
    replace_weight(param, master, p)
    new = [(step.moment1, m1), (step.moment2, m2)]
    new += [(step.beta1_power, beta1 * power1), (step.beta2_power, beta2 * power2)]
    for tensor, value in new:
        paddle.assign(value.reshape(tensor.shape), output=tensor)
