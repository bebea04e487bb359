"""Six steps of AdamW with clipping, by Paddle alone and by paddle_te.optimizer: the same bits? And on nvgpu
those with states of fewer bytes: the same bits as in Paddle's operations on the CPU? And the update in backward? And
many weights in one call? And Muon's passes, beside Paddle's operations on the CPU? And with states in host memory, of
which so many bytes are on the device as the planner says?

python optimizer_steps.py DEVICE SEED [emulated]. Started by test_optimizer.py, because nvgpu is loaded when Paddle is
imported. emulated: on nvgpu's host runtime, where the copies to host memory can be emulated.
"""

import gc
import sys
from itertools import product

import numpy as np
import paddle
from paddle.base import core

from paddle_te import device
from paddle_te.optimizer import fuse_clipping, multi_tensor, offloaded_states
from paddle_te.optimizer.compact_states import keep_compact
from paddle_te.optimizer.in_backward import OptimizerInBackward
from paddle_te.optimizer.muon.step import add_to_momentum, apply_in_paddle
from paddle_te.optimizer.offloaded_states import keep_on_host
from paddle_te.options.training import MASTER_WEIGHTS, MOMENTS
from paddle_te.planner.layout import layout as layout_of
from paddle_te.planner.memory import state_bytes
from tests import emulated_te

SHAPES = [(33, 65), (257,), (1,), (64, 64), (3, 512)]
STEPS = 6
MASTER = "master weight of "  # before a parameter's name
# name: (dtype of weights, of gradients, more arguments of AdamW)
CASES = {
    "float32": ("float32", "float32", {}),
    "float32 amsgrad": ("float32", "float32", {"amsgrad": True}),
    "bfloat16": ("bfloat16", "bfloat16", {"multi_precision": True}),
    "bfloat16 main gradients": ("bfloat16", "float32", {"multi_precision": True}),
    "float16 without master weights": ("float16", "float16", {}),
}


def make(arrays, dtype, clip_norm, fused, kept=None, **more):
    """(parameters, optimizer) from the arrays; what the optimizer adds has the same names each time.

    clip_norm: None: no clipping. kept: arguments of keep_compact; None: Paddle's states.
    """
    paddle.utils.unique_name.switch()
    parameters = []
    for number, array in enumerate(arrays):
        parameter = paddle.base.framework.EagerParamBase.from_tensor(paddle.to_tensor(array).astype(dtype))
        parameter.stop_gradient, parameter.name = False, f"weight_{number}"
        parameter.need_clip = number != 1
        parameters.append(parameter)
    optimizer = paddle.optimizer.AdamW(
        paddle.optimizer.lr.LinearWarmup(1e-2, 3, 0.0, 1e-2),
        parameters=parameters,
        weight_decay=0.1,
        apply_decay_param_fun=lambda name: name != "weight_2",
        grad_clip=paddle.nn.ClipGradByGlobalNorm(clip_norm) if clip_norm else None,
        **more,
    )
    if fused:
        fuse_clipping(optimizer)
    if kept:
        keep_compact(optimizer, **kept)
    return parameters, optimizer


def state_of(parameters, optimizer):
    """{name: array} of weights and all that a checkpoint has of the optimizer."""
    tensors = {parameter.name: parameter for parameter in parameters}
    tensors |= {key: value for key, value in optimizer.state_dict().items() if isinstance(value, paddle.Tensor)}
    masters = optimizer.state_dict().get("master_weights", {})
    tensors |= {f"{MASTER}{name}": tensor for name, tensor in masters.items()}
    return {name: tensor.astype("float32").numpy() for name, tensor in tensors.items()}


def run(case, clip_norm, fused, seed, resume=False):
    """state_of after the steps; `resume`: half of them by an optimizer that loads the state of the first."""
    dtype, grad_dtype, more = CASES[case]
    generator = np.random.default_rng(seed)
    arrays = [generator.standard_normal(shape).astype("float32") for shape in SHAPES]
    parameters, optimizer = make(arrays, dtype, clip_norm, fused, **more)
    for step in range(STEPS):
        if resume and step == STEPS // 2:
            weights, saved = [p.astype("float32").numpy() for p in parameters], optimizer.state_dict()
            parameters, optimizer = make(weights, dtype, clip_norm, fused, **more)
            optimizer.set_state_dict(saved)
        pairs = []
        for parameter in parameters:
            grad = paddle.to_tensor(generator.standard_normal(parameter.shape).astype("float32")).astype(grad_dtype)
            pairs.append((parameter, grad))
        before = [grad.astype("float32").numpy().copy() for _, grad in pairs]
        optimizer._apply_optimize(None, None, pairs)
        optimizer._learning_rate.step()
        factor = getattr(optimizer._grad_clip, "factor", None)
        assert (factor is not None) == (fused and device.kind() == "nvgpu"), factor
        if factor is not None:
            assert (float(factor) == 1.0) == (clip_norm > 100), float(factor)
            for array, (_, grad) in zip(before, pairs, strict=True):
                assert (grad.astype("float32").numpy() == array).all(), "a gradient was clipped after all"
    return state_of(parameters, optimizer)


