"""Delayed scaling against a direct simulation of Transformer Engine's rule, in NumPy, number by number."""

import ctypes
import pickle
import warnings
from copy import deepcopy
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute

from paddle_te import distributed, fp8
from paddle_te.fp8 import DelayedScaling, Float8CurrentScaling, Format, ModuleScaling, fp8_autocast, microbatch
from paddle_te.fp8 import state as fp8_state
from paddle_te.fp8.emulation import emulated_fp8_linear
from paddle_te.layers import TransformerLayer

ROOT = Path(__file__).parents[3]
FLOAT32_MAX = np.finfo(np.float32).max


def simulate_update(history, scale, fp8_max, margin, algo):
    """One tensor's amax history (a list, row 0 first) and scale after TE's kernel: written from its loops."""
    length, last, amax = len(history), history[0], np.float32(0)
    rolled = []
    for i in range(length):
        a = history[i + 1] if i < length - 1 else last
        if a > amax:  # as fmaxf: false for NaN
            amax = a
        rolled.append(a if i > 0 else np.float32(0))
    if algo == "most_recent":
        amax = last
    if np.isfinite(amax) and amax > 0:
        with np.errstate(over="ignore"):
            scale = np.float32(fp8_max * 2.0**-margin) / amax
    return rolled, min(scale, FLOAT32_MAX)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 3, 16])
@pytest.mark.parametrize("margin", [0, 3])
def test_update_is_transformer_engines(algo, length, margin, seed):
    rng = np.random.default_rng(seed)
    n, fp8_max = 60, 57344.0
    history = np.exp(rng.uniform(-85, 85, [length, n])).astype(np.float32)
    special = np.float32([0, np.inf, np.nan, 1e-38, 1e-45, FLOAT32_MAX])
    mask = rng.random([length, n]) < 0.3
    history[mask] = rng.choice(special, mask.sum())
    history[:, 0] = 0
    scale = np.exp(rng.uniform(-5, 5, n)).astype(np.float32)
    scale[:3] = np.inf, FLOAT32_MAX, 1
    got = fp8.amax_and_scale_update(paddle.to_tensor(history), paddle.to_tensor(scale), fp8_max, margin, algo)
    expected = [simulate_update(list(history[:, i]), scale[i], fp8_max, margin, algo) for i in range(n)]
    np.testing.assert_array_equal(got[0].numpy(), np.float32([h for h, _ in expected]).T)
    np.testing.assert_array_equal(got[1].numpy(), np.float32([s for _, s in expected]))


class Toy(paddle.nn.Layer):
    """Linear layers side by side, so that a test knows every tensor that is quantized."""

    def __init__(self, gemms=2):
        super().__init__()
        self.fp8 = ModuleScaling(gemms, fp8.amax_and_scale_update)
        self.weights = paddle.nn.ParameterList([self.create_parameter([8, 16]) for _ in range(gemms)])

    def forward(self, xs, is_first_microbatch=None):
        quantizers = self.fp8.begin_forward(self.training, is_first_microbatch)
        return [emulated_fp8_linear(*args) for args in zip(xs, self.weights, quantizers, strict=True)]


class Simulation:
    """What TE's rule makes of a Toy's tensors: float32 NumPy, one history a tensor."""

    def __init__(self, layer, recipe):
        self.layer, self.recipe = layer, recipe
        dtypes = recipe.fp8_format.value
        maxima = {"e4m3": 448.0, "e5m2": 57344.0}
        self.fp8_max = {
            name: maxima[dtypes.backward if name == "grad_output" else dtypes.forward]
            for name in ("input", "weight", "grad_output")
        }
        self.slots = {
            (i, name): ([np.float32(0)] * recipe.amax_history_len, np.float32(1))
            for i in range(layer.fp8.num_gemms)
            for name in self.fp8_max
        }

    def see(self, gemm, name, x):
        history, _ = self.slots[gemm, name]
        history[0] = max(history[0], np.abs(x).max())

    def step(self):
        for (gemm, name), (history, scale) in self.slots.items():
            self.slots[gemm, name] = simulate_update(
                history, scale, self.fp8_max[name], self.recipe.margin, self.recipe.amax_compute_algo
            )

    def check(self):
        saved = fp8.state_dict(self.layer, self.recipe)["modules"][""]
        for gemm in range(self.layer.fp8.num_gemms):
            for name, direction, i in (
                ("input", "forward", 2 * gemm),
                ("weight", "forward", 2 * gemm + 1),
                ("grad_output", "backward", gemm),
            ):
                history, scale = self.slots[gemm, name]
                np.testing.assert_array_equal(saved[direction]["amax_history"][:, i], np.float32(history))
                assert saved[direction]["scale"][i] == scale, (gemm, name)


