"""te's `linear` in fp8, weights [out, in] and [in, out], on the emulated library: against NumPy in float64, and pd."""

import itertools

import numpy as np
import paddle
import pytest

from paddle_te import fp8
from paddle_te.ops import get_ops
from paddle_te.ops.projection import Projection
from paddle_te.ops.te import packing, program
from tests import block_scaling, emulated_te
from tests.bfloat16 import truncated
from tests.poison import poison_allocations
from tests.unit.fp8.test_emulation import reference as quantized

TOKENS, IN, OUT = (2, 64), 128, 384  # the fewest that block scaling has, and more than one block
RECIPES = {
    "delayed": fp8.DelayedScaling(amax_history_len=2, first_step="delayed"),
    "delayed_from_current": fp8.DelayedScaling(amax_history_len=2, first_step="current"),
    "current": fp8.Float8CurrentScaling(),
    "current_e4m3": fp8.Float8CurrentScaling(fp8_format=fp8.Format.E4M3),
    "block": fp8.Float8BlockScaling(),
    "block_hybrid": fp8.Float8BlockScaling(fp8_format=fp8.Format.HYBRID, power_2_scale=False),
}
both_layouts = pytest.mark.parametrize("transpose_y", [True, False], ids=["out_in", "in_out"])


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)


class Head:
    """A GEMM with its scaling state."""

    def __init__(self, backend, recipe, transpose_y, **options):
        self.backend, self.recipe, self.transpose_y, self.options = backend, recipe, transpose_y, options
        self.scaling = fp8.ModuleScaling(1, get_ops(backend).amax_and_scale_update)

    def __call__(self, x, weight, training=True, is_first_microbatch=None):
        with fp8.fp8_autocast(self.recipe is not None, self.recipe):
            quantizers = self.scaling.begin_forward(training, is_first_microbatch)
        projection = Projection(weight, quantizers=quantizers and quantizers[0], **self.options)
        return get_ops(self.backend).linear(x, projection, transpose_y=self.transpose_y)


def draw(seed, transpose_y):
    """x, the weight and dy: float32 numbers that bfloat16 holds."""
    generator, shape = np.random.default_rng(seed), (OUT, IN) if transpose_y else (IN, OUT)
    shapes = [(*TOKENS, IN), shape, (*TOKENS, OUT)]
    numbers = [generator.standard_normal(s).astype("float32") for s in shapes]
    return [truncated(n) for n in numbers]


def tensors(arrays, dtype="bfloat16", frozen=(False, False, True)):
    made = [paddle.to_tensor(array).astype(dtype).detach() for array in arrays]
    for tensor, stop in zip(made, frozen, strict=True):
        tensor.stop_gradient = stop
    return made


def array(tensor):
    return None if tensor is None else tensor.astype("float32").numpy()


def reference(arrays, recipe, transpose_y):
    """y, dx, dW in float64 of rounded operands, the first step's; recipe None: of the operands as they are."""
    x, weight, dy = arrays
    if recipe is not None and recipe.kind == "block":
        rows = [values.reshape(-1, values.shape[-1]) for values in (x, weight if transpose_y else weight.T, dy)]
        y, dx, dw = block_scaling.gemms(*rows, recipe.power_2_scale, recipe.fp8_format.value.backward)
        return y.reshape(dy.shape), dx.reshape(x.shape), dw if transpose_y else dw.T
    if recipe is not None:
        # all scales are 1, or each tensor's own
        scale = np.float32(1) if getattr(recipe, "first_step", None) == "delayed" else None
        dtypes = recipe.fp8_format.value
        x, weight = (quantized(values, dtypes.forward, scale) for values in (x, weight))
        dy = quantized(dy, dtypes.backward, scale)
    weight = weight.T if transpose_y else weight
    dw = x.reshape(-1, x.shape[-1]).T.astype("float64") @ dy.reshape(-1, dy.shape[-1])
    return x.astype("float64") @ weight, dy.astype("float64") @ weight.T, dw.T if transpose_y else dw


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("margin", [0, 14, 18])
def test_a_margin_lowers_the_next_steps_scales(seed, margin):
    arrays = x, weight, dy = draw(seed, True)
    recipe = fp8.DelayedScaling(amax_history_len=2, margin=margin)
    scales = [np.float32(448 / 2**margin / np.abs(values).max()) for values in (x, weight)]
    x8, weight8 = (quantized(values, "e4m3", scale) for values, scale in zip((x, weight), scales, strict=True))
    for backend, dtype in (("transformer_engine", "bfloat16"), ("paddle", "float32")):
        x, weight, dy = tensors(arrays, dtype, (False, False, True))
        head = Head(backend, recipe, True)
        head(x, weight).backward(dy)
        close(array(head(x, weight)), x8.astype("float64") @ weight8.T)


