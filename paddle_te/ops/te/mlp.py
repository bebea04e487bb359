"""The MLP half of a layer as Ops: see paddle_te.ops.te.recording.

It takes all tokens at once, or chunks of them like "TiledMLP" of DeepSpeed's ALST (Bekman et al., 2025,
arXiv:2506.13996). With chunks forward keeps only its input. Backward computes one chunk after another again, so the
tensors between norm and output exist for one chunk at a time. GEMMs add up the weights' gradients in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from paddle_te.native import column_sums
from paddle_te.ops.activations import FC1_WIDTHS
from paddle_te.ops.chunks import chunk_rows, ranges
from paddle_te.ops.interface import Ranks
from paddle_te.ops.norms import Norm, norm_tensors
from paddle_te.ops.projection import Projection
from paddle_te.ops.recompute import NOTHING_AGAIN, MLPRecompute
from paddle_te.ops.te import autograd
from paddle_te.ops.te.activation import activated, activated_again, activation_backward
from paddle_te.ops.te.adapted_mlp import ADAPTED_MLP
from paddle_te.ops.te.gemm import (
    Addends,
    BiasGradient,
    Gemm,
    SavedColumn,
    cast,
    check_bias,
    check_fp8,
    check_weight,
    column_forward,
    dgrad,
    drop_data,
    gathers,
    grad_output_and_dgrad,
    row_count,
    row_output,
    weight_operand,
    wgrad,
)
from paddle_te.ops.te.input_store import StoredInput
from paddle_te.ops.te.linear import Wanted
from paddle_te.ops.te.low_rank import factors_and_settings
from paddle_te.ops.te.mlp_settings import MLPSettings
from paddle_te.ops.te.norm import NormSettings, normed
from paddle_te.ops.te.quantized import (
    Float8Matrix,
    Operand,
    operand_pieces,
    quantized_together,
    quantized_weight,
    rowwise_pieces,
)
from paddle_te.ops.te.rank_rows import Product
from paddle_te.ops.te.recording import Op, OpInputs, Placeholder, Recorder
from paddle_te.ops.te.runtime import DTYPES, Matrix, dtype_code

FC1, FC2 = 3, 5  # the weights' places among an op's tensors


class _Fc1(NamedTuple):
    """The first GEMM's output, as the activation's backward reads it, and what its own backward reads."""

    out: Matrix | StoredInput
    saved: SavedColumn


def _fc1_forward(
    rt: Recorder, inputs: OpInputs, norm: NormSettings, w: Operand | None = None, copies: bool = False
) -> tuple[Matrix, SavedColumn]:
    """Return what an _Fc1 has. inputs: the MLP's OpInputs. w: a Gemm's. copies: `column_forward`'s."""
    x, ln_weight, ln_bias, *_ = inputs.tensors
    before = normed(rt, x, ln_weight, ln_bias, norm, dtype_code("x", x))
    return column_forward(rt, before, Gemm.of(inputs, 0, FC1, w), copies)


@dataclass(slots=True)
class _SavedMLP:
    """Hold what the MLP's backward reads.

    inputs, settings: the op's. w2: fc2's weight as its GEMM read it. fc1; act: the activation's output as fc2's
    GEMM read it. Either is None where backward computes it again.
    """

    inputs: OpInputs
    settings: MLPSettings
    w2: Matrix | Float8Matrix
    fc1: _Fc1 | None
    act: Matrix | Float8Matrix | None


def _check(inputs: OpInputs, settings: MLPSettings) -> None:
    x, _, _, fc1_weight, fc1_bias, fc2_weight, fc2_bias = inputs.tensors
    first, second = inputs.quantizers
    hidden_size, ffn = x.shape[-1], fc2_weight.shape[1]
    fc1_rows = FC1_WIDTHS[settings.activation] * ffn
    check_weight("fc1_weight", fc1_weight, [fc1_rows, hidden_size], x.dtype, first)
    check_weight("fc2_weight", fc2_weight, [hidden_size, ffn], x.dtype, second)
    check_bias("fc1_bias", fc1_bias, fc1_rows, x.dtype)
    check_bias("fc2_bias", fc2_bias, hidden_size, x.dtype)
    check_fp8(first, tokens=row_count(x), hidden_size=hidden_size, ffn_hidden_size=ffn)


