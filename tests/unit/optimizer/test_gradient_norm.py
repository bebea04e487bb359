import numpy as np
import paddle

from paddle_te.optimizer import fuse_clipping, gradient_norm


def test_the_norm_is_that_before_clipping(seed):
    paddle.seed(seed)
    layer = paddle.nn.Linear(8, 16)
    clip = paddle.nn.ClipGradByGlobalNorm(0.5)
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=layer.parameters(), grad_clip=clip)
    fuse_clipping(optimizer)
    layer(paddle.randn([4, 8])).square().sum().backward()
    grads = [(parameter, parameter.grad) for parameter in layer.parameters()]
    expected = np.sqrt(sum((grad.numpy().astype("float64") ** 2).sum() for _, grad in grads))
    clipped = optimizer._grad_clip(grads)
    left = np.sqrt(sum((grad.numpy().astype("float64") ** 2).sum() for _, grad in clipped))
    assert expected > 0.5 and abs(left - 0.5) < 1e-5
    np.testing.assert_allclose(gradient_norm(optimizer._grad_clip, clipped).numpy(), expected, rtol=1e-5)
