"""What tools/benchmark/nvgpu_kernels.py times; nvgpu/tests/test_plugin.py runs all of it."""

import paddle
import pytest

from tools.benchmark.nvgpu_kernels import Operations


def test_each_step_of_adamw_moves_weights() -> None:
    step = Operations(paddle, shrink=512).adamw("int8")()
    for _ in range(2):
        [parameter] = step.__self__._parameter_list
        before = parameter.astype("float32")
        step()
        assert (parameter.astype("float32") != before).astype("float32").mean() > 0.5


def test_gradients_are_paddles_and_the_first_is_not_copied() -> None:
    x = paddle.randn([512, 1024])
    grads = Operations(paddle, shrink=512).gradient(lambda: (2 * x).tanh(), x)
    statistics = paddle.base.core
    statistics.host_memory_stat_reset_peak_value("Allocated", 0)
    begin = statistics.host_memory_stat_current_value("Allocated", 0)
    [found] = grads()
    most = statistics.host_memory_stat_peak_value("Allocated", 0) - begin
    y = (2 * x).tanh()
    [wanted] = paddle.grad(y, [x], paddle.ones_like(y))
    assert (found == wanted).all()
    assert most == pytest.approx(2 * x.size * 4, rel=0.01)  # tanh's gradient and x's