def _forward(rt: Recorder, inputs: OpInputs, settings: MLPSettings) -> tuple[Any, _SavedMLP]:
    _check(inputs, settings)
    x, *_, fc1_weight, _, fc2_weight, _ = inputs.tensors
    train, code = inputs.train, dtype_code("x", x)
    w1, w2 = quantized_together(rt, (fc1_weight, fc2_weight), code, inputs.quantizers, train)
    residual, again = x if settings.add_residual else None, settings.recompute.part
    hidden, of_fc1 = _fc1_forward(rt, inputs, settings.norm, w1, settings.add_residual)
    store = StoredInput(rt, hidden, code) if settings.stores_input and train else None
    fc2, copy = Gemm.of(inputs, 1, FC2, w2), of_fc1.norm.copy
    act, read = _activated_and_weight(rt, hidden, fc2, code, settings, store)
    out = copy or rt.empty(x.shape, x.dtype)
    out = row_output(rt, act, read, out, code, fc2.tp, Addends(fc2.bias, residual, copied=copy is not None))
    if train:
        drop_data(rt, w1, read, *(() if again else (act,)))
    kept = None if again == "mlp" else _Fc1(store or hidden, of_fc1)
    saved = _SavedMLP(inputs, settings, read, kept, None if again else act)
    return out if settings.add_residual else (out, x), saved


def _backward(
    rt: Recorder, saved: _SavedMLP, dy: Placeholder, dresidual: Placeholder | None = None
) -> tuple[Wanted, ...]:
    """Compute the gradients. dresidual: where x was returned; else dy is its gradient."""
    x, *_, fc2_weight, fc2_bias = saved.inputs.tensors
    second, activation, code = saved.inputs.quantizers[1], saved.settings.activation, dtype_code("x", x)
    dfc2_bias = BiasGradient.wanted(rt, fc2_bias, fc2_weight, second is not None)
    grad, dact = _fc2_backward(rt, saved.inputs, dy, saved.w2, dfc2_bias)
    fc1 = saved.fc1 or _Fc1(*_fc1_forward(rt, saved.inputs, saved.settings.norm))
    act = saved.act or activated_again(rt, fc1.out, code, second, activation)
    dw2 = wgrad(rt, act, grad, fc2_weight, code, second is not None, dfc2_bias)
    dfc1_bias = fc1.saved.bias_gradient(rt)
    grad = activation_backward(rt, dact, fc1.out, activation, code, saved.inputs.quantizers[0], dfc1_bias)
    of_fc1 = fc1.saved.backward(rt, grad, dfc1_bias, dy if dresidual is None else dresidual)
    of_biases = [None if bias is None else bias.in_its_dtype(rt) for bias in (dfc1_bias, dfc2_bias)]
    return *of_fc1, of_biases[0], dw2, of_biases[1]


def _fc2_backward(
    rt: Recorder, inputs: OpInputs, dy: Placeholder, w2: Operand, dbias: BiasGradient | None
) -> tuple[Operand, Matrix]:
    """Return (dy for the backward GEMMs, the gradient of the activation's output). dbias: fc2's, to fill."""
    x, *_, weight, _ = inputs.tensors
    fc2, code, gather = Gemm.of(inputs, 1, FC2), dtype_code("x", x), gathers(inputs.tp)
    rows = row_count(dy) * (gather.size if gather else 1)
    dact = rt.new_matrix((rows, weight.shape[1]), x.dtype, code)
    product = Product(dgrad(rt, w2, fc2.quantizers is not None), dact)
    return grad_output_and_dgrad(rt, dy, fc2, code, dbias, product), dact