class Run:
    """Runs a Toy and its Simulation side by side; the test says where steps begin."""

    def __init__(self, recipe, with_recompute=False, gemms=2):
        self.layer, self.with_recompute = Toy(gemms), with_recompute
        self.simulation = Simulation(self.layer, recipe)
        self.recipe = recipe

    def new_step(self):
        """To the simulation only: the layer must find out by itself."""
        for parameter in self.layer.parameters():
            parameter.set_value(parameter.numpy() * np.float32(1.1))  # an optimizer's step
        self.simulation.step()

    def forward(self, is_first=None, record=True):
        xs = [paddle.randn([4, 16]) * float(np.exp(np.random.uniform(-3, 3))) for _ in self.layer.weights]
        for x in xs:
            x.stop_gradient = self.layer.weights[0].stop_gradient
        if record:
            for i, (x, weight) in enumerate(zip(xs, self.layer.weights, strict=True)):
                self.simulation.see(i, "input", x.numpy())
                self.simulation.see(i, "weight", weight.numpy())

        def run(*xs):
            with fp8_autocast(fp8_recipe=self.recipe):
                return self.layer(xs, is_first)

        return recompute(run, *xs) if self.with_recompute else run(*xs)

    def backward(self, ys):
        dys = [paddle.randn(y.shape) * float(np.exp(np.random.uniform(-9, 1))) for y in ys]
        for i, dy in enumerate(dys):
            self.simulation.see(i, "grad_output", dy.numpy())
        paddle.autograd.backward(ys, dys)


recipes = pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(amax_history_len=5),
        DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent", margin=1, fp8_format=Format.E4M3),
        DelayedScaling(amax_history_len=1),
    ],
    ids=["max", "most_recent", "length1"],
)
recomputes = pytest.mark.parametrize("with_recompute", [False, True], ids=["plain", "recompute"])


@recipes
@recomputes
def test_steps_with_evaluation_between(recipe, with_recompute, seed):
    run = Run(recipe, with_recompute)
    for step in range(12):
        if step:
            run.new_step()
        run.backward(run.forward())
        run.simulation.check()
        if step % 3 == 0:
            run.layer.eval()
            with paddle.no_grad():
                run.forward(record=False)
                run.forward(record=False)
            run.layer.train()
            run.simulation.check()


@recipes
@recomputes
def test_gradient_accumulation(recipe, with_recompute, seed):
    run = Run(recipe, with_recompute)
    for step in range(6):
        if step:
            run.new_step()
        for i in range(3):
            with microbatch(is_first=i == 0):
                run.backward(run.forward())
            run.simulation.check()


def test_gradient_accumulation_that_nobody_tells_of(seed):
    """Then each micro-batch is a step, as in TE."""
    run = Run(DelayedScaling(amax_history_len=5))
    for i in range(7):
        if i:
            run.new_step()
        run.backward(run.forward())
        run.simulation.check()


@recipes
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_first_layer_without_a_backward(recipe, micro_batches, seed):
    """It is frozen, and no gradient passes through it. A step begins with its forward all the same."""
    first, second = runs = [Run(recipe), Run(recipe)]
    fp8.bind_model(paddle.nn.LayerList([run.layer for run in runs]))
    for weight in first.layer.weights:
        weight.stop_gradient = True
    for step in range(4):
        for run in runs if step else ():
            run.new_step()
        for i in range(micro_batches):
            with microbatch(is_first=i == 0 if micro_batches > 1 else None):
                first.forward()
                second.backward(second.forward())
            for run in runs:
                run.simulation.check()


