"""Damaged checkpoints: every kind of file, each kind of damage, and the right answer to it."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_te import manifest
from paddle_te.manifest import COMPLETE_MARK, MANIFEST, Manifest, file_names, records
from paddle_te.options.training import LEVELS
from paddle_te.runs import verify
from paddle_te.runs.checkpoints import is_complete
from paddle_te.weights import CheckpointError
from paddle_te.weights.contents import read_state
from tests.pretraining import run
from tests.unit.runs.completed import complete
from tests.unit.runs.hostile import assert_it_works, hostile_pickle

MODEL = Path(__file__).parents[2] / "model"
FLAGS = dict(model_name_or_path=MODEL, transformer_engine_backend="paddle", gradient_accumulation_steps=1)
FP8 = dict(use_fp8="true", fp8_amax_history_len=2)
COMMON = ["config.json", "generation_config.json", "rng_state.pth", "scheduler.pdparams", "trainer_state.json"]
COMMON += ["training_args.bin", MANIFEST, COMPLETE_MARK]
KINDS = {
    "plain": [*COMMON, "model_state.pdparams", "optimizer.pdopt", "fp8_state.pp00.pdparams", "saved_signal_0"],
    "unified": [
        *("model-00001-of-00001.safetensors", "model.safetensors.index.json"),
        *("optimizer-00001-of-00001.safetensors", "optimizer.safetensors.index.json"),
    ],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{"plain", "unified": the folder of a checkpoint that a run of one step has saved}."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        run(patch, folder / "plain", **FLAGS | FP8, max_steps=1, save_steps=1)
        run(patch, folder / "unified", **FLAGS, max_steps=1, save_steps=1, unified_checkpoint=1)
    return {name: folder / name / "checkpoint-1" for name in KINDS}


@pytest.fixture
def copy(saved, tmp_path):
    def make(name):
        return Path(shutil.copytree(saved[name], tmp_path / "checkpoint-1"))

    return make


def test_all_kinds_of_files_are_in_the_table(saved):
    for name, kinds in KINDS.items():
        names = {path.name for path in saved[name].iterdir()}
        assert set(kinds) <= names and not (names - set(kinds) - set(COMMON) - {"saved_signal_0"})
        assert verify.damage(saved[name]) == []


def truncated(path, generator):
    content = path.read_bytes()
    path.write_bytes(content[: generator.integers(len(content))])


def emptied(path, generator):
    path.write_bytes(b"")


def flipped(path, generator):
    """One bit."""
    content = bytearray(path.read_bytes())
    content[generator.integers(len(content))] ^= 1 << generator.integers(8)
    path.write_bytes(content)


def removed(path, generator):
    path.unlink()


DAMAGES = (truncated, emptied, flipped, removed)
CASES = [(name, kind, hurt) for name, kinds in KINDS.items() for kind in kinds for hurt in DAMAGES]


def answer(kind, hurt):
    if kind == MANIFEST:
        return f"{MANIFEST} is missing" if hurt is removed else f"{MANIFEST} is not the one that {COMPLETE_MARK} names"
    if kind == COMPLETE_MARK:
        return f"{MANIFEST} is not the one that {COMPLETE_MARK} names"
    return f"{kind} " + {removed: "is missing", flipped: "has another checksum"}.get(hurt, "has ")


@pytest.mark.parametrize("name, kind, hurt", CASES, ids=lambda value: getattr(value, "__name__", value))
def test_every_damage_has_its_answer(copy, seed, name, kind, hurt):
    folder = copy(name)
    hurt(folder / kind, np.random.default_rng(seed))
    if kind == COMPLETE_MARK and hurt is removed:
        assert not is_complete(folder)
        assert verify.verify(folder).wrong == ["not complete: training stopped while it was written"]
        return
    assert is_complete(folder)
    (wrong,) = verify.damage(folder)
    assert wrong.startswith(answer(kind, hurt))
    if hurt is not flipped or kind in (MANIFEST, COMPLETE_MARK):
        assert verify.damage(folder, "size") == [wrong], "sizes alone tell, without a file being read"


@pytest.mark.parametrize("kind", sorted({*KINDS["plain"], *KINDS["unified"]} - {MANIFEST, COMPLETE_MARK}))
@pytest.mark.parametrize("hurt", [truncated, emptied])
def test_without_a_manifest_what_cannot_be_read_is_found(copy, seed, kind, hurt):
    """As of an older version. Files that nobody reads stay unread."""
    folder = copy("plain" if kind in KINDS["plain"] else "unified")
    (folder / MANIFEST).unlink()
    (folder / COMPLETE_MARK).write_bytes(b"")
    assert verify.damage(folder) == []
    hurt(folder / kind, np.random.default_rng(seed))
    read = kind not in ("training_args.bin", "saved_signal_0")
    assert [kind in line for line in verify.damage(folder)] == [True] * read


def test_without_a_manifest_the_trainers_state_is_needed(copy):
    folder = copy("plain")
    (folder / MANIFEST).unlink()
    (folder / COMPLETE_MARK).write_bytes(b"")
    (folder / "trainer_state.json").unlink()
    assert verify.damage(folder) == ["trainer_state.json is missing"]


def test_a_file_that_was_not_saved_with_it(copy):
    """Such as another run's scaling factors: a run loads whatever has the right name."""
    folder = copy("plain")
    shutil.copy(folder / "scheduler.pdparams", folder / "fp8_state.pp01.pdparams")
    (folder / "notes.txt").write_text("a user's own")
    assert verify.damage(folder, "size") == ["fp8_state.pp01.pdparams was not saved with it"]