def _activated_and_weight(
    rt: Recorder, hidden: Matrix, fc2: Gemm, code: int, settings: MLPSettings, store: StoredInput | None
) -> tuple[Operand, Operand]:
    """Return the activation's output and fc2's weight as its forward GEMM reads them. store: `activated`'s."""
    weight, _, quantizers, _, train, w = fc2
    activation = settings.activation
    if quantizers is None:
        return activated(rt, hidden, code, None, activation, store=store), rt.matrix(weight, code)
    shape, weight_shape = (hidden.shape[0], weight.shape[1]), None if w else weight.shape
    keeps_input = not weight.stop_gradient and settings.recompute.part is None
    pieces = operand_pieces(rt, quantizers, shape, weight_shape, train, keeps_input)
    act = activated(rt, hidden, code, quantizers, activation, pieces.input, store)
    return act, w or quantized_weight(rt, weight, code, quantizers, pieces.weight)


def _chunks(inputs: OpInputs, settings: MLPSettings) -> list[tuple[int, int]]:
    """Return [(first row, rows)] of x; raise ValueError for what GEMMs cannot take."""
    rows = row_count(inputs.tensors[0])
    of_chunk = settings.chunk_rows or rows
    check_fp8(inputs.quantizers[0], tokens_of_a_chunk=of_chunk)
    return ranges(rows, of_chunk)


def _rows_of(inputs: OpInputs, rows: tuple[int, int], train: bool) -> OpInputs:
    """Return the OpInputs of a chunk. rows: its (first row, rows)."""
    x, *others = inputs.tensors
    return inputs._replace(tensors=(x.rows(*rows), *others), train=train)


def _weights(rt: Recorder, inputs: OpInputs, columnwise: bool) -> tuple[Operand, Operand]:
    """Return fc1's and fc2's as the GEMMs of all chunks read them."""
    code = dtype_code("x", inputs.tensors[0])
    first, second = inputs.quantizers
    w1 = weight_operand(rt, inputs.tensors[FC1], code, first, columnwise)
    return w1, weight_operand(rt, inputs.tensors[FC2], code, second, columnwise)


def _forward_in_chunks(
    rt: Recorder, inputs: OpInputs, settings: MLPSettings
) -> tuple[Any, tuple[OpInputs, MLPSettings]]:
    _check(inputs, settings)
    x = inputs.tensors[0]
    out, weights = rt.empty(x.shape, x.dtype), _weights(rt, inputs, columnwise=False)
    for rows in _chunks(inputs, settings):
        _forward_of_chunk(rt, _rows_of(inputs, rows, train=False), settings, *weights, out.rows(*rows))
    return out if settings.add_residual else (out, x), (inputs, settings)


def _forward_of_chunk(
    rt: Recorder, inputs: OpInputs, settings: MLPSettings, w1: Operand, w2: Operand, out: Placeholder
) -> None:
    """Write the rows `out` of the output."""
    x, *_, fc2_bias = inputs.tensors
    second, tp, code = inputs.quantizers[1], inputs.tp, dtype_code("x", x)
    hidden, _ = _fc1_forward(rt, inputs, settings.norm, w1)
    pieces = None if second is None else rowwise_pieces(rt, (hidden.shape[0], w2.shape[1]), second.input)
    act = activated(rt, hidden, code, second, settings.activation, pieces)
    # an all-reduce takes a tensor of its own
    summed = out if tp is None or tp.sequence_parallel else rt.empty(out.shape, x.dtype)
    summed = row_output(rt, act, w2, summed, code, tp, Addends(fc2_bias, x if settings.add_residual else None))
    if summed is not out:
        rt.te.memcpy_async(rt.matrix(out, code).native, rt.matrix(summed, code).native, rt.stream)


def _backward_in_chunks(
    rt: Recorder, saved: tuple[OpInputs, MLPSettings], dy: Placeholder, dresidual: Placeholder | None = None
) -> tuple[Wanted, ...]:
    """Compute the gradients. dresidual: as `_backward`'s."""
    inputs, settings = saved
    settings = settings._replace(norm=settings.norm._replace(recompute=False))  # of a chunk nothing waits for long
    chunks, dresidual = _chunks(inputs, settings), dy if dresidual is None else dresidual
    w1, w2 = _weights(rt, inputs, columnwise=True)
    drop_data(rt, w2)
    gradients = _Gradients(rt, inputs, len(chunks))
    for i, rows in enumerate(chunks):
        of_chunk, rows_of_dy = gradients.of_chunk(rt, i, rows), (dy.rows(*rows), dresidual.rows(*rows))
        _backward_of_chunk(rt, _rows_of(inputs, rows, train=True), settings, w1, w2, *rows_of_dy, of_chunk)
    return gradients.results(rt)


