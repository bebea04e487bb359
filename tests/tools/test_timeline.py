"""Where a step's time goes: the table of a trace whose numbers are known, and of a real one's host side."""

import json
import subprocess
import sys

import pytest

from tests.nvgpu_processes import ROOT
from tools.benchmark import timeline


def event(cat, name, start, end, **args):
    args |= dict(start_time=f"{start:.3f} us", end_time=f"{end:.3f} us")
    return dict(ph="X", cat=cat, name=f"{name}[{end - start:.3f} us]", args=args)


class Trace:
    """Host and device events; launch: a call now, whose kernel runs from start to end."""

    def __init__(self):
        self.events, self.calls = [{}, {"ph": "M", "name": "process_name"}], 0

    def host(self, name, start, end, cat="PythonUserDefined"):
        self.events.append(event(cat, name, start, end))

    def launch(self, now, name, start, end, cat="Kernel"):
        self.calls += 1
        self.events.append(event("CudaRuntime", "cudaLaunchKernel", now, now + 1, **{"correlation id": self.calls}))
        self.events.append(event(cat, name, start, end, **{"correlation id": self.calls}))

    def write(self, path):
        path.write_text(json.dumps({"traceEvents": self.events}))
        return path


@pytest.fixture
def trace():
    """Three steps of 5 ms, of which two count: the host launches during the first 2 ms of each."""
    made = Trace()
    made.launch(1650, "start of the profiler", 4100, 4300)
    for step, t in enumerate((0, 5000, 10000)):
        made.host(f"step {step + 7}", t, t + 2000)
        made.host("forward", t + 10, t + 800)
        made.host("layers.0 forward", t + 100, t + 300)
        made.host("lm_head forward", t + 400, t + 500)
        made.host("backward", t + 810, t + 811)  # ours
        made.host("backward", t + 900, t + 1500, cat="UserDefined")  # Paddle's
        made.host("lm_head backward", t + 1000, t + 1001)
        made.host("layers.0 backward", t + 1100, t + 1101)
        made.host("layers.0 forward", t + 1110, t + 1200)  # again, for recompute
        made.host("backward", t + 1250, t + 1290, cat="UserDefined")  # within
        made.host("optimizer", t + 1600, t + 1900)
        made.launch(t + 110, "gemm", t + 200, t + 1200)  # layers forward 1000
        made.launch(t + 350, "norm", t + 1200, t + 1300)  # outside 100
        made.launch(t + 410, "gemm", t + 1300, t + 1800)  # head forward 500
        made.launch(t + 950, "loss", t + 1800, t + 1900)  # backward before its first part: outside 100
        made.launch(t + 1050, "gemm", t + 1900, t + 2400)  # head backward 500
        made.launch(t + 1150, "gemm", t + 2400, t + 2700)  # recomputed 300
        made.launch(t + 1240, "gemm", t + 2700, t + 3700)  # layers backward 1000
        made.launch(t + 1260, "copy", t + 3700, t + 3800, cat="Memcpy")  # layers backward 100
        made.launch(t + 1270, "ncclDevKernel_ReduceScatter", t + 3000, t + 4000)  # 800 hidden, 200 exposed
        made.launch(t + 1550, "scale", t + 4000, t + 4100)  # outside 100
        made.launch(t + 1700, "adam", t + 4300, t + 5000)  # after 200 of a gap; 200 before the next step's first kernel
    return made


def test_every_moment_counts_once(trace, tmp_path):
    found = timeline.account(trace.write(tmp_path / "rank0.json"))
    assert found["steps"] == 2 and found["total_ms"] == pytest.approx((10000 - 200) / 2e3)
    assert found["ms"] == pytest.approx(
        {
            "decoder layers forward": 1.0,
            "decoder layers backward": 1.1,
            "decoder layers recomputed": 0.3,
            "head and loss forward": 0.5,
            "head and loss backward": 0.5,
            "optimizer and clipping": 0.7,
            "outside of the parts": 0.3,
            "communication, exposed": 0.2,
            "gaps": 0.3,  # 200 each, and 200 between the two
        }
    )
    assert sum(found["ms"].values()) == pytest.approx(found["total_ms"])
    assert found["communication_ms"] == pytest.approx(1.0)
    assert found["kernels"][0] == ("gemm", pytest.approx(3.3), 5)
    assert "start of the profiler" not in [name for name, *_ in found["kernels"]]
    trace.events = [event for event in trace.events if not event.get("name", "").startswith(("step 8", "step 9"))]
    assert timeline.account(trace.write(tmp_path / "one.json"))["steps"] == 1


def test_tables(trace, tmp_path):
    command = [sys.executable, "tools/benchmark/timeline.py", trace.write(tmp_path / "rank0.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| decoder layers backward | 1.10 (22.4%) |" in done.stdout
    assert "| communication, hidden or not | 1.00 (20.4%) |" in done.stdout
    assert "| `gemm` | 3.30 | 5 |" in done.stdout


@pytest.mark.parametrize(
    "lacks, message", [("step", "no steps"), ("device", "no kernels of a device .*nvidia-cuda-cupti")]
)
def test_what_a_trace_lacks_is_said(trace, tmp_path, lacks, message):
    unwanted = timeline.DEVICE if lacks == "device" else ()
    trace.events = [e for e in trace.events if e.get("cat") not in unwanted and not e.get("name", "").startswith(lacks)]
    path = trace.write(tmp_path / "rank0.json")
    with pytest.raises(ValueError, match=message):
        timeline.account(path)
    with pytest.raises(SystemExit, match=f"timeline.py: .*{message}"):
        timeline.main([str(path)])