def test_none_asks_the_manifest_only(copy):
    folder = copy("plain")
    (folder / "config.json").write_text("{}")
    assert verify.damage(folder, "none") == [] and len(verify.damage(folder, "size")) == 1


def test_ranks_share_the_reading(copy):
    folder = copy("plain")
    for kind in ("model_state.pdparams", "config.json"):
        flipped(folder / kind, np.random.default_rng(0))
    found = [verify.damage(folder, rank=rank, ranks=3) for rank in range(3)]
    assert sorted(line.split()[0] for lines in found for line in lines) == ["config.json", "model_state.pdparams"]
    names = file_names(folder)
    shares = [manifest.share(dict.fromkeys(names, 1), rank, 3) for rank in range(3)]
    assert sorted(name for part in shares for name in part) == names


LOADED = ["model_state.pdparams", "optimizer.pdopt", "scheduler.pdparams", "scaler.pdparams", "rng_state.pth"]


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("kind", [*LOADED, "fp8_state.pp00.pdparams", "lora_model_state.pdparams"])
def test_hostile_pickles_are_refused_and_not_run(copy, tmp_path, kind, with_manifest):
    """Whoever sends the folder sends a manifest that agrees, too."""
    assert_it_works(tmp_path)
    folder = copy("plain")
    (folder / kind).write_bytes(hostile_pickle(tmp_path / "ran"))
    (folder / MANIFEST).unlink()
    (folder / COMPLETE_MARK).write_bytes(b"")
    if with_manifest:
        complete(folder)
    for level in LEVELS:
        (wrong,) = verify.damage(folder, level)
        assert f"{kind}: refused: it holds posix.system" in wrong and "it was not run" in wrong
    assert not (tmp_path / "ran").exists()


def test_an_index_names_safetensors_of_its_folder_only(copy, tmp_path):
    folder = copy("unified")
    path = folder / "optimizer.safetensors.index.json"
    index = json.loads(path.read_text())
    for name in ("../other.safetensors", "optimizer.pdopt", 7):
        path.write_text(json.dumps(index | {"weight_map": {"a": name}}))
        (folder / MANIFEST).unlink(missing_ok=True)
        complete(folder)
        (wrong,) = verify.damage(folder)
        assert str(name) in wrong and "no .safetensors file of this folder" in wrong


def test_the_manifest_says_what_it_is(saved):
    found = manifest.read(saved["plain"])
    assert found.files == records(saved["plain"], file_names(saved["plain"]))
    assert found.run["step"] == 1 and found.run["data"]["source"] == "random tokens"
    assert (
        found.run["model"]["num_hidden_layers"] == json.loads((MODEL / "config.json").read_text())["num_hidden_layers"]
    )
    assert found.run["model"]["weights"] == "Transformer Engine's"
    assert found.run["layout"]["tensor_parallel_degree"] == 1
    assert Manifest(found.files, found.run).text() == (saved["plain"] / MANIFEST).read_bytes()


def test_a_manifest_of_a_later_version(copy, monkeypatch):
    folder = copy("plain")
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "VERSION", 2)
        complete(folder)
    assert "is of version 2, this paddle_te reads 1" in verify.damage(folder)[0]