COMPACT_CASES = ("bfloat16", "bfloat16 main gradients", "float16 without master weights", "float32")


def run_compact(device_name, case, seed, moments, master_weights, clip_norm=None):
    """state_of after three steps with moments in 16 or 8 bits."""
    paddle.set_device(device_name)
    dtype, grad_dtype, more = CASES[case]
    generator = np.random.default_rng(seed)
    arrays = [generator.standard_normal(shape).astype("float32") for shape in SHAPES]
    kept = dict(moments=moments, master_weights=master_weights, seed=seed)
    parameters, optimizer = make(arrays, dtype, clip_norm, True, kept, **more)
    for _ in range(3):
        grads = [paddle.to_tensor(generator.standard_normal(p.shape).astype("float32")) for p in parameters]
        pairs = [(p, grad.astype(grad_dtype)) for p, grad in zip(parameters, grads, strict=True)]
        optimizer._apply_optimize(None, None, pairs)
        optimizer._learning_rate.step()
    return state_of(parameters, optimizer)


def joined(state):
    """{name: float32 bits} of the master weights whose remainders are in a state."""
    weights = {name: state[name.removeprefix(MASTER)].view("uint32") for name in state if name.startswith(MASTER)}
    return {name: bits + state[name].astype("int64").astype("uint32") for name, bits in weights.items()}


def compare_compact(seed):
    for case, moments in product(COMPACT_CASES, ("bfloat16", "int8")):
        for master_weights in MASTER_WEIGHTS if case.startswith("bfloat16") else ("float32",):
            want, got = (run_compact(name, case, seed, moments, master_weights) for name in ("cpu", "nvgpu:0"))
            assert got.keys() == want.keys(), got.keys() ^ want.keys()
            wrong = [key for key in want if not (got[key] == want[key]).all()]
            assert not wrong, (case, moments, master_weights, wrong)
    clipped, compact = (
        run_compact("nvgpu:0", "bfloat16", seed, "bfloat16", kept, clip_norm=0.5) for kept in MASTER_WEIGHTS
    )
    got = joined(compact)
    assert len(got) == len(SHAPES) and all((got[name] == clipped[name].view("uint32")).all() for name in got)
    print("EQUAL states of fewer bytes", flush=True)


def run_in_backward(arrays, grads, kept):
    """(state_of after steps in backward, clipped by the last norm; the factor of each)."""
    parameters, optimizer = make(arrays, "bfloat16", None, False, multi_precision=True)
    in_backward, factors = OptimizerInBackward(optimizer, max_norm=40.0), []
    keep_compact(optimizer, **kept)
    in_backward.attach()
    for of_step in grads:
        factors.append(in_backward.factor)
        sum((p * grad).sum() for p, grad in zip(parameters, of_step, strict=True)).backward()
        optimizer.step()
        optimizer._learning_rate.step()
    return state_of(parameters, optimizer), factors


def run_with_factors(arrays, grads, kept, factors):
    """state_of after ordinary steps with gradients that were multiplied by the factors."""
    parameters, optimizer = make(arrays, "bfloat16", None, False, kept, multi_precision=True)
    for of_step, factor in zip(grads, factors, strict=True):
        clipped = [grad * factor.astype(grad.dtype) for grad in of_step]
        clipped[1] = of_step[1]  # which `make` leaves out of clipping
        optimizer._apply_optimize(None, None, list(zip(parameters, clipped, strict=True)))
        optimizer._learning_rate.step()
    return state_of(parameters, optimizer)


