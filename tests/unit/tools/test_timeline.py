"""Where a step's time goes: the table of a trace whose numbers are known, and of a real one's host side."""

import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from tests.nvgpu_processes import ROOT
from tools.benchmark import timeline, timeline_views
from tools.benchmark.device_trace import DEVICE, ROWS, read, read_ranks


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
    found = read(trace.write(tmp_path / "rank0.json")).account()
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
    assert read(trace.write(tmp_path / "one.json")).account()["steps"] == 1


def test_a_rank_that_comes_first_waits(trace, tmp_path):
    """In a collective of 1000 µs for 650, which a kernel hides, and in one of 60 for 40, which nothing hides."""
    for t in (5000, 10000):
        trace.launch(t + 1580, "ncclDevKernel_AllReduce", t + 4120, t + 4180)
    first = trace.write(tmp_path / "rank0.json")
    other = Trace()
    for step, t in enumerate((700, 5700, 10700)):  # another clock
        other.host(f"step {step + 7}", t, t + 2000)
        other.launch(t + 1270, "ncclDevKernel_ReduceScatter", t + 3650, t + 4000)
        other.launch(t + 1580, "ncclDevKernel_AllReduce", t + 4140, t + 4160)
        other.launch(t + 1590, "ncclDevKernel_SendRecv", t + 4200, t + 4210)
    ranks = list(read_ranks([other.write(tmp_path / "rank1.json"), first]).values())
    alone, found, last = read(first).account(), ranks[0].account(), ranks[1].account()
    assert alone["ms"]["communication, exposed"] == pytest.approx(0.26) and "waiting for other ranks" not in alone["ms"]
    # of the first collective the last 200 µs are exposed, which are no waiting; of the second 60 of which 40 are
    assert found["ms"]["communication, exposed"] == pytest.approx(0.22)
    assert found["ms"]["waiting for other ranks"] == pytest.approx(0.04)
    assert found["communication_ms"] == pytest.approx(0.37) and alone["communication_ms"] == pytest.approx(1.06)
    assert found["total_ms"] == alone["total_ms"] and found["kernels"] == alone["kernels"]
    assert "waiting for other ranks" not in last["ms"] and last["communication_ms"] == pytest.approx(0.38)


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
    unwanted = DEVICE if lacks == "device" else ()
    trace.events = [e for e in trace.events if e.get("cat") not in unwanted and not e.get("name", "").startswith(lacks)]
    path = trace.write(tmp_path / "rank0.json")
    with pytest.raises(ValueError, match=message):
        read(path)
    with pytest.raises(SystemExit, match=f"timeline.py: .*{message}"):
        timeline.main([str(path)])


def test_the_page_shows_every_kernel_of_a_step(trace, tmp_path, capsys):
    """The second of three steps, as XML: 11 kernels and copies that it launched, in two lanes, none outside."""
    path = trace.write(tmp_path / "rank0.json")
    trace.launch(5130, "gemm<a & b>", 9990, 9995)
    page = tmp_path / "step.html"
    timeline.main([str(trace.write(path)), "--page", str(page)])
    text = page.read_text()
    assert not re.search(r"https?://|src=|href=|@import|url\(", text), "the page asks nobody"
    drawing = ElementTree.fromstring(re.search("<svg.*</svg>", text, re.DOTALL)[0])
    width = float(drawing.get("viewBox").split()[2])
    blocks = {block.findtext("title"): block for block in drawing}
    assert len(drawing) == 12 and width == pytest.approx(5000 - 200)
    gemm = next(block for words, block in blocks.items() if words.startswith("gemm<a & b>"))
    assert (float(gemm.get("x")), float(gemm.get("width"))) == (9990 - 5200, 5)
    assert "decoder layers forward\n5.0 µs, from 4.790 ms on" in gemm.findtext("title")
    communication = [block for words, block in blocks.items() if words.startswith("nccl")]
    assert [block.get("fill") for block in communication] == [timeline_views.COLORS["communication, exposed"]]
    for block in drawing:
        assert 0 <= float(block.get("x")) and float(block.get("x")) + float(block.get("width")) <= width + 1e-6
    assert "| decoder layers backward |" in capsys.readouterr().out


def test_a_step_without_kernels_is_passed_over(trace, tmp_path):
    """The one before the last, of which the profiler lost the device's side."""
    trace.events = [
        e for e in trace.events if e.get("cat") not in DEVICE or float(e["args"]["start_time"].split()[0]) > 1e4
    ]
    page = timeline_views.page({"rank0": read(trace.write(tmp_path / "rank0.json"))})
    assert page.count("<rect") == 11


@pytest.mark.parametrize("ending, begins", [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_the_picture_has_all_rows(trace, tmp_path, ending, begins):
    """Once for each trace, with the numbers of those that are wide enough."""
    paths = [str(trace.write(tmp_path / f"rank{rank}.json")) for rank in (0, 1)]
    picture = tmp_path / f"step{ending}"
    timeline.main([*paths, "--picture", str(picture)])
    assert picture.read_bytes().startswith(begins)
    if ending == ".svg":
        words = re.findall(r"<!-- ([^>]*) -->", picture.read_text())
        rows = read(paths[0]).account()["ms"]
        assert {"rank0", "rank1", *rows} <= set(words)


def test_every_row_has_a_colour_of_its_own():
    assert list(timeline_views.COLORS) == ROWS and len(set(timeline_views.COLORS.values())) == len(ROWS)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--picture", "step.pdf"], "--picture step.pdf: the name must end with .svg or .png"),
        (["--page", "step.svg"], "--page step.svg: the name must end with .html"),
    ],
)
def test_other_kinds_of_files_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as refused:
        timeline.main(["rank0.json", *arguments])
    assert refused.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"steps": 1}'])
def test_a_file_that_is_no_trace_is_refused(tmp_path, text):
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match="timeline.py: .*result.json: this is no trace of Paddle's profiler"):
        timeline.main([str(path)])
