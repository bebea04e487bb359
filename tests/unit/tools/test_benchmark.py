"""tools/benchmark: the problem, the clockwork, the report and the peers that run without a GPU."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tools.benchmark import layer, peers, report, timing
from tools.benchmark.problem import GPT, QWEN2, QWEN3, SIZES, TINY, Dims, Problem, as_float32

GQA = Dims(2, 24, 32, 48, 4, 2, 500000.0)
OF_QWEN2 = replace(GQA, variant=QWEN2)
OF_QWEN3 = replace(GQA, variant=QWEN3)
OF_GPT = Dims(2, 24, 32, 48, 4, 4, None, variant=GPT)


class FakeClock(timing.HostClock):
    """Time passes only in FakePeer.step()."""

    now = 0.0

    def record(self, stream):
        return self.now

    def elapsed_ms(self, start, stop):
        return stop - start

    def host_us(self):
        return self.now


class FakePeer:
    stream, precision, note = None, "bf16", ""

    def __init__(self, problem=None, device=None, clock=None, durations=(1.0,), log=None, name="", fails_at=None):
        self.clock, self.durations, self.log, self.name, self.fails_at = clock, durations, log, name, fails_at
        self.steps = 0

    def step(self):
        if self.steps == self.fails_at:
            raise MemoryError("no room")
        if self.clock is not None:
            self.clock.now += self.durations[self.steps % len(self.durations)]
        if self.log is not None:
            self.log.append(self.name)
        self.steps += 1

    def release(self):
        pass

    def peak_memory(self):
        return 5_000_000_000


# ---- problem


def test_sizes_are_the_models():
    """Weights of one layer, from the models' published shapes."""
    assert SIZES["7b-b1"].parameters == 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert SIZES["8b-s8192"].parameters == 218_112_000
    assert SIZES["70b-b1"].parameters == 855_654_400
    assert SIZES["qwen2.5-7b"].parameters == 233_057_792
    assert SIZES["gpt-5b"].parameters == 12 * 4096**2 + 13 * 4096


