"""What `emulated_te` computes of mixtures of experts: grouped GEMMs, the router, and the kernels of experts.cu."""

import numpy as np

from paddle_te.native import DType, ScalingMode
from paddle_te.native.experts import shares_of_row
from tests.emulated_te import ELEMENTS, GREATEST, Blocks, Form, _gelu, at


def _begins(tensor, experts, counts, offsets):
    """Where the experts' rows begin."""
    if not offsets:
        return np.arange(experts + 1) * (np.prod(tensor.shape[:-1]) // experts)
    begins = np.concatenate([[0], np.cumsum(at(counts, (experts,), np.int64))])
    assert (at(offsets, (experts + 1,), np.int64) == begins * tensor.shape[-1]).all()
    assert begins[-1] <= np.prod(tensor.shape[:-1])
    return begins


def _parts(tensor, begins):
    """An operand's matrix of each expert, as they lie."""
    flat = tensor.array.reshape(-1, tensor.shape[-1])
    return [flat[begin:end] for begin, end in zip(begins, begins[1:], strict=False)]


def _operands(tensor, begins, transposed, scale_inv):
    """The experts' matrices in float32, [k last] if not transposed, from the copy that Hopper's GEMM reads."""
    if not tensor.is_fp8:
        parts = [part.astype(np.float32) for part in _parts(tensor, begins)]
        return [part.T for part in parts] if transposed else parts
    if tensor.in_blocks:
        return [blocks.dequantize(part.astype(np.float32)) for part, blocks in _in_blocks(tensor, begins, transposed)]
    scale_inv = at(scale_inv, (len(begins) - 1,), np.float32)
    assert not (begins % 16).any()
    parts = _transposed_parts(tensor, begins) if transposed else _parts(tensor, begins)
    return [part.astype(np.float32) * scale for part, scale in zip(parts, scale_inv, strict=True)]


def _transposed_parts(tensor, begins):
    flat, cols = tensor.transposed.reshape(-1), tensor.shape[-1]
    return [flat[b * cols : e * cols].reshape(cols, e - b) for b, e in zip(begins, begins[1:], strict=False)]


def _in_blocks(tensor, begins, transposed):
    """[(an expert's matrix, its Blocks)]: of the data, or of the transposed copies."""
    assert not (begins % 128).any()
    parts = _transposed_parts(tensor, begins) if transposed else _parts(tensor, begins)
    *_, rowwise, columnwise = tensor.pointers
    scales, found = columnwise if transposed else rowwise, []
    for part in parts:
        rows, cols = part.shape
        found.append((part, Blocks(scales, part.shape, tensor.scaling_mode)))
        two = tensor.scaling_mode == ScalingMode.BLOCK_SCALING_2D
        scales += 4 * (rows // 128 * (-(-cols // 512) * 4) if two else cols // 128 * -(-rows // 4) * 4)
    return found


def quantize_grouped_blocks(input, output, experts, counts, offsets, force_pow_2_scales, amax_epsilon, stream):
    limit, begins = GREATEST[output.dtype], _begins(output, experts, counts, offsets)
    for transposed in [False] * bool(output.data_ptr) + [True] * bool(output.columnwise):
        for source, (part, blocks) in zip(_parts(input, begins), _in_blocks(output, begins, transposed), strict=True):
            values = np.ascontiguousarray(source.astype(np.float32).T if transposed else source.astype(np.float32))
            if values.size:
                scaled = blocks.quantize(values, limit, force_pow_2_scales, amax_epsilon)
                part[...] = np.clip(scaled, -limit, limit).astype(part.dtype)


def grouped_gemm(
    A, B, D, transa, transb, experts, counts, offsets_a, offsets_b, offsets_d, factors, stream,
    accumulate=False, split_accumulator=False, scale_inv_a=0, scale_inv_b=0, C=None,
):  # fmt: skip
    """Of experts without rows a weight's gradient is not written."""
    alpha, beta = at(factors, (8,), np.float32)[[0, 4]]
    assert (beta != 0) == (accumulate or C is not None)
    if A.in_blocks or B.in_blocks:
        assert split_accumulator and {A.scaling_mode, B.scaling_mode} != {ScalingMode.BLOCK_SCALING_2D}
    a = _operands(A, _begins(A, experts, counts, transb and offsets_a), not transa, scale_inv_a)
    b = _operands(B, _begins(B, experts, counts, offsets_b), transb, scale_inv_b)
    begins = _begins(D, experts, counts, not transb and offsets_d)
    d, c = _parts(D, begins), _parts(C or D, begins)
    for left, right, out, added in zip(b, a, d, c, strict=True):
        if transb and not left.shape[1]:
            continue
        out[...] = (alpha * (left @ right.T) + (beta * added.astype(np.float32) if beta else 0)).astype(out.dtype)


def _swiglu(hidden):
    """(silu of the gate, its derivative, up), float32."""
    gate, up = np.split(hidden.read(), 2, -1)
    with np.errstate(over="ignore", invalid="ignore"):
        sigmoid = 1 / (1 + np.exp(-gate))
        return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid)), up


