"""Files are compared with their folder's manifest wherever they are read; or a line says that they were not."""

import dataclasses

import numpy as np
import pytest

from paddle_te import manifest
from paddle_te.weights import CheckpointError, convert
from paddle_te.weights.command import main
from paddle_te.weights.verification import Verification
from tests.unit.runs.completed import complete
from tests.unit.weights.models import Model, save_config, save_single


@pytest.fixture
def folder(tmp_path, rng):
    """A complete checkpoint, with an optimizer's state beside the weights."""
    model = Model(rng)
    model.native = {name: rng.normal(size=weight.shape).astype("f") for name, weight in model.native.items()}
    save_single(tmp_path / "in", model.te(), model.dtype)
    save_config(tmp_path / "in", model)
    (tmp_path / "in" / "optimizer.pdopt").write_bytes(b"moments")
    complete(tmp_path / "in")
    return tmp_path / "in"


def flip(path, place=None):
    """One bit, in the middle of a file, where weights have their numbers, unless a place is given."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    path.write_bytes(content)


def outcome(verification, folder):
    """(whether it was compared, in words); or the error."""
    try:
        found = verification.check(folder)
    except CheckpointError as error:
        return str(error)
    return found.compared, found.words


@pytest.mark.parametrize("name", ["model_state.pdparams", "config.json"])
def test_a_flipped_bit(folder, tmp_path, name):
    flip(folder / name)
    with pytest.raises(CheckpointError, match=f"in is damaged.*{name} has another checksum"):
        convert(folder, tmp_path / "out", "te2pd", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_step_than_its_name_says(folder, tmp_path):
    complete(folder, {"step": 4})
    renamed = folder.rename(tmp_path / "checkpoint-9")
    said = "its folder's name says step 9, manifest.json says step 4"
    with pytest.raises(CheckpointError, match=said):
        convert(renamed, tmp_path / "out", "te2pd", progress=False)
    right = renamed.rename(tmp_path / "checkpoint-4")
    assert outcome(Verification(), right) == (True, "sizes and checksums agree with its manifest")
    renamed.symlink_to(right)
    assert "its folder's name says step 9, the folder that it links to says step 4" in outcome(Verification(), renamed)


def test_a_flipped_bit_that_the_user_takes(folder, tmp_path):
    flip(folder / "model_state.pdparams")
    told = []
    convert(folder, tmp_path / "out", "te2pd", verify_checkpoint="none", progress=False, tell=told.append)
    assert told == [f"{folder}: not compared with its manifest.json (--verify_checkpoint none)"]
    assert outcome(Verification("size"), folder) == (True, "sizes agree with its manifest")


def test_what_only_training_reads_is_not_waited_for(folder):
    flip(folder / "optimizer.pdopt", 0)
    (folder / "optimizer.pdopt").unlink()
    found = Verification().check(folder)
    assert found.compared and found.files == 2
    assert found.size == sum((folder / name).stat().st_size for name in ("model_state.pdparams", "config.json"))


@pytest.mark.parametrize("damage, message", [
    (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    (lambda f: (f / "model_state.pdparams").write_bytes(b"short"), "model_state.pdparams has 5 bytes instead of"),
    (lambda f: (f / "model_state.tp00.pdparams").write_bytes(b""), "model_state.tp00.pdparams was not saved with it"),
    (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    (lambda f: flip(f / "manifest.json"), "manifest.json is not the one that .checkpoint_done names"),
    (lambda f: (f / ".checkpoint_done").unlink(), "and not its mark .checkpoint_done"),
], ids=["missing", "short", "foreign", "no manifest", "manifest", "no mark"])  # fmt: skip
def test_other_damages(folder, damage, message):
    damage(folder)
    assert message in outcome(Verification(), folder)


def test_without_a_manifest(folder):
    told = []
    (folder / "manifest.json").unlink()
    (folder / ".checkpoint_done").write_bytes(b"")  # an older version's
    assert outcome(Verification(tell=told.append), folder) == (False, "without a manifest") and not told


def test_checksums_that_were_not_compared(folder, tmp_path):
    convert(folder, tmp_path / "pd", "te2pd", checksums=True, progress=False)
    told = []
    convert(tmp_path / "pd", tmp_path / "te", "pd2te", progress=False, tell=told.append)
    assert told == [f"{tmp_path / 'pd'}: not compared with its checksums.json; paddle-te convert --verify does so"]
    told.clear()
    convert(tmp_path / "pd", tmp_path / "again", "pd2te", verify=True, progress=False, tell=told.append)
    assert not told


def test_ranks_share_the_files(folder):
    """Each reads its share, and all refuse what one of them has found."""
    flip(folder / "config.json")
    found = []
    for rank in range(2):
        try:
            Verification(rank=rank, ranks=2, gather=lambda mine: found.append(mine) or [mine]).check(folder)
        except CheckpointError:
            pass
    assert sorted(found) == [[], ["config.json has another checksum"]]
    with pytest.raises(CheckpointError, match="config.json has another checksum"):
        Verification(rank=0, ranks=2, gather=lambda mine: found).check(folder)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_that_are_not_finite(tmp_path, rng, dtype, capsys, monkeypatch):
    """The converter keeps their bits, and says so."""
    model = Model(rng, dtype)
    bits = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}[dtype]  # infinity
    for name, weight in model.native.items():
        model.native[name] = np.zeros_like(weight)
        if "v_proj" in name or name == "llama.norm.weight":
            size = f"u{weight.itemsize}"
            model.native[name].view(size)[-1] = bits + ("norm" in name)  # the norm's is NaN
    save_single(tmp_path / "pd", model.native, dtype)
    save_config(tmp_path / "pd", model)
    words = f"convert --mode pd2te --input_ckpt_path {tmp_path}/pd --output_ckpt_path {tmp_path}/te"
    monkeypatch.setattr("sys.argv", words.split())
    main()
    assert (
        "3 of 15 tensors hold NaN or infinity, as they did before: "
        "llama.layers.0.transformer.self_attention.layernorm_qkv.weight, "
        "llama.layers.1.transformer.self_attention.layernorm_qkv.weight, llama.norm.weight\n"
    ) in capsys.readouterr().err


def read(folder, error=None, **settings):
    """The Comparison beside a block that reads, or fails with an error."""
    with Verification(**settings).beside(folder) as comparison:
        assert comparison.verified is None
        if error:
            raise error
    return comparison.verified


def test_beside_a_block_that_reads(folder):
    verified = read(folder)
    assert verified == dataclasses.replace(Verification().check(folder), seconds=verified.seconds)
    assert verified.compared and verified.seconds > 0
    with pytest.raises(KeyError):
        read(folder, KeyError("of the reader"))
    flip(folder / "model_state.pdparams")
    with pytest.raises(CheckpointError, match="model_state.pdparams has another checksum"):
        read(folder)


def test_a_block_that_fails_by_another_processs_file(folder):
    """Each process compares its share, and all of it where reading failed: the others may never come so far."""
    shares = [manifest.share({"config.json": 1, "model_state.pdparams": 9}, rank, 2) for rank in (0, 1)]
    assert shares == [["model_state.pdparams"], ["config.json"]]
    flip(folder / "model_state.pdparams")
    with pytest.raises(CheckpointError, match="model_state.pdparams has another checksum") as raised:
        read(folder, ValueError("no pickle"), rank=1, ranks=2)
    assert isinstance(raised.value.__cause__, ValueError)