def test_flops_count_every_product():
    dims = GQA
    tokens, d = dims.batch * dims.sequence, dims.head_dim
    products = [(tokens, out, inner) for out, inner in (s for s in dims.shapes.values() if len(s) == 2)]
    products += [(dims.sequence, dims.sequence, d)] * (dims.batch * dims.heads)  # q·kᵀ and p·v, half of each masked
    forward = sum(2 * m * n * k for m, n, k in products)
    assert dims.flops == 3 * forward
    assert replace(dims, documents=4).flops == replace(dims, batch=4 * dims.batch, sequence=dims.sequence // 4).flops


def test_problem_is_bf16_noise_of_the_stated_scale(seed):
    problem = Problem(Dims(2, 64, 128, 256, 4, 2), seed)
    for name, bits in {**problem.weights, "x": problem.x}.items():
        values = as_float32(bits)
        assert bits.dtype == np.uint16 and np.array_equal(values.view(np.uint32) & 0xFFFF, np.zeros_like(values))
        mean, scale = {"ln1": (1, 0.1), "ln2": (1, 0.1), "x": (0, 1)}.get(name, (0, 0.02))
        # 100 seeds: at most 0.2 of the scale off
        assert values.std() == pytest.approx(scale, rel=0.35) and abs(values.mean() - mean) < scale / 2, name
    again, other = Problem(problem.dims, seed), Problem(problem.dims, seed + 1)
    assert np.array_equal(again.weights["qkv"], problem.weights["qkv"])
    assert not np.array_equal(other.weights["qkv"], problem.weights["qkv"])


# ---- timing


def test_time_steps_measures_what_follows_the_warmup():
    clock = FakeClock()
    peer = FakePeer(clock=clock, durations=[100.0, 100.0, 1.0, 2.0, 6.0])
    assert timing.time_steps(clock, peer, iterations=3, warmup=2) == [1.0, 2.0, 6.0]
    peer = FakePeer(clock=clock, durations=[100.0, 1.0, 2.0])
    assert timing.time_enqueue(clock, peer, iterations=2, warmup=1) == [1.0, 2.0]


def test_interleave_takes_turns_and_loses_only_the_failing_peer():
    clock, log, failures = FakeClock(), [], {}
    contestants = {n: FakePeer(clock=clock, log=log, name=n, fails_at=1 if n == "b" else None) for n in "abc"}
    times = timing.interleave(
        lambda peer: timing.time_steps(clock, peer, 1, 0), contestants, 3, lambda n, e: failures.update({n: e})
    )
    assert "".join(log) == "abc" + "ca" + "ac"  # b fails in round 2, which it would have begun
    assert times == {"a": [[1.0]] * 3, "c": [[1.0]] * 3}
    assert isinstance(failures["b"], MemoryError)


def test_summary_is_of_the_rounds_medians():
    summary = timing.summarize([[1.0, 2.0, 90.0], [3.0, 4.0, 5.0], [1.0, 1.0, 1.0]])
    assert (summary["median"], summary["min"], summary["max"]) == (2.0, 1.0, 4.0)
    assert summary["rounds"][0] == [1.0, 2.0, 90.0]


class FakeDriver:
    """The CUDA driver's functions, by ctypes' conventions."""

    def __init__(self, fault=0):
        self.fault, self.alive = fault, 0

    def cuEventCreate(self, event, flags):
        event._obj.value, self.alive = 1 + self.alive, self.alive + 1
        return 0

    def cuEventRecord(self, event, stream):
        self.stream = stream.value
        return 0

    def cuEventElapsedTime(self, ms, start, stop):
        ms._obj.value = 2.5
        return 0

    def cuEventDestroy_v2(self, event):
        self.alive -= 1
        return 0

    def cuCtxSynchronize(self):
        return self.fault

    def cuGetErrorString(self, code, text):
        text._obj.value = b"an illegal memory access was encountered"
        return 0


def test_cuda_clock_frees_its_events_and_reports_faults():
    clock = timing.CudaClock(FakeDriver())
    first, second, third = (clock.record(0xABC0) for _ in range(3))
    # the end of one part is the start of the next
    assert clock.elapsed_ms(first, second) == clock.elapsed_ms(second, third) == 2.5
    assert clock._driver.alive == 3 and clock._driver.stream == 0xABC0
    del first, second, third
    assert clock._driver.alive == 0
    with pytest.raises(RuntimeError, match=r"cuCtxSynchronize: an illegal memory access was encountered \(700\)"):
        timing.CudaClock(FakeDriver(fault=700)).synchronize()


# ---- report


def row(ms, precision="bf16", error=0.005, **more):
    errors = None if error is None else {"y": 0.004, "dx": 0.004, "dqkv": error}
    times = {"median": ms, "min": ms - 0.5, "max": ms + 0.5, "rounds": [[ms]]}
    return {
        "status": "ok",
        "precision": precision,
        "note": "",
        "step_ms": times,
        "peak_bytes": None,
        "error": errors,
    } | more


@pytest.fixture
def result():
    contestants = {
        "hf_bf16": row(12.0, peak_bytes=2_340_000_000),
        "te_torch_fp8_delayed": row(6.25, "fp8_delayed", error=0.1),
        "paddle_te_fp8_delayed": row(6.0, "fp8_delayed", error=0.1),
        "paddle_te_bf16": row(9.0, error=float("nan")),
        "torch_bf16": row(10.0, error=None, note="a note"),
        "te_torch_bf16": {"status": "missing", "reason": "ModuleNotFoundError: no a|b"},
        "torch_compile_bf16": {"status": "failed", "reason": "RuntimeError: out of\nmemory"},
    }
    return {
        "benchmark": "layer",
        "date": "2026-01-02T03:04:05+00:00",
        "command": "python tools/benchmark/layer.py",
        "commit": "abc",
        "hardware": {"name": "NVIDIA H200", "driver_version": "580"},
        "versions": {"python": "3.12"},
        "libraries": {"libcudnn": ["a/libcudnn.so.9"], "libnccl": ["a/libnccl.so.2", "b/libnccl.so.2"]},
        "definitions": ["Time: …"],
        "sizes": {"7b-b1": {"dims": {"batch": 1}, "flops": 6e12, "peers": contestants}},
    }


def test_report_shows_every_peer_and_what_is_wrong(result, tmp_path):
    path = tmp_path / "new" / "layer.json"
    report.write(result, path)
    assert json.loads(path.read_text())["sizes"]["7b-b1"]["peers"]["hf_bf16"]["step_ms"]["rounds"] == [[12.0]]
    lines = path.with_suffix(".md").read_text().splitlines()
    table = {
        line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]] for line in lines if line[:1] == "|"
    }
    assert table["hf_bf16"][:6] == ["12.00", "11.50 to 12.50", "500", "1.00", "", "2.34"]
    assert table["paddle_te_fp8_delayed"][3:5] == ["2.00", "0.96"]
    assert table["paddle_te_bf16"][4] == "" and table["paddle_te_bf16"][6].startswith("**WRONG**")
    assert table["torch_bf16"][6:] == ["not measured: needs PyTorch", "a note"]
    assert table["torch_compile_bf16"][0] == "**failed**: RuntimeError: out of memory"
    assert any("**missing**: ModuleNotFoundError: no a\\|b" in line for line in lines)
    assert "**Loaded twice, so distrust these results: libnccl**" in lines
    assert len({line.replace("\\|", "").count("|") for line in lines if line.startswith("|")}) == 1  # a whole table