def compare_in_backward(seed):
    generator = np.random.default_rng(seed)
    arrays, *grads = [[generator.standard_normal(shape).astype("float32") for shape in SHAPES] for _ in range(4)]
    grads = [[paddle.to_tensor(array).astype("bfloat16") for array in of_step] for of_step in grads]
    for moments, master_weights in (("float32", "float32"), ("bfloat16", "bf16_remainder")):
        kept = dict(moments=moments, master_weights=master_weights, seed=seed)
        got, factors = run_in_backward(arrays, grads, kept)
        assert float(factors[0]) == 0 and all(0 < float(factor) < 1 for factor in factors[1:])
        want = run_with_factors(arrays, grads, kept, factors)
        wrong = [key for key in want if not (got[key] == want[key]).all()]
        assert got.keys() == want.keys() and not wrong, (kept, wrong)
    print("EQUAL update in backward", flush=True)


MANY = 100  # weights: more than a launch of a kernel takes
KINDS = [("float32", "float32"), ("bfloat16", "bf16_remainder"), ("int8", "float32"), ("int8", "bf16_remainder")]


def unaligned(tensor):
    """A copy that does not begin at a multiple of 16 bytes, so that the kernels cannot read packs of 16 bytes."""
    return paddle.concat([paddle.zeros([1], tensor.dtype), tensor.flatten()])[1:].reshape(tensor.shape)


def replace_states(parameters, optimizer):
    """Puts copies in the place of all states and moves the weights, as loading and offloading do."""
    for of_each in (*optimizer._accumulators.values(), optimizer._master_weights):
        for key, tensor in of_each.items():
            of_each[key] = tensor.clone() if tensor.place.is_custom_place() else tensor.cpu()
            of_each[key].name = tensor.name
    for parameter in parameters:
        before = parameter.data_ptr()
        parameter.clone()._share_buffer_to(parameter)
        assert parameter.data_ptr() != before


def run_many(arrays, grads, kept, how):
    """state_of after steps of which the second leaves out every third weight.

    how: "paddle": Paddle's own AdamW without clipping, one weight after another; "single": ours, in a call for each;
    "together": in one call, after the first step with other tensors in the states' places.
    """
    parameters, optimizer = make(arrays, "bfloat16", None, how != "paddle", kept, multi_precision=True)
    parameters[3].optimize_attr["learning_rate"] = 0.5
    calls, operator = [], multi_tensor.adamw
    multi_tensor.adamw = lambda steps: (calls.append(len(steps)), operator(steps))[1]
    try:
        for step, of_step in enumerate(grads):
            pairs = [pair for n, pair in enumerate(zip(parameters, of_step, strict=True)) if step != 1 or n % 3]
            if how == "single":
                with paddle.no_grad():
                    optimizer._create_optimization_pass([])
                    optimizer._create_accumulators(paddle.static.default_main_program().global_block(), parameters)
                    for pair in pairs:
                        optimizer._append_optimize_op(paddle.static.default_main_program().global_block(), pair)
            else:
                optimizer._apply_optimize(None, None, pairs)
            optimizer._learning_rate.step()
            if how == "together" and step == 0:
                replace_states(parameters, optimizer)
    finally:
        multi_tensor.adamw = operator
    most = {"paddle": 0, "single": 1, "together": len(parameters) - 2}[how]  # one has its own rate, one no clipping
    assert max(calls, default=0) == most, (how, calls)
    return state_of(parameters, optimizer)


def compare_many(seed):
    generator = np.random.default_rng(seed)
    shapes = [(int(rows), int(width)) for rows, width in generator.integers(1, 130, (MANY, 2))]
    shapes[:4] = [(1, 1), (3, 3000), (600, 200), (257, 1)]
    arrays, *grads = [[generator.standard_normal(shape).astype("float32") for shape in shapes] for _ in range(4)]
    for dtype in ("bfloat16", "float32"):
        of_type = [[paddle.to_tensor(array).astype(dtype) for array in of_step] for of_step in grads]
        of_type = [[unaligned(g) if n % 5 == 2 else g for n, g in enumerate(of_step)] for of_step in of_type]
        squares = multi_tensor.squared_norms(of_type[0])
        each = [paddle._C_ops.squared_l2_norm(grad).reshape([1]) for grad in of_type[0]]
        assert len(squares) == 1 and squares[0].dtype == each[0].dtype
        assert (squares[0] == paddle.concat(each)).all()
        exact = [float((grad.astype("float32").numpy().astype("float64") ** 2).sum()) for grad in of_type[0]]
        np.testing.assert_allclose(squares[0].astype("float32").numpy(), exact, rtol=2**-8)
        for moments, master_weights in KINDS:
            kept = dict(moments=moments, master_weights=master_weights, seed=seed)
            together, single = (run_many(arrays, of_type, kept, how) for how in ("together", "single"))
            wrong = [key for key in single if not (together[key] == single[key]).all()]
            assert together.keys() == single.keys() and not wrong, (kept, dtype, wrong[:5])
        want = run_many(arrays, of_type, None, "paddle")
        got = run_many(arrays, of_type, None, "together")
        wrong = [key for key in want if not (got[key] == want[key]).all()]
        assert got.keys() == want.keys() and len(want) == 6 * MANY and not wrong, (dtype, wrong[:5])
    print("EQUAL many weights in one call", flush=True)