def scaled_swiglu(input, scales, output, stream):
    silu, _, up = _swiglu(input)
    output.write(silu * up * scales.array[:, None])


def scaled_dswiglu(grad, input, scales, output, dscales, stream):
    silu, derivative, up = _swiglu(input)
    dact = grad.read()
    dscales.array[...] = (dact * silu * up).sum(-1)
    dact = dact * scales.array[:, None]
    output.write(np.concatenate([dact * up * derivative, dact * silu], -1))


def _clamped_swiglu(hidden, limit, alpha, offset):
    """(the activation, its derivatives with respect to gate and up), float32."""
    gate, up = np.split(hidden.read(), 2, -1)
    g, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
    sigmoid = 1 / (1 + np.exp(-alpha * g))
    derivative = sigmoid * (1 + alpha * g * (1 - sigmoid)) * (u + offset) * (gate <= limit)
    return g * sigmoid * (u + offset), derivative, g * sigmoid * (np.abs(up) <= limit)


def scaled_clamped_swiglu(input, scales, output, limit, alpha, offset, stream):
    output.write(_clamped_swiglu(input, limit, alpha, offset)[0] * scales.array[:, None])


def scaled_clamped_dswiglu(grad, input, scales, output, dscales, limit, alpha, offset, stream):
    act, of_gate, of_up = _clamped_swiglu(input, limit, alpha, offset)
    dact = grad.read()
    dscales.array[...] = (dact * act).sum(-1)
    dact = dact * scales.array[:, None]
    output.write(np.concatenate([dact * of_gate, dact * of_up], -1))


