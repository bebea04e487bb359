"""tools/benchmark/step.py: a step trains, its parts add up to it, and a run leaves its tables."""

import gc
import json
import math
import weakref
from dataclasses import replace
from functools import partial

import pytest

from tools.benchmark import floors, step, timing
from tools.benchmark.problem import QWEN2, QWEN3, Dims

SMALL = step.Size(Dims(2, 24, 64, 112, 4, 2), 96, 2)
OF_QWEN2 = replace(SMALL, dims=replace(SMALL.dims, variant=QWEN2), family="qwen2")
OF_QWEN3 = replace(SMALL, dims=replace(SMALL.dims, variant=QWEN3, kv_channels=32), family="qwen3")
OF_MIXTRAL = replace(SMALL, family="mixtral", mixture=step.Mixture(4, 2))
OF_QWEN3_MOE = replace(OF_QWEN3, family="qwen3_moe", mixture=step.Mixture(8, 2, (("norm_topk_prob", True),)))
CPU = dict(device="cpu", dtype="float32")
FP8_HEAD = dict(use_fp8=True, fp8_lm_head=True)


def keep_first_batch(peer):
    """All micro-batches are the first one."""
    peer.tokens = peer.tokens[:1].expand(peer.tokens.shape)


@pytest.fixture
def peer():
    return step.PaddleStep(SMALL, backend="paddle", **CPU)


@pytest.mark.parametrize("size", [SMALL, OF_QWEN2, OF_QWEN3], ids=["llama", "qwen2", "qwen3"])
def test_parameters_and_operations_are_the_models(size):
    """6 per token and weight of the GEMMs; attention's products besides."""
    parameters = dict(step.PaddleStep(size, backend="paddle", **CPU).model.named_parameters())
    weights = {name: weight for name, weight in parameters.items() if weight.ndim == 2}
    del weights[f"{size.family}.embed_tokens.weight"]
    multiplied = sum(math.prod(weight.shape) for weight in weights.values())
    attention = size.layers * 3 * 4 * 2 * 24**2 * 4 * size.dims.head_dim // 2
    assert size.flops == 6 * size.tokens * multiplied + attention
    biases = [name for name in parameters if name.endswith("bias")]
    assert len(biases) == (size.layers if size.family == "qwen2" else 0)


@pytest.mark.parametrize("size", [OF_MIXTRAL, OF_QWEN3_MOE], ids=["mixtral", "qwen3_moe"])
def test_operations_of_experts_are_those_of_a_tokens(size):
    """FLOP count the experts that a token gets, and the router; forced balance gives each expert as many tokens."""
    peer = step.PaddleStep(size, backend="paddle", **CPU)
    weights = {name: weight for name, weight in peer.model.named_parameters() if weight.ndim > 1}
    del weights[f"{size.family}.embed_tokens.weight"]
    share = {
        name: size.mixture.topk / size.mixture.experts if weight.ndim == 3 else 1 for name, weight in weights.items()
    }
    multiplied = sum(share[name] * math.prod(weight.shape) for name, weight in weights.items())
    assert size.flops == 6 * size.tokens * multiplied + size.layers * 3 * 4 * 2 * 24**2 * 4 * size.dims.head_dim // 2
    peer.step()
    load = getattr(peer.model, size.family).layers[0].transformer.moe_layer.router.statistics.tokens_per_expert
    assert load.tolist() == [48 * 2 / size.mixture.experts] * size.mixture.experts


@pytest.mark.parametrize("name, layers, bf16, fp8", [
    ("mixtral-s4096", 8, 34000, 54000),
    ("olmoe-s4096", 16, 77600, 109000),
    ("qwen3-30b-s4096", 16, 65500, 82300),
])  # fmt: skip
def test_floors_of_an_h200(name, layers, bf16, fp8):
    """Tokens/s of steps of 16 micro-batches of 16,384 tokens, computed by hand from the published sizes."""
    size = step.SIZES[name]
    assert size.layers == layers
    size = replace(size, dims=replace(size.dims, batch=4), micro_batches=16)
    found = size.floor_ms(floors.bandwidth_of("NVIDIA H200"))
    assert [size.tokens / found[precision] * 1e3 for precision in ("bf16", "fp8")] == pytest.approx(
        [bf16, fp8], rel=2e-3
    )
    assert floors.bandwidth_of("NVIDIA H100 80GB HBM3") < 4e12 and floors.bandwidth_of("NVIDIA A100") is None


def test_batches_differ_and_labels_are_the_next_tokens(peer, monkeypatch):
    calls = []
    monkeypatch.setattr(peer, "model", lambda tokens, labels: calls.append((tokens.numpy(), labels.numpy())) or [0])
    for _ in range(2):
        peer.loss(None)
    for tokens, labels in calls:
        assert tokens.shape == (2, 24) and (tokens[:, 1:] == labels[:, :-1]).all()
    assert (calls[0][0] != calls[1][0]).any()


@pytest.mark.parametrize("size", [SMALL, OF_QWEN3, OF_MIXTRAL], ids=["llama", "qwen3", "mixtral"])
def test_it_trains(size):
    peer = step.PaddleStep(size, backend="paddle", **CPU)
    keep_first_batch(peer)
    losses = []
    for _ in range(5):
        peer.step()
        losses.append(float(peer.last_loss))
    assert abs(losses[0] - math.log(SMALL.vocabulary)) < 0.2
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.01