def sealed(folder, content):
    """A checkpoint whose manifest holds this and is the one that the mark names."""
    text = json.dumps(content).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / COMPLETE_MARK).write_text(manifest.seal(text))


def places(content, path=()):
    """The paths of all values in nested dicts and lists."""
    yield path
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        yield from places(value, (*path, key))


def changed(content, path, value):
    """A copy with another value at a path."""
    if not path:
        return value
    copy = json.loads(json.dumps(content))
    *outer, last = path
    inner = copy
    for key in outer:
        inner = inner[key]
    inner[last] = value
    return copy


ODD = (None, True, -1, 1.5, "text", [], {}, [1], {"x": 1}, 2**70, float("nan"))


def test_a_manifest_of_another_form_is_damaged_and_nothing_worse(copy):
    folder = copy("plain")
    content = json.loads((folder / MANIFEST).read_text())
    for path in places(content):
        for odd in ODD:
            sealed(folder, changed(content, path, odd))
            of_its_form = path[:1] == ("run",) or path[-1:] == ("xxh3_128",) and odd == "text"
            assert manifest.damage(folder, "size") or of_its_form, (path, odd)
    for text in (b"", b"[" * 10**5, b"\xff\xfe", b"7", b'{"version": 1'):
        (folder / MANIFEST).write_bytes(text)
        (folder / COMPLETE_MARK).write_text(manifest.seal(text))
        assert verify.damage(folder)[0].startswith(MANIFEST), text


@pytest.mark.parametrize("name", ["files.model_state.pdparams.mode", "run.model_state", "owner"])
def test_a_name_that_a_manifest_does_not_have(copy, name):
    folder = copy("plain")
    content = json.loads((folder / MANIFEST).read_text())
    where = content
    if name.startswith("files"):
        where = content["files"]["model_state.pdparams"]
    elif name.startswith("run"):
        where = content["run"]
    where[name.rpartition(".")[2]] = 1
    sealed(folder, content)
    assert verify.damage(folder) == [f"{MANIFEST}: {name} is not known"]


def test_a_trainer_state_of_another_form_is_damaged(copy):
    folder = copy("plain")
    path = folder / "trainer_state.json"
    state = json.loads(path.read_text())

    def told(name, value):
        path.write_text(json.dumps(state | {name: value}))
        try:
            return str(read_state(folder))
        except CheckpointError as error:
            return str(error)

    for name in state:
        for odd in ODD:
            assert told(name, odd)
    assert told("global_step", -1) == f"{path}: global_step is -1: it must be a whole number of at least 0"
    assert (
        told("consumed_samples", "text")
        == f"{path}: consumed_samples is 'text': it must be a whole number of at least 0 or null"
    )
    assert told("epoch", float("nan")) == f"{path}: epoch is nan: it must be a number of at least 0 or null"
    assert told("steps", 3) == f"{path}: steps is not known"


def test_a_checkpoint_is_of_the_step_that_its_name_says(copy):
    folder = copy("plain")
    assert verify.damage(folder) == []
    renamed = folder.rename(folder.with_name("checkpoint-9"))
    (wrong,) = verify.damage(renamed)
    assert wrong.startswith("its folder's name says step 9, manifest.json says step 1, trainer_state.json says step 1")
    assert verify.damage(renamed.rename(folder.with_name("best"))) == []  # a name that says no step


@pytest.mark.parametrize("step", [0, 2, 10])
def test_a_trainer_state_of_another_step_than_the_manifests(copy, step):
    folder = copy("plain")
    path, run_values = folder / "trainer_state.json", manifest.read(folder).run
    path.write_text(json.dumps(json.loads(path.read_text()) | {"global_step": step}))
    complete(folder, run_values)
    assert f"trainer_state.json says step {step}" in verify.damage(folder)[0]


def test_the_command(copy, saved, tmp_path, capsys):
    folder = copy("plain")
    assert verify.main([str(folder)]) == 0
    assert verify.main([str(tmp_path)]) == 0 and f"{folder}  good" in capsys.readouterr().out
    flipped(folder / "model_state.pdparams", np.random.default_rng(0))
    (tmp_path / "checkpoint-2").mkdir()
    assert verify.main([str(tmp_path), str(saved["unified"])]) == 1
    table = capsys.readouterr().out
    assert [line.split()[1] for line in table.splitlines()] == ["state", "damaged", "damaged", "good"]
    assert "model_state.pdparams has another checksum" in table and "not complete" in table
    assert verify.main([str(folder), "--level", "size"]) == 0
    (tmp_path / "run/output").mkdir(parents=True)
    folder.rename(tmp_path / "run/output" / folder.name)
    assert verify.main([str(tmp_path / "run"), "--level", "size"]) == 0  # as inspect and compare take a run
    assert verify.main([str(tmp_path / "no")]) == 2 and "no such folder" in capsys.readouterr().err