@recipes
@pytest.mark.parametrize("with_recompute, told", [(False, False), (False, True), (True, True)])
def test_pipeline_1f1b(recipe, with_recompute, told, seed):
    """Two passes in flight in the steady state. Only with recompute somebody must say where a step begins."""
    run = Run(recipe, with_recompute)
    first = (lambda i: i == 0) if told else (lambda i: None)
    for step in range(5):
        if step:
            run.new_step()
        in_flight = [run.forward(first(0)), run.forward(first(1))]
        for i in range(2, 5):
            run.backward(in_flight.pop(0))
            in_flight.append(run.forward(first(i)))
        for ys in in_flight:
            run.backward(ys)
        run.simulation.check()


def test_recompute_changes_neither_results_nor_scales(seed):
    recipe = DelayedScaling(amax_history_len=4)
    plain, recomputed = Run(recipe), Run(recipe, with_recompute=True)
    recomputed.layer.set_state_dict(plain.layer.state_dict())
    for step in range(6):
        results = []
        for run in (plain, recomputed):
            np.random.seed(seed + step)
            paddle.seed(seed + step)
            ys = run.forward()
            run.backward(ys)
            results.append([y.numpy() for y in ys] + [p.grad.numpy() for p in run.layer.parameters()])
        for a, b in zip(*results, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("is_first", [None, True])
def test_layers_recomputed_one_by_one(is_first, seed):
    """The second forward of a layer comes after the backward of the next one."""
    recipe = DelayedScaling(amax_history_len=3)
    outcomes = []
    for with_recompute in (False, True):
        paddle.seed(seed)
        layers = paddle.nn.LayerList([Toy(2) for _ in range(3)])
        up = paddle.randn([8, 16])
        outcome = []
        for step in range(4):
            with fp8_autocast(fp8_recipe=recipe), microbatch(is_first):
                x = paddle.randn([4, 16]) * (step + 1.0)
                x.stop_gradient = False
                for layer in layers:
                    run = lambda x, layer=layer, up=up: paddle.matmul(sum(layer([x, 3.0 * x])), up)  # noqa: E731
                    x = recompute(run, x) if with_recompute else run(x)
                x.square().mean().backward()
            outcome += [x.numpy()] + [p.grad.numpy() for p in layers.parameters()]
            layers.clear_gradients()
        state = fp8.state_dict(layers, recipe)["modules"]
        outcome += [v for module in state.values() for d in ("forward", "backward") for v in module[d].values()]
        outcomes.append(outcome)
    for a, b in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_layer_recomputed_twice_a_step(seed):
    """Its first use is computed again when its second has had its backward: no step begins in there."""
    recipe = DelayedScaling(amax_history_len=3)
    outcomes = []
    for with_recompute in (False, True):
        paddle.seed(seed)
        layer, up = Toy(1), paddle.randn([8, 16])
        run = lambda x, layer=layer, up=up: paddle.matmul(layer([x])[0], up)  # noqa: E731
        outcome = []
        for step in range(4):
            with fp8_autocast(fp8_recipe=recipe):
                x = paddle.randn([4, 16]) * (step + 1.0)
                x.stop_gradient = False
                y = distributed.recompute(run, x) if with_recompute else run(x)
                y = distributed.recompute(run, y) if with_recompute else run(y)
                y.square().mean().backward()
            outcome += [y.numpy(), x.grad.numpy()] + [p.grad.numpy() for p in layer.parameters()]
            layer.clear_gradients()
        module = fp8.state_dict(layer, recipe)["modules"][""]
        outcomes.append(outcome + [v for d in ("forward", "backward") for v in module[d].values()])
    for a, b in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(a, b)


def test_forward_that_is_dropped_does_not_hold_up_the_next_step(seed):
    run = Run(DelayedScaling(amax_history_len=4))
    run.backward(run.forward())
    run.new_step()
    run.forward()  # no backward, result dropped
    run.backward(run.forward())  # no new step: nothing was learned since
    run.simulation.check()
    run.new_step()
    run.backward(run.forward())
    run.simulation.check()


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("evaluation", [True, False])
def test_a_pass_kept_in_flight_defers_the_update_and_says_so(evaluation, told, seed):
    run, first = Run(DelayedScaling(amax_history_len=4)), True if told else None
    run.layer.training = not evaluation  # in evaluation as well: its graph may still have a backward
    kept = run.forward(first, record=not evaluation)
    run.layer.train()
    run.backward(run.forward(False))
    with pytest.warns(UserWarning, match="1 forward passes .* no backward"):
        ys = run.forward(first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        run.forward(first)
    run.backward(ys)
    run.simulation.check()
    if evaluation:
        del kept
    else:
        run.backward(kept)
    run.new_step()
    run.backward(run.forward(first))
    run.simulation.check()


def test_explicit_new_step(seed):
    run = Run(DelayedScaling(amax_history_len=4))
    run.backward(run.forward())
    run.new_step()
    fp8.new_step()
    run.simulation.check()
    ys = run.forward()  # this step has begun already
    run.simulation.check()
    fp8.new_step()
    with pytest.raises(Exception, match="between forward and backward"):
        run.backward(ys)


def test_one_update_for_all_modules_of_a_model(seed, monkeypatch):
    calls = []
    update = fp8.amax_and_scale_update
    monkeypatch.setattr(fp8, "amax_and_scale_update", lambda h, *a: calls.append(h.shape) or update(h, *a))
    layers, other = paddle.nn.LayerList([Toy(1), Toy(2), Toy(1)]), Toy(3)
    fp8.bind_model(layers)
    recipe = DelayedScaling(amax_history_len=7, margin=5)

    def step(*layers):
        calls.clear()
        with fp8_autocast(fp8_recipe=recipe):
            ys = [y for layer in layers for y in layer([paddle.randn([4, 16]) for _ in layer.weights])]
        paddle.autograd.backward(ys)
        return calls

    assert step(*layers) == []
    for _ in range(2):
        assert step(*layers) == [[7, 8], [7, 4]]  # two directions, no matter how many modules
    assert step(other) == []  # its first step
    # by itself: a model that is done may be gone on one rank and not yet collected on another
    assert step(other) == [[7, 6], [7, 3]]
    assert step(*layers) == [[7, 8], [7, 4]]
    assert step(other) == [[7, 6], [7, 3]]
    assert step(other) == [[7, 6], [7, 3]]  # the model that rests keeps its history
    layers.append(Toy(1))
    fp8.bind_model(layers)
    step(*layers)
    assert step(*layers)[-2:] == [[7, 2], [7, 1]]  # a module added later has blocks of its own


def test_modules_that_nobody_binds_are_updated_by_themselves(seed):
    """To the same numbers as those of one model, where the simulation says which."""
    for bound in (False, True):
        runs = [Run(DelayedScaling(amax_history_len=3)) for _ in range(2)]
        if bound:
            fp8.bind_model(paddle.nn.LayerList([run.layer for run in runs]))
        for step in range(3):
            for run in runs if step else ():
                run.new_step()
            for outputs in [(run, run.forward()) for run in runs]:
                outputs[0].backward(outputs[1])
        for run in runs:
            run.simulation.check()


def test_a_layers_parts_are_one_model():
    layer = TransformerLayer(32, 48, 2, backend="paddle")
    modules = fp8.name_modules(layer).values()
    assert len(modules) > 2 and len({id(module.model) for module in modules}) == 1
    whole = paddle.nn.LayerList([layer, TransformerLayer(32, 48, 2, backend="paddle")])
    fp8.bind_model(whole)
    assert len({id(module.model) for module in fp8.name_modules(whole).values()}) == 1


def test_models_do_not_disturb_each_other(seed):
    runs = [Run(DelayedScaling(amax_history_len=3)) for _ in range(2)]
    begun = [False, False]
    for i in np.random.permutation([0] * 9 + [1] * 6):
        if begun[i]:
            runs[i].new_step()
        begun[i] = True
        runs[i].backward(runs[i].forward())
    for run in runs:  # an idle model's last step is taken in when the next begins, its own or the other's
        run.new_step()
        run.backward(run.forward())
        run.simulation.check()


def test_states_die_with_their_modules():
    scaling = ModuleScaling(1, update_in_place)
    with fp8_autocast():
        scaling.begin_forward()[0].forward_pass.backward_done()
        scaling.begin_forward()
    alive = lambda: [key for key in fp8_state._states if key[0] is update_in_place]  # noqa: E731
    assert alive()
    del scaling  # at once, without the garbage collector
    assert not alive()


def test_off_means_none_and_no_tensors():
    scaling = ModuleScaling(2, fp8.amax_and_scale_update)
    assert scaling.begin_forward(True) is None
    with fp8_autocast(enabled=False):
        assert scaling.begin_forward(True, True) is None
    assert not scaling._bindings


def test_copies_have_scales_of_their_own():
    layer = Toy()
    layer.fp8.name = "original"
    with fp8_autocast():
        layer([paddle.randn([4, 16])] * 2)
    for copy in (deepcopy(layer).fp8, pickle.loads(pickle.dumps(layer.fp8))):
        assert copy is not layer.fp8 and copy.num_gemms == 2 and copy.update is layer.fp8.update and not copy._bindings


@pytest.mark.parametrize("recipe", [DelayedScaling(), DelayedScaling(fp8_format=Format.E4M3), Float8CurrentScaling()])
def test_quantizers(recipe):
    with fp8_autocast(fp8_recipe=recipe):
        quantizers = ModuleScaling(2, fp8.amax_and_scale_update).begin_forward()
    assert len(quantizers) == 2
    backward = "e4m3" if recipe.fp8_format is Format.E4M3 else "e5m2"
    for q in quantizers:
        assert [x.dtype for x in (q.input, q.weight, q.grad_output)] == ["e4m3", "e4m3", backward]
        assert q.grad_output.fp8_max == {"e4m3": 448, "e5m2": 57344}[backward]
        q.forward_pass.backward_done()
        q.forward_pass.backward_done()  # as often as it likes


class Group:
    def __init__(self, nranks):
        self.nranks = nranks


@pytest.mark.parametrize(
    "recipe, nranks, reductions",
    [
        (DelayedScaling(amax_compute_algo="most_recent"), 2, 2),
        (DelayedScaling(amax_compute_algo="most_recent"), 1, 0),
        (DelayedScaling(amax_compute_algo="most_recent", reduce_amax=False), 2, 0),
        (Float8CurrentScaling(), 2, 0),
    ],
)
def test_reductions_per_step(recipe, nranks, reductions, monkeypatch, seed):
    """One a direction, of one row, whatever the number of modules; its result counts."""
    calls = []

    def all_reduce(tensor, op, group):
        calls.append((tensor.shape, op, group))
        tensor.set_value(tensor.numpy() * 2)  # the other rank saw twice as much

    monkeypatch.setattr(paddle.distributed, "all_reduce", all_reduce)
    layers, group = paddle.nn.LayerList([Toy(1), Toy(2)]), Group(nranks)
    fp8.bind_model(layers)
    amax = None
    for _ in range(3):
        calls.clear()
        xs = [[paddle.randn([4, 16]) for _ in layer.weights] for layer in layers]
        with fp8_autocast(fp8_recipe=recipe, fp8_group=group):
            ys = [y for layer, x in zip(layers, xs, strict=True) for y in layer(x)]
        if amax is not None and recipe.kind == "delayed":
            scale = fp8.state_dict(layers[0], recipe)["modules"][""]["forward"]["scale"][0]
            assert scale == np.float32(448) / np.float32(amax * (2 if reductions else 1))
        amax = np.abs(xs[0][0].numpy()).max()
        paddle.autograd.backward(ys)
    assert [(shape, op) for shape, op, _ in calls] == [
        ([6], paddle.distributed.ReduceOp.MAX),
        ([3], paddle.distributed.ReduceOp.MAX),
    ][:reductions]
    assert all(g is group for _, _, g in calls)
    with fp8_autocast(fp8_recipe=recipe, fp8_group=group):
        assert layers[0].fp8.begin_forward()[0].amax_group is (group if reductions else None)


# --- a backend that works through addresses, as te does ---


def number(address):
    return ctypes.c_float.from_address(address)


def update_in_place(history, scale, *args):
    for tensor, value in zip((history, scale), fp8.amax_and_scale_update(history, scale, *args), strict=True):
        address = tensor.data_ptr()
        ctypes.memmove(address, value.data_ptr(), value.size * 4)


def test_addresses(seed):
    recipe = DelayedScaling(amax_history_len=4)
    scaling = ModuleScaling(2, update_in_place)
    history = {}
    for step in range(6):
        with fp8_autocast(fp8_recipe=recipe):
            quantizers = scaling.begin_forward()
        all_quantizers = [x for q in quantizers for x in (q.input, q.weight, q.grad_output)]
        for kind in ("scale_ptr", "amax_ptr", "scale_inv_ptr"):
            assert len({getattr(x, kind) for x in all_quantizers}) == 6
        for i, x in enumerate(all_quantizers):
            assert x.scale_inv_ptr % 16 == 0 and number(x.amax_ptr).value == 0
            if step:
                history[i], scale = simulate_update(history[i], np.float32(1), x.fp8_max, 0, "max")
                assert number(x.scale_ptr).value == scale == float(x.scale)
            else:
                history[i] = [np.float32(0)] * 4
                assert number(x.scale_ptr).value == 1
        for i, x in enumerate(all_quantizers):
            history[i][0] = np.float32(np.random.rand())
            number(x.amax_ptr).value = history[i][0]
        with fp8_autocast(fp8_recipe=recipe):
            evaluation = scaling.begin_forward(training=False)[0]
        assert evaluation.input.scale_ptr == all_quantizers[0].scale_ptr
        assert evaluation.input.scale_inv_ptr == all_quantizers[0].scale_inv_ptr
        number(evaluation.input.amax_ptr).value = 1e9  # lost
        del evaluation
        quantizers[0].forward_pass.backward_done()


@pytest.mark.parametrize("fp8_dpa", [False, True])
def test_scale_inv_of_what_nobody_quantizes(fp8_dpa, seed):
    """An update in place writes scale_inv where attention is in fp8; restoring states keeps it."""
    given = []

    def update(history, scale, fp8_max, margin, algorithm, scale_inv=None):
        update_in_place(history, scale, fp8_max, margin, algorithm)
        given.append(scale_inv is not None)
        if scale_inv is not None:
            inverse = scale_inv.numpy()
            inverse[:, 0] = 1 / scale.numpy()
            ctypes.memmove(scale_inv.data_ptr(), inverse.ctypes.data, inverse.nbytes)

    recipe = DelayedScaling(amax_history_len=2, fp8_dpa=fp8_dpa)
    model = paddle.nn.Sequential(*(paddle.nn.Layer() for _ in range(3)))
    for i, layer in enumerate(model):
        layer.fp8 = ModuleScaling.of_attention(update) if i == 1 else ModuleScaling(1, update)
    fp8.bind_model(model)

    def step():
        with fp8_autocast(fp8_recipe=recipe):
            passes = [layer.fp8.begin_forward() for layer in model]
        quantizers = [x for p in passes if p for q in p for x in (q.input, q.weight, q.grad_output)]
        inverses = [number(x.scale_inv_ptr).value for x in quantizers]
        scales = [number(x.scale_ptr).value for x in quantizers]
        for x in quantizers:
            number(x.amax_ptr).value = np.float32(np.random.rand())
        for p in passes:
            if p:
                p[0].forward_pass.backward_done()
        return scales, inverses, passes

    for i in range(3):
        scales, inverses, passes = step()
        assert (passes[1] is None) != fp8_dpa and (i == 0) == (set(scales) == {1})
        if fp8_dpa:
            np.testing.assert_array_equal(np.float32(inverses), 1 / np.float32(scales))
    assert len(given) == 4 and set(given) == {fp8_dpa}  # two updates, forward and backward
    state = fp8.state_dict(model, recipe)
    assert set(state["modules"]) == ({"0", "1", "2"} if fp8_dpa else {"0", "2"})
    for module in state["modules"].values():
        module["forward"]["scale"][:] *= 2
        module["done"] = False  # the step that follows must not update
    fp8.set_state_dict(model, state, recipe)
    scales, inverses, _ = step()
    np.testing.assert_array_equal(np.float32(inverses), 1 / np.float32(scales))
    assert scales[0] == state["modules"]["0"]["forward"]["scale"][0]


def kinds(scaling, recipe, training=True):
    """Of the quantizers of a forward pass, which in training has its backward."""
    with fp8_autocast(fp8_recipe=recipe):
        gemms = scaling.begin_forward(training)
    if training:
        gemms[0].forward_pass.backward_done()
    return {quantizer.kind for q in gemms for quantizer in (q.input, q.weight, q.grad_output)}


def test_the_first_step_ends_with_the_first_update():
    """For all modules of a model at once; a step that is dropped was none."""
    recipe = DelayedScaling(amax_history_len=2, fp8_dpa=True, first_step="current")
    model = paddle.nn.Sequential(*(Toy(1) for _ in range(3)))
    model[2].fp8 = ModuleScaling.of_attention(fp8.amax_and_scale_update)
    fp8.bind_model(model)
    first, second, attention = (layer.fp8 for layer in model)
    assert kinds(first, recipe, training=False) == {"current"}
    assert kinds(first, recipe) == {"current"}
    fp8.drop_step()
    for scaling in (first, second, attention):
        assert kinds(scaling, recipe) == {"current"}
        assert kinds(scaling, recipe, training=False) == {"current"}  # the step has not ended yet
    for scaling in (second, first, attention):
        assert kinds(scaling, recipe) == {"delayed"}
    assert kinds(first, recipe, training=False) == {"delayed"}


def test_the_step_after_one_that_was_dropped_warns_of_nothing():
    """Its forward passes wait for their backward as those of any step."""
    recipe, model = DelayedScaling(amax_history_len=2), paddle.nn.Sequential(Toy(1), Toy(1))
    fp8.bind_model(model)

    def step():
        with fp8_autocast(fp8_recipe=recipe), warnings.catch_warnings():
            warnings.simplefilter("error")
            gemms = [layer.fp8.begin_forward()[0] for layer in model]
        for gemm in reversed(gemms):
            gemm.forward_pass.backward_done()

    step()
    fp8.drop_step()
    step()
    step()


@pytest.mark.parametrize("recipe", [DelayedScaling(first_step="delayed"), Float8CurrentScaling()])
def test_no_first_step_of_its_own(recipe):
    scaling = ModuleScaling(2, fp8.amax_and_scale_update)
    for _ in range(3):
        assert kinds(scaling, recipe) == {recipe.kind}


def test_weight_cache():
    scaling = ModuleScaling(1, fp8.amax_and_scale_update)

    def forward(is_first, training=True):
        with fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=2)):
            q = scaling.begin_forward(training, is_first)[0]
        if q.update_weight:
            q.cache_weight(object())
        q.forward_pass.backward_done()
        return q.cached_weight

    assert forward(None) is None  # keeps nothing
    assert (first := forward(False)) is not None  # nothing there yet: quantized, and kept
    assert forward(False) is first
    second = forward(True)
    assert second is not first and forward(False) is second
    fp8.new_step()  # other scales
    assert (third := forward(False)) is not second
    assert forward(False, training=False) is third
    assert forward(None) is None
    assert forward(False) is not third  # the weight may have changed since