def test_micro_batches_are_one_step(peer):
    """The same batch twice, each with half the weight, is that batch once."""
    once = step.PaddleStep(SMALL, backend="paddle", **CPU)
    twice = step.PaddleStep(replace(SMALL, micro_batches=2), backend="paddle", **CPU)
    twice.model.set_state_dict(once.model.state_dict())
    for peer in (once, twice):
        keep_first_batch(peer)
    for _ in range(3):
        once.step()
        twice.step()
        assert float(twice.last_loss) == pytest.approx(float(once.last_loss), rel=1e-5)
    assert twice.size.tokens == 2 * SMALL.tokens and twice.size.flops == 2 * SMALL.flops
    seen = []
    twice.mark = seen.append
    twice.step()
    assert tuple(seen) == step.PARTS[:6] * 2 + step.PARTS[6:]


def test_its_memory_is_free_for_the_next_peer():
    peer = step.PaddleStep(SMALL, backend="paddle", **CPU)
    step.time_parts(timing.HostClock(), peer, 2)
    gone = weakref.ref(peer), weakref.ref(peer.model.lm_head.weight)
    del peer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.parametrize("flags", [{}, dict(backend="none"), dict(use_fused_linear_cross_entropy=True), FP8_HEAD])
def test_every_part_is_marked_once_and_in_order(flags):
    peer = step.PaddleStep(SMALL, **{"backend": "paddle", **CPU, **flags})
    for _ in range(2):
        seen = []
        peer.mark = seen.append
        peer.step()
        assert tuple(seen) == step.PARTS


def test_parts_add_up_to_the_step():
    peer = step.PaddleStep(SMALL, backend="paddle", **CPU)

    class Clock(timing.HostClock):
        now = 0

        def record(self, stream):
            self.now += 1
            return self.now * 10**6  # 1 ms passes at each mark

    parts = step.time_parts(Clock(), peer, 3)
    assert parts == {part: [1.0] * 3 for part in step.PARTS}
    peer.size = replace(SMALL, micro_batches=2)
    parts = step.time_parts(Clock(), peer, 3)
    assert parts == {part: [2.0 if part in step.PARTS[:6] else 1.0] * 3 for part in step.PARTS}


def test_a_run_leaves_its_tables(monkeypatch, tmp_path):
    peers = {
        "paddle_te_bf16": (partial(step.PaddleStep, backend="paddle", dtype="float32"), "runs"),
        "paddle_te_fp8": (partial(step.PaddleStep, backend="nothing"), "fails"),
    }
    monkeypatch.setattr(step, "PEERS", peers)
    monkeypatch.setattr(step, "SIZES", {"small": SMALL})
    path = tmp_path / "new/step.json"
    arguments = ["--quick", "--peers", *peers, "--device", "cpu", "--layers", "1", "--output", str(path)]
    assert step.main(arguments) == 0
    size = json.loads(path.read_text())["sizes"]["small"]
    row = size["peers"]["paddle_te_bf16"]
    assert size["layers"] == 1 and size["peers"]["paddle_te_fp8"]["status"] == "failed"
    assert row["loss"] == pytest.approx([math.log(96)] * 2, abs=0.2) and len(row["step_ms"]["rounds"][0]) == 3
    table = path.with_suffix(".md").read_text()
    assert "1 layers, vocabulary 96" in table and "**failed**" in table
    line = next(line for line in table.splitlines() if line.startswith("| **all parts** |"))
    assert line.split("|")[2].strip() == f"{sum(part['median'] for part in row['parts_ms'].values()):.2f} (100%)"


class Roomy(step.TrainingStep):
    """A peer whose memory has room for three layers."""

    def step(self):
        if self.size.layers > 3:
            raise RuntimeError("ResourceExhaustedError: Out of memory error on nvgpu:0. Cannot allocate 2GB")

    def peak_memory(self):
        return None


def test_as_many_layers_as_all_peers_have_room_for(monkeypatch):
    """A peer that fails for another reason than memory does not lower the number of layers."""

    def broken(size, device):
        raise ValueError("no GPU")

    monkeypatch.setattr(step, "PEERS", {"roomy": (lambda size, device: Roomy(size), ""), "broken": (broken, "")})
    arguments = step.parse_arguments(["--peers", "broken", "roomy", "--device", "cpu", "--layers", "5", "--fit"])
    found = step.fitting(arguments, timing.HostClock(), replace(SMALL, layers=5))
    assert found == replace(SMALL, layers=3)
    for layers in (3, 4, 40):
        assert step.fitting(arguments, timing.HostClock(), replace(SMALL, layers=layers)).layers == 3
    arguments.peers = ["broken"]
    assert step.fitting(arguments, timing.HostClock(), replace(SMALL, layers=5)).layers == 5


def test_each_model_is_compared_with_its_twin_of_tes_pytorch_layers():
    """A peer is not compared with another precision, and not with a peer that failed."""
    times = dict(
        paddle_te_bf16=90.0, te_torch_bf16=99.0, paddle_te_fp8=60.0, paddle_te_fp8_head=50.0, te_torch_fp8_head=65
    )
    peers = {
        name: dict(
            status="ok",
            precision="bf16",
            step_ms=dict(median=ms, min=ms, max=ms),
            host_us=dict(median=1.0),
            peak_bytes=1,
            loss=[1, 1],
        )
        for name, ms in times.items()
    }
    peers["te_torch_fp8"] = dict(status="failed", reason="no GPU")
    lines = step._step_table(dict(peers=peers, tokens=SMALL.tokens, flops=SMALL.flops))
    column = lines[0].split(" | ").index("× TE's PyTorch")
    cells = {line.split(" | ")[0][2:]: line.split(" | ")[column] for line in lines[2:-1] if "failed" not in line}
    assert cells == dict.fromkeys(times, "") | dict(paddle_te_bf16="1.10", paddle_te_fp8_head="1.30")


def test_unknown_peers_are_refused(capsys):
    with pytest.raises(SystemExit):
        step.parse_arguments(["--peers", "te"])
    assert "paddle_te_fp8" in capsys.readouterr().err