def module(state):
    return next(iter(state["modules"].values()))


def drop(key, part):
    """What takes a key out of that part of a state."""

    def change(state):
        del part(state)[key]

    return change


def whole(state):
    return state


def forward(state):
    return module(state)["forward"]


FP8_STATE, SCHEDULE, RANDOM = "fp8_state.pp00.pdparams", "scheduler.pdparams", "rng_state.pth"
CONTENTS = [  # file, what is done to what it holds (which returns something else to hold), what is said
    (FP8_STATE, lambda state: [1], "it is .*: it must be an object"),
    (FP8_STATE, drop("modules", whole), "modules is None"),
    (FP8_STATE, drop("recipe", whole), "recipe is None"),
    (FP8_STATE, lambda state: state.update(modules={"a": 1}), "modules.a is 1"),
    (FP8_STATE, lambda state: state["modules"].pop(next(iter(state["modules"]))) and None, "some layers have no state"),
    (FP8_STATE, drop("done", module), "done is None: it must be true or false"),
    (FP8_STATE, lambda state: module(state).update(fresh="x"), "fresh is 'x'"),
    (FP8_STATE, drop("backward", module), "backward is None"),
    (FP8_STATE, drop("scale", forward), "forward.scale is no array of float32"),
    (FP8_STATE, lambda state: forward(state).update(scale=forward(state)["scale"][:-1]), "have several shapes"),
    (
        FP8_STATE,
        lambda state: forward(state).update(scale=forward(state)["scale"].astype("int64")),
        "no array of float32",
    ),
    (FP8_STATE, lambda state: forward(state)["scale"].fill(np.nan), "forward.scale is not finite"),
    (FP8_STATE, lambda state: forward(state)["scale"].fill(0), "a scale that is not above 0"),
    (FP8_STATE, lambda state: forward(state)["amax_history"].fill(-1), "an amax below 0"),
    (SCHEDULE, lambda state: [1], "it must be an object"),
    (SCHEDULE, drop("last_epoch", whole), "last_epoch is missing"),
    (SCHEDULE, lambda state: state.update(last_epoch="x"), "last_epoch is 'x'"),
    (SCHEDULE, lambda state: state.update(last_epoch=-5), "last_epoch is -5"),
    (SCHEDULE, lambda state: state.update(last_lr=float("nan")), "last_lr is nan"),
    (RANDOM, lambda state: [1], "it is 1: it must be an object"),
    (RANDOM, drop("cpu", whole), "cpu is missing"),
    (RANDOM, lambda state: state.update(python="x"), "the states of Python's, NumPy's and Paddle's generators"),
    (
        RANDOM,
        lambda state: state.update(numpy=("MT19937", 3)),
        "the states of Python's, NumPy's and Paddle's generators",
    ),
    (RANDOM, lambda state: state.update(cuda=["x"]), "cuda: these are no states"),
    ("optimizer.pdopt", lambda state: state.update(LR_Scheduler="x"), "LR_Scheduler. is 'x'"),
]


@pytest.mark.parametrize("file, change, said", CONTENTS, ids=range(len(CONTENTS)))
def test_files_that_hold_something_else(copy, file, change, said):
    """Their checksums are right: they were saved like that."""
    folder = copy("plain")
    state = paddle.load(str(folder / file), return_numpy=True)
    paddle.save(change(state) or state, str(folder / file))
    complete(folder, manifest.read(folder).run)
    (wrong,) = verify.damage(folder)
    assert wrong.startswith(f"{folder / file}: ") and re.search(said, wrong), wrong


@pytest.mark.parametrize("key, value", [("consumed_samples", 10**30), ("epoch", 1e300), ("log_history", [1])])
def test_a_state_beyond_all_bounds(copy, key, value):
    folder = copy("plain")
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps(state | {key: value}))
    complete(folder, manifest.read(folder).run)
    (wrong,) = verify.damage(folder)
    assert f"trainer_state.json: {key}" in wrong and "it must be" in wrong
