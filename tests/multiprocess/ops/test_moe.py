"""What nvgpu's trace says of a layer of experts: the host waits for nothing of the device's."""

import re
from pathlib import Path

from tests.moe_te_cases import CONFIGS
from tests.nvgpu_processes import build_host, run


def test_a_layer_leaves_everything_on_the_device():
    trace = dict(NVGPU_TRACE="1", GLOG_vmodule="kernel_factory=3")
    command = [Path(__file__).with_name("moe.py"), *CONFIGS]
    result = run(build_host(), *command, **trace)
    assert result.returncode == 0, result.stderr[-3000:]
    for kind in CONFIGS:
        step = re.search(f"STEP {kind}\n(.*)END {kind}\n", result.stderr, re.DOTALL)
        assert step, kind
        assert not re.findall("missing nvgpu kernel: .*|on the CPU: .*|copy .* host: .*", step[1]), kind