def _softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def _chosen(choice, topk, num_groups, group_topk):
    if num_groups > 0:
        grouped = choice.reshape(len(choice), num_groups, -1)
        of_groups = np.sort(grouped, -1)[..., -(topk // group_topk) :].sum(-1)
        best = np.zeros(of_groups.shape, bool)
        np.put_along_axis(best, np.argsort(of_groups, -1)[:, -group_topk:], True, -1)
        choice = np.where(np.repeat(best, grouped.shape[-1], 1), choice, -np.inf)
    chosen = np.zeros(choice.shape, bool)
    np.put_along_axis(chosen, np.argsort(choice, -1)[:, -topk:], True, -1)
    return chosen


def topk_forward(
    logits, expert_bias, probs, routing_map, scores, topk, pre_softmax, num_groups, group_topk, scaling_factor, sigmoid,
    stream,
):  # fmt: skip
    """scores: what the backward needs, as this module's backward has it."""
    x = logits.array
    found = 1 / (1 + np.exp(-x)) if sigmoid else _softmax(x) if pre_softmax else x
    choice = found + expert_bias.array if expert_bias is not None else found
    chosen = _chosen(choice, topk, num_groups, group_topk)
    if not sigmoid and not pre_softmax:
        found = _softmax(np.where(chosen, x, -np.inf))
    scores.array[...], routing_map.array[...] = found, chosen
    kept = np.where(chosen, found, 0)
    total = kept.sum(-1, keepdims=True) + np.float32(1e-20) if sigmoid and topk > 1 else 1
    probs.array[...] = kept / total * scaling_factor


def topk_backward(routing_map, scores, dprobs, dlogits, topk, pre_softmax, scaling_factor, sigmoid, stream):
    chosen, found = routing_map.array != 0, scores.array
    grad = np.where(chosen, dprobs.array, 0) * scaling_factor
    if sigmoid:
        if topk > 1:
            kept = np.where(chosen, found, 0)
            total = kept.sum(-1, keepdims=True) + np.float32(1e-20)
            grad = np.where(chosen, (grad - (grad * kept).sum(-1, keepdims=True) / total) / total, 0)
        dlogits.array[...] = grad * found * (1 - found)
    else:
        dlogits.array[...] = found * (grad - (grad * found).sum(-1, keepdims=True))


KERNELS = (
    grouped_gemm,
    quantize_grouped_blocks,
    scaled_swiglu,
    scaled_dswiglu,
    scaled_clamped_swiglu,
    scaled_clamped_dswiglu,
    topk_forward,
    topk_backward,
)


def experts_count(grid, routing_map, counts, tokens, experts, multiple):
    rows = (at(routing_map, (tokens, experts), np.uint8) != 0).sum(0)
    at(counts, (experts,), np.int64)[...] = -(-rows // multiple) * multiple


def experts_place(grid, routing_map, probs, counts, offsets, place, token_of, prob_of, tokens, experts, rows, *columns):
    chosen, probs = at(routing_map, (tokens, experts), np.uint8), at(probs, (tokens, experts), np.float32)
    begins = np.concatenate([[0], np.cumsum(at(counts, (experts,), np.int64))])
    at(offsets, (len(columns), experts + 1), np.int64)[...] = begins * np.array(columns)[:, None]
    place, token_of, prob_of = (
        at(place, (tokens, experts), np.int32), at(token_of, (rows,), np.int32), at(prob_of, (rows,), np.float32)
    )  # fmt: skip
    assert begins[-1] <= rows
    token_of[...], prob_of[...] = tokens, 0
    for expert in range(experts):
        mine = np.flatnonzero(chosen[:, expert])
        here = begins[expert] + np.arange(len(mine))
        place[mine, expert], token_of[here], prob_of[here] = here, mine, probs[mine, expert]


def experts_offsets(grid, counts, first, second, experts, *columns):
    begins = np.concatenate([[0], np.cumsum(at(counts, (experts,), np.int64))])
    for address, width in zip((first, second), columns, strict=True):
        at(address, (experts + 1,), np.int64)[...] = begins * width


def experts_gather(dtype, rows, x, token_of, y, tokens, columns):
    token_of, zeros = at(token_of, (rows,), np.int32), np.zeros((1, columns), dtype)
    at(y, (rows, columns), dtype)[...] = np.concatenate([at(x, (tokens, columns), dtype), zeros])[token_of]


def experts_combine(dtype, tokens, rows, routing_map, place, residual, out, experts, columns):
    chosen, place = at(routing_map, (tokens, experts), np.uint8) != 0, at(place, (tokens, experts), np.int32)
    out, residual = at(out, (tokens, columns), dtype), residual and at(residual, (tokens, columns), dtype)
    for token in range(tokens):
        of_token = place[token][chosen[token]]
        total = residual[token].astype(np.float32) if np.ndim(residual) else np.zeros(columns, np.float32)
        for row in of_token:
            total += at(rows + int(row) * columns * out.itemsize, (columns,), dtype).astype(np.float32)
        out[token] = total.astype(dtype)


def experts_probs(grid, of_rows, routing_map, place, dprobs, numbers):
    chosen, place = at(routing_map, (numbers,), np.uint8) != 0, at(place, (numbers,), np.int32)
    dprobs = at(dprobs, (numbers,), np.float32)
    dprobs[...] = 0
    for i in np.flatnonzero(chosen):
        dprobs[i] = at(of_rows + 4 * int(place[i]), (1,), np.float32)[0]


def experts_zero_empty(grid, gradients, counts, blocks, size):
    for expert, rows in enumerate(at(counts, (grid // blocks,), np.int64)):
        if not rows:
            at(gradients + expert * size, (size,), np.uint8)[...] = 0


def _expert_of_rows(begins, experts, columns):
    """[used rows]: of each its expert."""
    begins = at(begins, (experts + 1,), np.int64) // columns
    return np.repeat(np.arange(experts), np.diff(begins))


def _rows(dtype, x, token_of, tokens, used, columns):
    """Rows in float32, zeros for padding."""
    if not token_of:
        return at(x, (used, columns), dtype).astype(np.float32)
    values = np.concatenate([at(x, (tokens, columns), dtype), np.zeros((1, columns), dtype)])
    return values[at(token_of, (used,), np.int32)].astype(np.float32)


def experts_add_bias(dtype, rows, y, begins, bias, prob_of, experts, columns):
    expert_of = _expert_of_rows(begins, experts, columns)
    assert len(expert_of) <= rows
    y, bias = at(y, (len(expert_of), columns), dtype), at(bias, (experts, columns), dtype).astype(np.float32)
    probs = at(prob_of, (len(y),), np.float32)[:, None] if prob_of else 1
    y[...] = (y.astype(np.float32) + probs * bias[expert_of]).astype(dtype)


def experts_sum_rows(dtype, grid, x, token_of, begins, prob_of, sums, tokens, columns):
    experts = grid // -(-columns // (16 // np.dtype(dtype).itemsize) // 32)
    expert_of = _expert_of_rows(begins, experts, columns)
    values = _rows(dtype, x, token_of, tokens, len(expert_of), columns)
    if prob_of:
        values = values * at(prob_of, (len(values),), np.float32)[:, None]
    sums = at(sums, (experts, columns), dtype)
    for expert in range(experts):
        sums[expert] = values[expert_of == expert].sum(0, dtype=np.float32).astype(dtype)


def experts_add_bias_products(dtype, rows, x, token_of, begins, bias, of_rows, tokens, experts, columns):
    expert_of = _expert_of_rows(begins, experts, columns)
    values = _rows(dtype, x, token_of, tokens, len(expert_of), columns)
    bias = at(bias, (experts, columns), dtype).astype(np.float32)
    at(of_rows, (len(values),), np.float32)[...] += (values * bias[expert_of]).sum(1)


def experts_scaled_gelu(dtype, rows, x, prob_of, y, columns):
    probs = at(prob_of, (rows,), np.float32)[:, None]
    gelu, _ = _gelu(at(x, (rows, columns), dtype).astype(np.float32))
    at(y, (rows, columns), dtype)[...] = np.where(probs, probs * gelu, 0).astype(dtype)


def experts_scaled_dgelu(dtype, rows, dy, x, prob_of, dx, dprob, columns):
    probs, dy = at(prob_of, (rows,), np.float32)[:, None], at(dy, (rows, columns), dtype).astype(np.float32)
    gelu, derivative = _gelu(at(x, (rows, columns), dtype).astype(np.float32))
    at(dprob, (rows,), np.float32)[...] = (dy * gelu).sum(-1)
    at(dx, (rows, columns), dtype)[...] = np.where(probs, probs * dy * derivative, 0).astype(dtype)


def experts_cast_transpose(form, x, token_of, begins, data, transposed, scale, amax, scale_inv, *others):
    """kernels/experts_cast.cu: each expert's matrix as one of cast_tile.cuh's."""
    *statistics, tokens, experts, rows, columns = others
    begins = at(begins, (experts + 1,), np.int64) // columns if begins else np.arange(experts + 1) * (rows // experts)
    used, size = begins[-1], np.dtype(form.dtype).itemsize
    values = at(x, (tokens, columns), form.dtype).astype(np.float32) if token_of else at(x, (used, columns), form.dtype)
    if token_of:
        values = np.concatenate([values, np.zeros((1, columns), np.float32)])[at(token_of, (rows,), np.int32)]
    assert size == 2 and not (begins % 16).any()
    unused = np.zeros(1, np.float32)
    for begin, end in zip(begins, begins[1:], strict=False):
        if end > begin:
            places = [place and place + int(begin) * columns for place in (data, transposed)]
            form.write(values[begin:end].astype(np.float32), *places, scale, amax, unused.ctypes.data, *statistics)
    at(scale_inv, (experts,), np.float32)[...] = 1 / at(scale, (1,), np.float32) if scale else 1


def _activated(form, values, begins, experts, data, transposed, scale, amax, scale_inv, *statistics):
    """Casts numbers of rows to each expert's matrix; padding behind them stays."""
    unused, columns = np.zeros(1, np.float32), values.shape[1]
    for begin, end in zip(begins, begins[1:], strict=False):
        if end > begin:
            places = [place and place + int(begin) * columns for place in (data, transposed)]
            form.write(values[begin:end], *places, scale, amax, unused.ctypes.data, *statistics)
    at(scale_inv, (experts,), np.float32)[...] = 1 / at(scale, (1,), np.float32) if scale else 1


def experts_swiglu(form, dy, z, prob_of, begins, *arguments):
    """kernels/experts_swiglu.cu, without and with GRADIENT."""
    *target, shares, experts, rows, columns = arguments
    begins = at(begins, (experts + 1,), np.int64) // columns
    used = begins[-1]
    z, prob = at(z, (used, 2 * columns), form.dtype).astype(np.float32), at(prob_of, (rows,), np.float32)[:used, None]
    gate, up = np.split(z, 2, 1)
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-gate))
    silu = gate * sigmoid
    if not dy:
        return _activated(form, silu * up * prob, begins, experts, *target)
    dy = at(dy, (used, columns), form.dtype).astype(np.float32)
    if shares:
        each = shares_of_row(columns, {2: DType.BFLOAT16, 4: DType.FLOAT32}[np.dtype(form.dtype).itemsize])
        of_tiles = (dy * silu * up).reshape(used, each, columns // each).sum(-1)
        at(shares, (rows, each), np.float32)[:used] = of_tiles
    gradient = np.concatenate([dy * prob * up * (sigmoid * (1 + gate * (1 - sigmoid))), dy * prob * silu], 1)
    return _activated(form, gradient, begins, experts, *target)


experts_dswiglu = experts_swiglu


def experts_row_sums(grid, numbers, sums, rows, columns):
    at(sums, (rows,), np.float32)[...] = at(numbers, (rows, columns), np.float32).sum(1)


def launch(kernel, grid, *arguments):
    """A kernel of experts.cu, experts_cast.cu or experts_swiglu.cu, by its name."""
    name, *defines = kernel.split()
    if name in ("experts_cast_transpose", "experts_swiglu", "experts_dswiglu"):
        return globals()[name](Form(*defines[:3]), *arguments)
    name, _, dtype = kernel.rpartition("_")
    if dtype in ELEMENTS:
        return globals()[name](ELEMENTS[dtype], grid, *arguments)
    return globals()[kernel](grid, *arguments)