def test_a_results_name_says_what_it_is_and_replaces_none(result, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    arguments = SimpleNamespace(output=None, what=None)

    def written():
        path = report.destination(result, arguments, "8B, all sizes")
        report.write(result, path)
        return str(path.relative_to(tmp_path))

    wanted = "benchmarks/layer/2026-01-02_h200x1_8b-all-sizes"
    assert [written() for _ in range(3)] == [f"{wanted}.json", f"{wanted}-2.json", f"{wanted}-3.json"]
    result["hardware"]["gpus"], arguments.what = 4, "head in fp8"
    assert written() == "benchmarks/layer/2026-01-02_h200x4_head-in-fp8.json"
    assert report.destination(result, arguments, "", "launch").parent == tmp_path / "benchmarks/launch"
    result["hardware"] = {"name": "CPU x86_64"}
    assert written() == "benchmarks/layer/2026-01-02_cpu-x86-64_head-in-fp8.json"
    arguments.output = tmp_path / "elsewhere.json"
    assert report.destination(result, arguments, "") == tmp_path / "elsewhere.json"


def test_loaded_libraries_counts_files_of_one_library(tmp_path):
    files = ["/x/y/nvidia/cudnn/lib/libcudnn.so.9", "/usr/lib/arch/libcudnn.so.9.14", "[heap]", "/x/libcudnn_ops.so.9"]
    maps = tmp_path / "maps"
    maps.write_text("".join(f"7f00-7f01 r-xp 00000000 fe:00 12         {name}\n" for name in files + files[:1]))
    found = ["nvidia/cudnn/lib/libcudnn.so.9", "usr/lib/arch/libcudnn.so.9.14"]
    assert report.loaded_libraries(maps) == {"libcudnn": found}


# ---- command line


def test_arguments(capsys):
    arguments = layer.parse_arguments(["--quick", "--sizes", "7b-b1", "--peers", "hf_bf16"])
    assert (arguments.rounds, arguments.iterations, arguments.sizes, arguments.peers) == (2, 5, ["7b-b1"], ["hf_bf16"])
    assert layer.parse_arguments([]).peers == list(peers.PEERS)
    arguments = layer.parse_arguments(["--host", "--peers", "hf_bf16", "paddle_te_bf16", "paddle_te_bf16_lora"])
    assert (arguments.device, arguments.sizes) == ("host", [])
    assert arguments.peers == ["paddle_te_bf16", "paddle_te_bf16_lora"]
    assert type(timing.make_clock(arguments)) is timing.ThreadClock
    for wrong in (["--peers", "tensorflow"], ["--rounds", "0"], ["--sizes", "7b"]):
        with pytest.raises(SystemExit) as stopped:
            layer.parse_arguments(wrong)
        assert stopped.value.code == 2 and wrong[0].strip("-") in capsys.readouterr().err


def absent(problem, device):
    raise ModuleNotFoundError("No module named 'transformer_engine'")


def test_a_run_keeps_its_results_when_peers_fail(monkeypatch, tmp_path):
    contestants = {
        "hf_bf16": FakePeer,
        "te_torch_bf16": absent,
        # built and checked at the first contest (tiny), it dies while it is timed
        "torch_bf16": lambda problem, device: FakePeer(fails_at=layer.STEPS_BEFORE_CHECK + 1),
    }
    for module in (layer, peers):
        monkeypatch.setattr(module, "PEERS", contestants)
    monkeypatch.setattr(layer, "SIZES", {"7b-b1": TINY})
    monkeypatch.setattr(layer, "float32_results", lambda problem, device: None)
    path = tmp_path / "out.json"
    assert layer.main(["--quick", "--device", "cpu", "--output", str(path)]) == 0
    result = json.loads(path.read_text())
    for contest, key in ((result["enqueue"], "step_us"), (result["sizes"]["7b-b1"], "step_ms")):
        assert contest["peers"]["hf_bf16"][key]["median"] >= 0
        assert len(contest["peers"]["hf_bf16"][key]["rounds"]) == 2
        assert contest["peers"]["te_torch_bf16"]["status"] == "missing"
        assert contest["peers"]["torch_bf16"] == {"status": "failed", "reason": "MemoryError: no room"}
    assert result["sizes"]["7b-b1"]["peers"]["hf_bf16"]["peak_bytes"] == 5_000_000_000
    monkeypatch.setattr(layer, "PEERS", {"hf_bf16": absent, "te_torch_bf16": absent, "torch_bf16": absent})
    assert layer.main(["--quick", "--device", "cpu", "--output", str(path)]) == 1


# ---- peers


def layer_in_numpy(x, w, dims):
    """The layer in NumPy float64, from the papers' formulas: heads one by one, RoPE as complex rotation."""
    gelu, with_layernorm = dims.variant.activation == "gelu", dims.variant.normalization == "LayerNorm"

    def norm(t, name):
        if with_layernorm:
            t = t - t.mean(-1, keepdims=True)
        return t / np.sqrt((t**2).mean(-1, keepdims=True) + 1e-5) * w[name] + w.get(f"{name}_bias", 0)

    def head_norm(t, head, name):
        t = t[:, head * dims.head_dim :][:, : dims.head_dim]
        return norm(t, name) if name in w else t

    def linear(t, name):
        return t @ w[name].T + w.get(f"{name}_bias", 0)

    def activate(t):
        if gelu:  # Hendrycks and Gimpel's approximation by tanh
            return t / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3)))
        gate, up = np.split(t, 2, -1)
        return gate / (1 + np.exp(-gate)) * up

    def rotate(t):  # [s, d]: element i pairs with i + d/2
        if dims.rope_base is None:
            return t
        half = dims.head_dim // 2
        angle = np.arange(dims.sequence)[:, None] * dims.rope_base ** (-np.arange(half) / half)
        turned = (t[:, :half] + 1j * t[:, half:]) * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], -1)

    def attention(z):  # [s, hidden]
        d, heads = dims.head_dim, []
        q, k, v = np.split(linear(z, "qkv"), [dims.hidden, dims.hidden + dims.kv_heads * d], -1)
        for h in range(dims.heads):
            g = h * dims.kv_heads // dims.heads
            scores = rotate(head_norm(q, h, "q_norm")) @ rotate(head_norm(k, g, "k_norm")).T / math.sqrt(d)
            p = np.exp(np.where(np.tri(dims.sequence), scores, -np.inf))
            heads.append(p / p.sum(-1, keepdims=True) @ v[:, g * d :][:, :d])
        return linear(np.concatenate(heads, -1), "proj")

    h = x + np.stack([attention(sample) for sample in norm(x, "ln1")])
    return h + linear(activate(linear(norm(h, "ln2"), "fc1")), "fc2")


