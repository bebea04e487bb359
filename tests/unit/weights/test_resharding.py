"""What a launcher can know of a checkpoint without Paddle."""

import sys
from itertools import product
from subprocess import run

import pytest

from paddle_te.weights import Degrees, why_not_resumable
from paddle_te.weights.folder import open_checkpoint
from paddle_te.weights.resharding import saved_degrees
from tests.unit.weights.models import Model
from tests.unit.weights.test_optimizer import save_trained, split_in_buckets


@pytest.mark.parametrize("tp, shards", product((1, 2), (None, 2)))
def test_saved_degrees(tmp_path, rng, tp, shards):
    model, state_of = Model(rng, kv_heads=4), {k: Model(rng, kv_heads=4) for k in ("moment1_0", "moment2_0")}
    for rank in range(tp):
        save_trained(tmp_path, model, state_of, rank, tp, shards)
    found = saved_degrees(open_checkpoint(tmp_path))
    assert found == Degrees(tp, 1, shards or 1)
    words = (["tensor parallel 2"] if tp > 1 else []) + (["sharding 2"] if shards else [])
    assert str(found) == (", ".join(words) or "undivided")


def test_why_not(tmp_path, rng):
    """Without importing Paddle, as the launcher does."""
    save_trained(tmp_path, Model(rng, kv_heads=4), {k: Model(rng, kv_heads=4) for k in ("moment1_0", "moment2_0")})
    split_in_buckets(tmp_path, 2, 64, 4)
    assert why_not_resumable(tmp_path, Degrees()).endswith("trainer_state.json: missing; training cannot go on from "
    "where it was")  # fmt: skip
    for name in ("trainer_state.json", "scheduler.pdparams"):
        (tmp_path / name).touch()
    for degrees in (Degrees(), Degrees(4), Degrees(2, 2), Degrees(1, 2, 8)):
        assert why_not_resumable(tmp_path, degrees) is None
    assert "num_attention_heads=4 cannot be divided" in why_not_resumable(tmp_path, Degrees(3))
    assert "divided into 4 equal chunks" in why_not_resumable(tmp_path, Degrees(1, 2), virtual=2)
    (tmp_path / "optimizer.shard01.pdopt").write_bytes(b"")
    assert "optimizer.shard01.pdopt: truncated" in why_not_resumable(tmp_path, Degrees())
    assert "not a folder" in why_not_resumable(tmp_path / "none", Degrees())
    code = "import sys, paddle_te.weights as w; print(w.why_not_resumable(sys.argv[1], w.Degrees()), *sys.modules)"
    done = run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert "truncated" in done.stdout and "paddle" not in done.stdout.split()
