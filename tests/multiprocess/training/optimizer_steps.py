"""Six steps of AdamW with clipping, by Paddle alone and by paddle_te.training.optimizer: the same bits?

python optimizer_steps.py DEVICE SEED. Started by test_optimizer.py, because nvgpu is loaded when Paddle is imported.
"""

import sys

import numpy as np
import paddle

from paddle_te import device
from paddle_te.training.optimizer import fuse_clipping

SHAPES = [(33, 65), (257,), (1,), (64, 64)]
STEPS = 6
# name: (dtype of weights, of gradients, more arguments of AdamW)
CASES = {
    "float32": ("float32", "float32", {}),
    "float32 amsgrad": ("float32", "float32", {"amsgrad": True}),
    "bfloat16": ("bfloat16", "bfloat16", {"multi_precision": True}),
    "bfloat16 main gradients": ("bfloat16", "float32", {"multi_precision": True}),
    "float16 without master weights": ("float16", "float16", {}),
}


def make(arrays, dtype, clip_norm, fused, **more):
    """(parameters, optimizer) from the arrays; what the optimizer adds has the same names each time."""
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
        grad_clip=paddle.nn.ClipGradByGlobalNorm(clip_norm),
        **more,
    )
    if fused:
        fuse_clipping(optimizer)
    return parameters, optimizer


def state_of(parameters, optimizer):
    """{name: array} of weights and all that a checkpoint has of the optimizer."""
    tensors = {parameter.name: parameter for parameter in parameters}
    tensors |= {key: value for key, value in optimizer.state_dict().items() if isinstance(value, paddle.Tensor)}
    tensors |= optimizer.state_dict().get("master_weights", {})
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


if __name__ == "__main__":
    main()