@both_layouts
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_whatever_is_frozen(seed, recipe, transpose_y):
    recipe, arrays = RECIPES.get(recipe), draw(seed, transpose_y)
    want_y, *want = reference(arrays, recipe, transpose_y)
    for frozen in itertools.product([False, True], repeat=2):
        for backend, dtype in (("transformer_engine", "bfloat16"), ("paddle", "float32")):
            x, weight, dy = tensors(arrays, dtype, (*frozen, True))
            y = Head(backend, recipe, transpose_y)(x, weight)
            close(array(y), want_y)
            if not all(frozen):
                y.backward(dy)
            for tensor, gradient in zip((x, weight), want, strict=True):
                assert (tensor.grad is None) == tensor.stop_gradient, (backend, frozen)
                if tensor.grad is not None:
                    assert tensor.grad.shape == tensor.shape and tensor.grad.dtype == tensor.dtype
                    close(array(tensor.grad), gradient)


@both_layouts
@pytest.mark.parametrize("recipe", [None, "delayed", "current", "block"])
def test_later_steps_have_pds_scales(seed, recipe, transpose_y):
    """Three steps, each of other numbers; the scales of delayed scaling are those of the steps before."""
    recipe, states = RECIPES.get(recipe), []
    heads = Head("transformer_engine", recipe, transpose_y), Head("paddle", recipe, transpose_y)
    for step in range(3):
        arrays, results = [(2**step) * values for values in draw(seed + step, transpose_y)], []
        for head, dtype in zip(heads, ("bfloat16", "float32"), strict=True):
            x, weight, dy = tensors(arrays, dtype)
            y = head(x, weight)
            y.backward(dy)
            results.append([array(tensor) for tensor in (y, x.grad, weight.grad)])
        for got, want in zip(*results, strict=True):
            close(got, want)
    if recipe is not None and recipe.kind == "delayed":
        for head in heads:
            layer = paddle.nn.Layer()
            layer.fp8 = head.scaling
            states.append(fp8.state_dict(layer, recipe)["modules"][""])
        for direction in ("forward", "backward"):
            for number in ("amax_history", "scale"):
                np.testing.assert_array_equal(*[state[direction][number] for state in states])


@pytest.mark.parametrize("backend, dtype", [("transformer_engine", "bfloat16"), ("paddle", "float32")])
def test_the_first_step_has_current_scalings_bits_and_the_later_ones_transformer_engines(seed, backend, dtype):
    """In all micro-batches of the first step, evaluation before it included; later scales do not tell how it was."""
    recipes = RECIPES["delayed_from_current"], RECIPES["current"], RECIPES["delayed"]
    heads, order = [Head(backend, recipe, True) for recipe in recipes], np.random.default_rng(seed).permutation(3)

    def run(head, arrays, training, **options):
        x, weight, dy = tensors(arrays, dtype)
        y = head(x, weight, training, **options)
        if training:
            y.backward(dy)
        return [array(tensor) for tensor in (y, x.grad, weight.grad)]

    for step in range(3):
        _, weight, _ = draw(seed + step, True)
        for i in (None, 0, 1):
            x, _, dy = draw(seed + 10 * step + (i or 0), True)
            arrays = 2.0**step * x, weight, 1e-6 * dy
            options = dict(training=i is not None, is_first_microbatch=None if i is None else i == 0)
            results = {index: run(heads[index], arrays, **options) for index in order}
            fresh = step == 0 or (step == 1 and i is None)  # the update comes with the next step's first forward
            for got, want in zip(results[0], results[1 if fresh else 2], strict=True):
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("backend, dtype", [("transformer_engine", "bfloat16"), ("paddle", "float32")])
def test_small_numbers_survive_the_first_step(seed, backend, dtype):
    """With all scales 1 e5m2 has no numbers for such gradients, and e4m3 few for such weights."""
    x, weight, dy = draw(seed, True)
    arrays = x, 1e-3 * weight, 1e-7 * dy
    errors = {}
    for first_step in ("current", "delayed"):
        x, weight, dy = tensors(arrays, dtype)
        y = Head(backend, fp8.DelayedScaling(first_step=first_step), True)(x, weight)
        y.backward(dy)
        want = reference([array(tensor) for tensor in (x, weight, dy)], None, True)
        got = [array(tensor) for tensor in (y, x.grad, weight.grad)]
        errors[first_step] = [np.linalg.norm(g - w) / np.linalg.norm(w) for g, w in zip(got, want, strict=True)]
    # an e4m3 number is off by 1/16 of it at most, an e5m2 number by 1/8
    assert max(errors["current"]) < 0.2 and min(errors["delayed"]) > 0.5, errors