def check_against_numpy(results, problem, seed):
    """y directly, each gradient by a central difference along a random direction."""
    tensors = {name: as_float32(bits).astype(np.float64) for name, bits in {"x": problem.x, **problem.weights}.items()}
    dy = as_float32(problem.dy).astype(np.float64)
    run = lambda t: layer_in_numpy(t["x"], t, problem.dims)  # noqa: E731
    assert np.allclose(results["y"].numpy(), run(tensors), atol=1e-5)
    rng, step = np.random.default_rng(seed), 1e-5
    for name, value in tensors.items():
        gradient = results[f"d{name}"].numpy().astype(np.float64)
        direction = gradient / np.linalg.norm(gradient) + rng.standard_normal(value.shape) / math.sqrt(value.size)
        moved = [(run({**tensors, name: value + sign * step * direction}) * dy).sum() for sign in (1, -1)]
        assert (gradient * direction).sum() == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-4), name


@pytest.mark.parametrize(
    "dims",
    [replace(GQA, kv_heads=4), GQA, replace(GQA, documents=3), OF_QWEN2, OF_QWEN3, OF_GPT],
    ids=["llama", "llama-gqa", "llama-packed", "qwen2", "qwen3", "gpt"],
)
def test_paddle_peer_computes_the_problem(seed, dims, monkeypatch):
    """Weights, angles and gradients reach the right places; te differs from this in its kernels alone."""
    problem, documents = Problem(dims, seed), dims.documents
    peer = peers.PaddleTE(problem, backend="paddle", device="cpu", dtype="float32")
    monkeypatch.setattr(peer, "to_torch", lambda tensor: tensor)
    peer.step()
    results, alone = peer.results(), problem.unpacked
    assert alone.x.shape == (2 * documents, 24 // documents, 32)
    check_against_numpy(results | {name: results[name].reshape(alone.x.shape) for name in ("y", "dx")}, alone, seed)
    peer.release()
    assert peer.x.grad is None and all(parameter.grad is None for parameter in peer.module_parameters)
    assert peer.peak_memory() is None


def test_paddle_peer_without_a_gpu_says_what_to_do():
    import paddle

    if paddle.device.get_all_custom_device_type() or paddle.is_compiled_with_cuda():
        pytest.skip("Paddle has a GPU here")
    with pytest.raises(RuntimeError, match="CUSTOM_DEVICE_ROOT"):
        peers.PaddleTE(Problem(GQA, 0))


@pytest.mark.parametrize(
    "name, dims",
    [("torch_bf16", GQA), ("hf_bf16", GQA), ("torch_bf16", OF_QWEN2), ("torch_bf16", OF_QWEN3), ("torch_bf16", OF_GPT)],
)
def test_torch_peers_compute_the_problem(seed, name, dims):
    pytest.importorskip("torch", reason="these peers need PyTorch")
    if name.startswith("hf"):
        pytest.importorskip("transformers", reason="this peer needs Hugging Face's transformers")
    problem = Problem(dims, seed)
    check_against_numpy(peers.PEERS[name](problem, device="cpu", dtype="float32").results(), problem, seed)
    reference = layer.float32_results(problem, "cpu")
    errors = layer.relative_errors(peers.PEERS[name](problem, device="cpu").results(), reference)
    assert all(1e-5 < error < report.ERROR_LIMITS["bf16"] for error in errors.values()), errors


def test_te_weight_order_has_an_inverse(seed):
    """TE's interleaved qkv: group after group, its q heads, its k and its v head."""
    torch = pytest.importorskip("torch", reason="this peer needs PyTorch")
    peer = object.__new__(peers.TETorch)
    peer.torch, peer.dims = torch, GQA
    qkv = torch.arange(GQA.shapes["qkv"][0] * GQA.hidden).view(GQA.shapes["qkv"])
    heads = qkv.view(-1, GQA.head_dim, GQA.hidden)  # q0 q1 q2 q3 k0 k1 v0 v1
    assert torch.equal(peer._interleave(qkv), heads[[0, 1, 4, 6, 2, 3, 5, 7]].view_as(qkv))
    assert torch.equal(peer._stack(peer._interleave(qkv)), qkv)