def compare_deferred(seed):
    """A deferred update comes when it is asked for, and what was not asked for is forgotten."""
    arrays, grads = np.random.default_rng(seed).standard_normal((2, 5, 7, 300)).astype("float32")
    updated = []
    for deferred in (False, True):
        parameters, optimizer = make(arrays, "bfloat16", None, True, None, multi_precision=True)
        optimizer._create_optimization_pass([])  # makes the learning rate
        optimizer._create_accumulators(paddle.static.default_main_program().global_block(), parameters)
        pairs = [(p, paddle.to_tensor(grad).astype("bfloat16")) for p, grad in zip(parameters, grads, strict=True)]
        steps = optimizer._steps_of(pairs)
        if not deferred:
            multi_tensor.adamw(steps)
        else:
            before = state_of(parameters, optimizer)
            multi_tensor.deferred_adamw([steps[:2]])  # of a step that is left out
            update = multi_tensor.deferred_adamw([steps[:3], steps[3:]])
            waiting = state_of(parameters, optimizer)
            assert all((waiting[key] == before[key]).all() for key in before)
            update()
        updated.append(state_of(parameters, optimizer))
    want, got = updated
    assert not [key for key in want if not (got[key] == want[key]).all()]
    print("EQUAL deferred", flush=True)


def momenta_of(device_name, arrays, dtypes):
    """Run Muon's first pass on a device; return its momenta and updates. dtypes: of gradients, momenta, updates."""
    paddle.set_device(device_name)
    grads, momenta = (
        [paddle.to_tensor(a).astype(t) for a in each] for each, t in zip(arrays[:2], dtypes, strict=False)
    )
    updates, factor = [paddle.zeros(g.shape, dtypes[2]) for g in grads], paddle.to_tensor([0.3], "float32")
    grads[0] = unaligned(grads[0]) if device_name != "cpu" else grads[0]
    if device_name == "cpu":
        for grad, *of_weight in zip(grads, momenta, updates, strict=True):
            clipped = grad.astype("float32") * factor.astype(grad.dtype).astype("float32")
            add_to_momentum(clipped.astype(grad.dtype), *of_weight, 0.95)
    else:
        device.nvgpu_operator("nvgpu_multi_tensor_muon_momentum", grads, factor, momenta, updates, 0.95)
    return [tensor.astype("float32").numpy() for tensor in (*momenta, *updates)]


def weights_of(device_name, arrays, dtypes):
    """Arrays of weights and master weights after Muon's second pass on a device.

    arrays: of weights, of updates, of remainders. dtypes: of weights, of master weights ("int16": remainders, None),
    of updates.
    """
    paddle.set_device(device_name)
    of_weight, of_master, of_update = dtypes
    params = [paddle.to_tensor(array).astype(of_weight) for array in arrays[0]]
    updates = [paddle.to_tensor(array).astype(of_update) for array in arrays[1]]
    masters = [paddle.to_tensor(array) for array in arrays[2 if of_master == "int16" else 0]] if of_master else None
    rate, decays = paddle.to_tensor([0.02], "float32"), [0.1 * (n % 2) for n in range(len(params))]
    if device_name == "cpu":
        for n, (param, update) in enumerate(zip(params, updates, strict=True)):
            apply_in_paddle(param, update, rate, masters and masters[n], decays[n])
    else:
        updates[0] = unaligned(updates[0])
        device.nvgpu_operator("nvgpu_multi_tensor_muon", params, updates, rate, masters, decays)
    return [tensor.astype("float32").numpy() for tensor in (*params, *(masters or ()))]