class _ChunkGradients(NamedTuple):
    """Hold the tensors that the backward of a chunk writes or adds to.

    norm: the rows of x's gradient, and memory for the chunk's part of the norm's weight's and bias's. fc1, fc2: what
    stands for the weights, with main_grad. fc1_bias, fc2_bias: BiasGradients of the chunk, or None.
    """

    norm: Any
    fc1: Placeholder
    fc2: Placeholder
    fc1_bias: BiasGradient | None
    fc2_bias: BiasGradient | None


def _backward_of_chunk(
    rt: Recorder,
    inputs: OpInputs,
    settings: MLPSettings,
    w1: Operand,
    w2: Operand,
    dy: Placeholder,
    dresidual: Placeholder,
    gradients: _ChunkGradients,
) -> None:
    x, activation, (first, second) = inputs.tensors[0], settings.activation, inputs.quantizers
    code, fp8 = dtype_code("x", x), second is not None
    grad, dact = _fc2_backward(rt, inputs, dy, w2, gradients.fc2_bias)
    hidden, of_fc1 = _fc1_forward(rt, inputs, settings.norm, w1)
    act = activated_again(rt, hidden, code, second, activation)
    wgrad(rt, act, grad, gradients.fc2, code, fp8, gradients.fc2_bias)
    grad = activation_backward(rt, dact, hidden, activation, code, first, gradients.fc1_bias)
    of_fc1.backward(rt, grad, gradients.fc1_bias, dresidual, gradients.fc1, gradients.norm)


class _Gradients:
    """The gradients of the tensors of an op's OpInputs; `chunks` is the number of pieces of x."""

    def __init__(self, rt: Recorder, inputs: OpInputs, chunks: int) -> None:
        x, ln_weight, ln_bias, fc1, fc1_bias, fc2, fc2_bias = self._tensors = inputs.tensors
        fp8 = inputs.quantizers[0] is not None
        self._dx = rt.empty(x.shape, x.dtype)
        self._fc1, self._fc2 = _AddedUp(rt, fc1), _AddedUp(rt, fc2)

        def of_bias(bias: Placeholder | None, weight: _AddedUp) -> _PartsOfVector | None:
            dtype = bias and BiasGradient.dtype(bias, weight.stand_in, fp8)
            return None if bias is None or bias.stop_gradient else _PartsOfVector(rt, bias, dtype, chunks)

        self._fc1_bias, self._fc2_bias = of_bias(fc1_bias, self._fc1), of_bias(fc2_bias, self._fc2)
        self._norm = [vector and _PartsOfVector(rt, vector, vector.dtype, chunks) for vector in (ln_weight, ln_bias)]

    def of_chunk(self, rt: Recorder, number: int, rows: tuple[int, int]) -> _ChunkGradients:
        """Return the _ChunkGradients; to be called in the chunks' order."""
        fc1_bias, fc2_bias = (
            None if parts is None else BiasGradient(rt, parts.vector, parts.part(number))
            for parts in (self._fc1_bias, self._fc2_bias)
        )
        norm = self._dx.rows(*rows), *[parts and parts.part(number) for parts in self._norm]
        return _ChunkGradients(norm, self._fc1.next_part(), self._fc2.next_part(), fc1_bias, fc2_bias)

    def results(self, rt: Recorder) -> tuple[Wanted, ...]:
        """Return the gradients of the tensors, None where there is none."""
        vectors = *self._norm, self._fc1_bias, self._fc2_bias
        dln_weight, dln_bias, dfc1_bias, dfc2_bias = (None if parts is None else parts.total(rt) for parts in vectors)
        found = self._dx, dln_weight, dln_bias, self._fc1.total(rt), dfc1_bias, self._fc2.total(rt), dfc2_bias
        pairs = zip(self._tensors, found, strict=True)
        return tuple(None if tensor is None or tensor.stop_gradient else gradient for tensor, gradient in pairs)