@both_layouts
@pytest.mark.parametrize("recipe", [None, "delayed", "current", "block"])
def test_without_gradients(seed, recipe, transpose_y):
    recipe, arrays = RECIPES.get(recipe), draw(seed, transpose_y)
    x, weight, _ = tensors(arrays)
    with paddle.no_grad():
        y = Head("transformer_engine", recipe, transpose_y)(x, weight, training=False)
    close(array(y), reference(arrays, recipe, transpose_y)[0])


@both_layouts
@pytest.mark.parametrize("where", [True, "grad"])
@pytest.mark.parametrize("recipe", [None, "delayed", "current", "block"])
def test_gradients_add_up(seed, recipe, where, transpose_y):
    """Of two micro-batches, [in, out] as the weight; the second one's weight is the kept one."""
    recipe, arrays = RECIPES.get(recipe), draw(seed, transpose_y)
    want = reference(arrays, recipe, transpose_y)[2]
    x, weight, dy = tensors(arrays)
    head = Head("transformer_engine", recipe, transpose_y, fuse_wgrad_accumulation=where)
    for first in (True, False):
        head(x, weight, is_first_microbatch=first).backward(dy)
    if where == "grad":
        return close(array(weight.grad), 2 * want)
    assert weight.grad is None and weight.main_grad.dtype == paddle.float32 and weight.main_grad.shape == weight.shape
    np.testing.assert_allclose(weight.main_grad.numpy(), 2 * want, rtol=1e-5, atol=1e-4)


@both_layouts
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_the_kept_weight_serves_later_micro_batches(seed, recipe, transpose_y):
    recipe, arrays = RECIPES[recipe], draw(seed, transpose_y)
    want_y, want_dx, _ = reference(arrays, recipe, transpose_y)
    x, weight, dy = tensors(arrays)
    head = Head("transformer_engine", recipe, transpose_y)
    for first in (True, False, False):
        x.clear_grad()
        y = head(x, weight, is_first_microbatch=first)
        y.backward(dy)
        close(array(y), want_y)
        close(array(x.grad), want_dx)
        weight.set_value(tensors([-arrays[1]], frozen=[True])[0])  # nobody looks at it any more
    y = array(head(x, weight, is_first_microbatch=True))  # delayed: under the scales of another step
    assert np.linalg.norm(y + want_y) < 0.1 * np.linalg.norm(want_y)


@both_layouts
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_forward_keeps_one_copy_of_each_operand(seed, monkeypatch, recipe, frozen, transpose_y):
    monkeypatch.setattr(packing, "JOINED", 0)  # memory as it is for large sizes
    program.clear()
    kept, forward = [], program.Program.forward

    def watched(self, *arguments):
        outputs, memories = forward(self, *arguments)
        kept.extend({memory.data_ptr(): memory.numel().item() for memory in memories}.values())
        return outputs, memories

    monkeypatch.setattr(program.Program, "forward", watched)
    x, weight, dy = tensors(draw(seed, transpose_y), frozen=(False, frozen, True))
    Head("transformer_engine", RECIPES[recipe], transpose_y)(x, weight).backward(dy)
    program.clear()
    # block: a scale for each 128 numbers of x, and 1 x 3 or 3 x 1 scales of the weight, in rows of 4
    of_x, of_weight = {"delayed": (0, 0), "current": (256, 256), "block": (4 * x.size // 128, 256)}[recipe]
    # one copy of the weight, and x's transpose, which a frozen weight does not need: in bytes, and in one allocation
    assert sum(kept) == weight.size + of_weight + (0 if frozen else x.size + of_x), kept


def test_a_weight_of_the_other_layout_is_refused():
    x, projection = paddle.ones([16, 32], "bfloat16"), Projection(paddle.ones([48, 32], "bfloat16"))
    linear = get_ops("transformer_engine").linear
    assert linear(x, projection).shape == [16, 48]
    with pytest.raises(ValueError, match=r"weight is \[48, 32\]; it must be \[32, 32\]"):
        linear(x, projection, transpose_y=False)


def test_sizes_that_fp8_cannot_have_are_named():
    x, weight = paddle.ones([16, 32], "bfloat16"), paddle.ones([32, 40], "bfloat16")
    with pytest.raises(ValueError, match="out_features 40"):
        Head("transformer_engine", RECIPES["current"], False)(x, weight)