def compare_muon(seed):
    """Both passes over several weights in one call, in each type that they are compiled for."""
    generator = np.random.default_rng(seed)
    first, second = ([generator.standard_normal(shape).astype("float32") for shape in SHAPES] for _ in range(2))
    arrays = first, second, [generator.integers(-(2**15), 2**15, shape).astype("int16") for shape in SHAPES]
    wide, floats = ("float32", "bfloat16"), ("float32", "bfloat16", "float16")
    masters = [(weight, master) for weight in floats for master in ("float32", None)] + [("bfloat16", "int16")]
    cases = [(momenta_of, dtypes) for dtypes in product(floats, wide, wide)]
    cases += [(weights_of, (*dtypes, of_update)) for dtypes in masters for of_update in wide]
    for run_on, dtypes in cases:
        want, got = (run_on(name, arrays, dtypes) for name in ("cpu", "nvgpu:0"))
        assert all((a == b).all() for a, b in zip(want, got, strict=True)), (run_on, dtypes)
    print("EQUAL Muon", flush=True)


def run_offload(arrays, grads, kept, fraction):
    """(state_of after clipped steps, bytes that the optimizer has taken on the device).

    kept: arguments of keep_compact. fraction: of the states in host memory.
    """
    gc.collect()  # an optimizer from before is a cycle
    before = core.device_memory_stat_current_value("Allocated", 0)
    parameters, optimizer = make(arrays, "bfloat16", 0.5, True, kept, multi_precision=True)
    keep_on_host(optimizer, fraction)
    weights = sum(parameter.size * 2 for parameter in parameters)
    for of_step in grads:
        optimizer._apply_optimize(None, None, list(zip(parameters, of_step, strict=True)))
        optimizer._learning_rate.step()
    gc.collect()
    taken = core.device_memory_stat_current_value("Allocated", 0) - before - weights
    return state_of(parameters, optimizer), taken


def compare_offload(seed):
    emulated_te.install()
    offloaded_states.LEAST, offloaded_states.PIECE, offloaded_states.OFFLOADED_AT_ONCE = 1024, 1024, 3 * 1024
    generator = np.random.default_rng(seed)
    shapes = [(32, 512), (256,), (4, 16, 256)]
    arrays, *grads = [[generator.standard_normal(shape).astype("float32") for shape in shapes] for _ in range(4)]
    grads = [[paddle.to_tensor(array).astype("bfloat16") for array in of_step] for of_step in grads]
    for moments, master_weights in product(MOMENTS, MASTER_WEIGHTS):
        kept = dict(moments=moments, master_weights=master_weights, seed=seed)
        (want, on_device), (got, taken) = (run_offload(arrays, grads, kept, fraction) for fraction in (0, 1.0))
        wrong = [key for key in want if not (got[key] == want[key]).all()]
        assert got.keys() == want.keys() and not wrong, (kept, wrong)
        layout = layout_of(1, 1, optim_moments=moments, master_weights=master_weights)
        saved = state_bytes(layout) * (32 * 512 + 64 * 256 - 3 * 1024)
        assert abs(on_device - taken - saved) <= 2048, (kept, on_device, taken, saved)  # Paddle rounds up to 256
    print("EQUAL states in host memory", flush=True)


def main():
    name, seed = sys.argv[1], int(sys.argv[2])
    paddle.set_device(name)
    for case, (dtype, *_) in CASES.items():
        if name == "cpu" and dtype != "float32":
            continue  # Paddle's CPU has no kernels
        for clip_norm in (0.5, 1e6):
            want = run(case, clip_norm, False, seed)
            assert len(want) > len(SHAPES) * 4
            for resume in (False, True):
                got = run(case, clip_norm, True, seed, resume)
                assert got.keys() == want.keys(), got.keys() ^ want.keys()
                wrong = [key for key in want if not (got[key] == want[key]).all()]
                assert not wrong, (case, clip_norm, resume, wrong)
        other = run(case, 0.5, True, seed + 1)
        assert not (other["weight_0"] == want["weight_0"]).all()
        print("EQUAL", case, flush=True)
    if name != "cpu":
        compare_compact(seed)
        compare_in_backward(seed)
        compare_many(seed)
        compare_deferred(seed)
        compare_muon(seed)
    if sys.argv[3:] == ["emulated"]:
        compare_offload(seed)


if __name__ == "__main__":
    main()