class _AddedUp:
    """Add up a weight's gradients of all chunks, in float32.

    The sum lies in the weight's main gradient. Where there is none in float32, it lies in memory of its own, and Paddle
    adds it to the weight's grad. stand_in: what `wgrad` is given: the weight with the sum as its main_grad, or a frozen
    weight itself.
    """

    def __init__(self, rt: Recorder, weight: Placeholder) -> None:
        self._weight, self.stand_in = weight, weight
        self._in_main_grad = weight.main_grad is not None and weight.main_grad.dtype is paddle.float32
        self._adds = self._in_main_grad and bool(weight.accumulate)
        if not weight.stop_gradient:
            self.stand_in = Placeholder(weight.index, weight.shape, weight.dtype, stop_gradient=False)
            total = weight.main_grad if self._in_main_grad else rt.empty(weight.shape, paddle.float32)
            self.stand_in.main_grad = total

    def next_part(self) -> Placeholder:
        """Return stand_in, which the first chunk writes and the others add to.

        Where the main gradient is to be added to, all of them add.
        """
        self.stand_in.accumulate, self._adds = self._adds, True
        return self.stand_in

    def total(self, rt: Recorder) -> Wanted:
        """Return the gradient; None for a frozen weight, and where it is in the main gradient."""
        weight = self._weight
        if weight.stop_gradient or self._in_main_grad or self.stand_in.main_grad is None:
            return None
        return cast(rt, self.stand_in.main_grad, weight.dtype)


class _PartsOfVector:
    """A vector's gradient as the sum of the chunks', which are kept in rows and added up in float32."""

    def __init__(self, rt: Recorder, vector: Placeholder, dtype: Any, chunks: int) -> None:
        self.vector, self._parts = vector, rt.empty([chunks, vector.shape[0]], dtype)

    def part(self, number: int) -> Placeholder:
        """Return memory for a chunk's."""
        return self._parts.rows(number, 1)

    def total(self, rt: Recorder) -> Placeholder:
        """Return the gradient in the vector's dtype."""
        parts = self._parts
        out = rt.empty(self.vector.shape, parts.dtype)
        rows, cols = parts.shape
        column_sums.column_sums(rt.te, rt.stream, parts.data_ptr(), out.data_ptr(), rows, cols, DTYPES[parts.dtype])
        return cast(rt, out, self.vector.dtype)


_AT_ONCE = Op(_forward, _backward, weights=(FC1, FC2))
_IN_CHUNKS = Op(_forward_in_chunks, _backward_in_chunks, weights=(FC1, FC2))


def layernorm_mlp(
    x: Tensor,
    norm: Norm | None,
    fc1: Projection,
    fc2: Projection,
    *,
    activation: str = "swiglu",
    add_residual: bool = True,
    recompute: MLPRecompute = NOTHING_AGAIN,
    tp: Ranks | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `ops.interface`."""
    adapted = fc1.low_rank or fc2.low_rank
    factors, low_ranks = factors_and_settings(fc1.low_rank, fc2.low_rank) if adapted else ((), ())
    rows = None if adapted else chunk_rows(x, recompute.chunk_tokens, tp)
    return autograd.apply(
        ADAPTED_MLP if adapted else _AT_ONCE if rows is None else _IN_CHUNKS,
        (x, *norm_tensors(norm), fc1.weight, fc1.bias, fc2.weight, fc2.bias, *factors),
        MLPSettings(NormSettings.of(norm), activation, add_residual, recompute, rows, *low_ranks),
        quantizers=(fc1.quantizers, fc2.quantizers),
        tp=tp,
        fuse_wgrad_accumulation=(fc1.fuse_wgrad_accumulation, fc2.fuse_wgrad_accumulation),
    )
