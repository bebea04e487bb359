import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_te.weights import CheckpointError, check_layout, convert, converter, pdparams, writing
from tests.unit.weights.models import (
    Model,
    assert_same,
    load_folder,
    save_config,
    save_pdparams,
    save_shards,
    save_single,
)


def merged(folder):
    """All tensors of a folder's files."""
    state = {}
    for tensors in load_folder(folder).values():
        assert not state.keys() & tensors.keys()
        state |= tensors
    return state


def scattered(name):
    """q, k and v of one layer in three shards, gate and up in two; something in each of the three."""
    shards = {"embed_tokens": 1, "norm": 3, "q_proj": 1, "k_proj": 2, "v_proj": 3, "gate_proj": 3, "up_proj": 1}
    return shards.get(name.split(".")[-2], 2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("suffix", [".pdparams", ".safetensors"])
@pytest.mark.parametrize("fused", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("sharded", [False, True])
def test_there_and_back(tmp_path, rng, dtype, suffix, fused, sharded):
    model = Model(rng, dtype)
    native = model.fused(*fused)
    if sharded:
        save_shards(tmp_path / "pd", native, dtype, scattered, suffix)
    else:
        save_single(tmp_path / "pd", native, dtype, suffix)
    save_config(tmp_path / "pd", model)
    assert convert(tmp_path / "pd", tmp_path / "te", "pd2te", progress=False) == []
    assert_same(merged(tmp_path / "te"), model.te())
    convert(tmp_path / "te", tmp_path / "back", "te2pd", progress=False)
    assert_same(merged(tmp_path / "back"), native)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == model.config
    convert(
        tmp_path / "te", tmp_path / "plain", "te2pd", fuse_attention_qkv=False, fuse_attention_ffn=False, progress=False
    )
    assert_same(merged(tmp_path / "plain"), model.native)


def test_a_family_that_has_no_fused_weights(tmp_path, rng):
    model = Model(rng, family="mistral")
    save_single(tmp_path / "te", model.te(), model.dtype)
    save_config(tmp_path / "te", model)
    with pytest.raises(CheckpointError, match="fuse_attention_qkv: PaddleNLP's Mistral has no fused weights"):
        convert(tmp_path / "te", tmp_path / "pd", "te2pd", fuse_attention_qkv=True, progress=False)
    convert(tmp_path / "te", tmp_path / "pd", "te2pd", fuse_attention_qkv=False, progress=False)
    assert_same(load_folder(tmp_path / "pd")["model_state.pdparams"], model.native)


def test_te_to_native_is_unfused_unless_asked(tmp_path, rng):
    model = Model(rng)
    save_single(tmp_path / "te", model.te(), "float32")
    save_config(tmp_path / "te", model)
    convert(tmp_path / "te", tmp_path / "pd", "te2pd", progress=False)
    assert_same(merged(tmp_path / "pd"), model.native)
    convert(
        tmp_path / "te", tmp_path / "fused", "te2pd", fuse_attention_qkv=True, fuse_attention_ffn=True, progress=False
    )
    assert_same(merged(tmp_path / "fused"), model.fused())


@pytest.mark.parametrize("suffix, stem", [(".pdparams", "model_state"), (".safetensors", "model")])
def test_shards_and_their_index(tmp_path, rng, suffix, stem):
    model = Model(rng)
    # shard 2 holds only weights that become part of shard 1's
    save_shards(
        tmp_path / "pd", model.native, "float32", lambda n: 2 if "v_proj" in n else 3 if "mlp" in n else 1, suffix
    )
    save_config(tmp_path / "pd", model)
    convert(tmp_path / "pd", tmp_path / "te", "pd2te", progress=False)
    files = load_folder(tmp_path / "te")
    assert sorted(files) == [f"{stem}-00001-of-00002{suffix}", f"{stem}-00002-of-00002{suffix}"]
    index = json.loads((tmp_path / "te" / f"{stem}{suffix}.index.json").read_text())
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    total = sum(tensor.nbytes for tensor in model.native.values())
    assert index["metadata"] == {"total_size": total, "note": "kept"}


@pytest.mark.parametrize("suffix", [".pdparams", ".safetensors"])
def test_files_that_are_too_large_are_sharded_where_degrees_stay(tmp_path, rng, suffix):
    model = Model(rng)
    for tp in (0, 1):
        save_single(tmp_path / "pd", model.rank(tp, 2), "float32", suffix, f"tp{tp:02d}")
    save_config(tmp_path / "pd", model)
    largest = 12_000
    convert(tmp_path / "pd", tmp_path / "te", "pd2te", max_shard_size=largest, progress=False)
    files = load_folder(tmp_path / "te")
    assert len(files) > 4
    assert all(sum(tensor.nbytes for tensor in tensors.values()) <= largest for tensors in files.values())
    convert(
        tmp_path / "te",
        tmp_path / "back",
        "te2pd",
        tensor_parallel_degree=1,
        pipeline_parallel_degree=1,
        progress=False,
    )
    assert_same(merged(tmp_path / "back"), model.native)


@pytest.mark.parametrize("mode, source", [("pd2te", "native"), ("reshard", "native"), ("te2hf", "te")])
def test_another_dtype(tmp_path, rng, mode, source):
    """Every tensor is rounded as Paddle rounds it, and config.json says so."""
    model = Model(rng)
    model.native = {name: rng.normal(size=tensor.shape).astype("f") for name, tensor in model.native.items()}
    save_single(tmp_path / "in", model.te() if source == "te" else model.native, "float32")
    (tmp_path / "in" / "config.json").write_text(json.dumps(model.config | {"dtype": "float32"}))
    convert(tmp_path / "in", tmp_path / "wide", mode, **({"format": "pdparams"} if mode == "reshard" else {}))
    convert(tmp_path / "in", tmp_path / "out", mode, dtype="bfloat16", progress=False)
    wide, narrow = merged(tmp_path / "wide"), merged(tmp_path / "out")
    rounded = {name: paddle.to_tensor(tensor).astype("bfloat16").numpy() for name, tensor in wide.items()}
    assert_same({name: tensor.view(np.uint16) for name, tensor in narrow.items()}, rounded)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype" if mode == "te2hf" else "dtype"] == "bfloat16"


@pytest.mark.parametrize("degree, kv_heads, vocab", [(2, 2, 24), (4, 4, 24), (2, 4, 25)])
@pytest.mark.parametrize("suffix", [".pdparams", ".safetensors"])
def test_tensor_parallel_files(tmp_path, rng, degree, kv_heads, vocab, suffix):
    model = Model(rng, kv_heads=kv_heads, vocab=vocab)
    for tp in range(degree):
        save_single(tmp_path / "pd", model.rank(tp, degree), "float32", suffix, f"tp{tp:02d}")
    save_config(tmp_path / "pd", model)
    convert(tmp_path / "pd", tmp_path / "te", "pd2te", progress=False)
    convert(tmp_path / "te", tmp_path / "back", "te2pd", progress=False)
    te, back = load_folder(tmp_path / "te"), load_folder(tmp_path / "back")
    stem = "model_state" if suffix == ".pdparams" else "model"
    assert sorted(te) == sorted(back) == [f"{stem}.tp{tp:02d}{suffix}" for tp in range(degree)]
    for tp in range(degree):
        rank, file = model.rank(tp, degree), f"{stem}.tp{tp:02d}{suffix}"
        assert_same(back[file], rank)
        qkv = np.concatenate([rank[f"llama.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"], 1).T
        assert_same({"": te[file]["llama.layers.1.transformer.self_attention.layernorm_qkv.weight"]}, {"": qkv})


def test_tensor_and_pipeline_parallel_files(tmp_path, rng):
    model = Model(rng, layers=3)

    def stage(name):
        return 0 if "embed" in name or "layers.0" in name else 1

    for tp in (0, 1):
        for pp in (0, 1):
            state = {k: v for k, v in model.rank(tp, 2).items() if stage(k) == pp}
            save_single(tmp_path / "pd", state, "float32", variant=f"tp{tp:02d}_pp{pp:02d}")
    save_config(tmp_path / "pd", model)
    convert(tmp_path / "pd", tmp_path / "te", "pd2te", progress=False)
    convert(tmp_path / "te", tmp_path / "back", "te2pd", progress=False)
    back = load_folder(tmp_path / "back")
    assert len(back) == 4
    for tp in (0, 1):
        for pp in (0, 1):
            expected = {k: v for k, v in model.rank(tp, 2).items() if stage(k) == pp}
            assert_same(back[f"model_state.tp{tp:02d}_pp{pp:02d}.pdparams"], expected)


def test_hundred_layers_and_more(tmp_path, rng):
    model = Model(rng, layers=112, hidden=8, intermediate=8, vocab=4)
    save_single(tmp_path / "pd", model.native, "float32")
    save_config(tmp_path / "pd", model)
    convert(tmp_path / "pd", tmp_path / "te", "pd2te", progress=False)
    assert_same(merged(tmp_path / "te"), model.te())


def test_tied_embeddings(tmp_path, rng):
    model = Model(rng)
    model.native["lm_head.weight"] = model.native["llama.embed_tokens.weight"]
    save_single(tmp_path / "pd", model.native, "float32")
    (tmp_path / "pd" / "config.json").write_text(json.dumps(model.config | {"tie_word_embeddings": True}))
    convert(tmp_path / "pd", tmp_path / "te", "pd2te", progress=False)
    assert_same(merged(tmp_path / "te"), model.te())
    with pytest.raises(CheckpointError, match="tied embeddings .* give --pipeline_parallel_degree 1"):
        convert(tmp_path / "te", tmp_path / "stages", "reshard", pipeline_parallel_degree=2, progress=False)


def test_without_config(tmp_path, rng):
    model = Model(rng, kv_heads=2)
    save_single(tmp_path / "te", model.te(), "float32")
    with pytest.raises(CheckpointError, match=r"te/config.json: missing; then --num_attention_heads"):
        convert(tmp_path / "te", tmp_path / "out", "te2pd", progress=False)
    with pytest.raises(CheckpointError, match="follows from num_key_value_heads=4"):
        convert(tmp_path / "te", tmp_path / "out", "te2pd", num_attention_heads=4, progress=False)
    with pytest.raises(CheckpointError, match="no multiple of num_attention_heads=5"):
        convert(
            tmp_path / "te", tmp_path / "out", "te2pd", num_attention_heads=5, num_key_value_heads=1, progress=False
        )
    convert(tmp_path / "te", tmp_path / "out", "te2pd", num_attention_heads=4, num_key_value_heads=2, progress=False)
    assert_same(merged(tmp_path / "out"), model.native)
    assert not (tmp_path / "out" / "config.json").exists()


def test_companions_are_carried_and_the_rest_is_named(tmp_path, rng):
    source = tmp_path / "pd"
    model = Model(rng)
    save_single(source, model.native, "float32")
    save_config(source, model)
    carried = ["generation_config.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"]
    left = ["optimizer.pdopt", "scheduler.pdparams", "trainer_state.json", "training_args.bin"]
    for name in carried + left:
        (source / name).write_bytes(name.encode())
    assert convert(source, tmp_path / "te", "pd2te", progress=False) == left
    assert {p.name for p in (tmp_path / "te").iterdir()} == {*carried, "config.json", "model_state.pdparams"}
    assert all((tmp_path / "te" / name).read_bytes() == name.encode() for name in carried)


def test_transformers_gets_no_words_of_paddlenlps(tmp_path, rng):
    """Its `use_cache` would have transformers compute all tokens again for each new one."""
    model, said = Model(rng), {"eos_token_id": [2, 3], "do_sample": True, "temperature": 0.6}
    own = {"_from_model_config": True, "use_cache": False, "max_length": 20, "no_repeat_ngram_size": 0}
    save_single(tmp_path / "pd", model.native, "float32")
    save_config(tmp_path / "pd", model)
    (tmp_path / "pd/generation_config.json").write_text(json.dumps(said | own | {"decode_strategy": "sampling"}))
    convert(tmp_path / "pd", tmp_path / "hf", "pd2hf", progress=False)
    assert json.loads((tmp_path / "hf/generation_config.json").read_text()) == said


def test_links_to_elsewhere_are_not_copied(tmp_path, rng):
    """A folder from others could link to a secret, which a copy would carry into what is published next."""
    source = tmp_path / "models--a--b" / "snapshots" / "revision"
    model = Model(rng)
    save_single(source, model.native, "float32")
    save_config(source, model)
    (tmp_path / "secret").write_text("secret")
    (source / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="tokenizer.json: a link to .*secret, outside the checkpoint"):
        convert(source, tmp_path / "te", "pd2te", progress=False)
    assert not (tmp_path / "te").exists()
    (source / "tokenizer.json").unlink()
    blobs = source.parents[1] / "blobs"  # as in Hugging Face's cache
    blobs.mkdir()
    (blobs / "1f2e").write_text("tokens")
    (source / "tokenizer.json").symlink_to("../../blobs/1f2e")
    convert(source, tmp_path / "te", "pd2te", progress=False)
    assert (tmp_path / "te/tokenizer.json").read_text() == "tokens"


@pytest.fixture
def native(tmp_path, rng):
    """A native checkpoint in two shards."""
    model = Model(rng)
    save_shards(tmp_path / "pd", model.native, "float32", lambda name: 1 if "layers.0" in name else 2)
    save_config(tmp_path / "pd", model)
    return tmp_path / "pd", model


def set_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def set_index(folder, name, file):
    path = folder / "model_state.pdparams.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][name] = file
    path.write_text(json.dumps(index))


FIRST, SECOND = "model_state-00001-of-00002.pdparams", "model_state-00002-of-00002.pdparams"


def damage_truncate(folder, model):
    path = folder / SECOND
    path.write_bytes(path.read_bytes()[:-100])


def damage_mixed_layers(folder, model):
    te = {k: v for k, v in model.te().items() if "layers.1" in k}
    rest = {k: v for k, v in model.native.items() if "layers" not in k}
    shutil.rmtree(folder)
    save_single(folder, {k: v for k, v in model.native.items() if "layers.0" in k} | te | rest, "float32")
    save_config(folder, model)


def damage_mixed_dtypes(folder, model):
    name = "llama.layers.1.mlp.down_proj.weight"
    for path in folder.glob("model_state*"):
        path.unlink()
    save_pdparams(folder / FIRST, {k: v for k, v in model.native.items() if k != name}, "float32")
    save_pdparams(folder / SECOND, {name: np.zeros((48, 32), np.float16)}, "float16")
    weight_map = {k: SECOND if k == name else FIRST for k in model.native}
    (folder / "model_state.pdparams.index.json").write_text(json.dumps({"weight_map": weight_map}))


def damage_missing_tensor(folder, model):
    shutil.rmtree(folder)
    save_single(folder, {k: v for k, v in model.native.items() if "layers.1.self_attn.k" not in k}, "float32")
    save_config(folder, model)


def damage_missing_rank(folder, model):
    shutil.rmtree(folder)
    for tp in (0, 2, 3):
        save_single(folder, model.rank(tp, 4), "float32", variant=f"tp{tp:02d}")
    save_config(folder, model)


def damage_ranks_beside_single(folder, model):
    for path in folder.glob("model_state*"):
        path.unlink()
    save_single(folder, model.native, "float32")
    save_single(folder, model.native, "float32", variant="tp00")


def damage_kv_heads_and_ranks(folder, model):
    shutil.rmtree(folder)
    for tp in range(4):
        save_single(folder, model.rank(tp, 4), "float32", variant=f"tp{tp:02d}")
    save_config(folder, model)


DAMAGES = {
    "truncated": (damage_truncate, f"{SECOND}: truncated"),
    "missing shard": (lambda f, m: (f / FIRST).unlink(), f"{FIRST}: missing"),
    "missing index": (lambda f, m: (f / "model_state.pdparams.index.json").unlink(), "index.json: missing"),
    "bad index": (lambda f, m: (f / "model_state.pdparams.index.json").write_text("{"), "index.json: not valid JSON"),
    "index without map": (lambda f, m: (f / "model_state.pdparams.index.json").write_text("{}"), "has no weight_map"),
    "index names a missing tensor": (
        lambda f, m: set_index(f, "llama.layers.9.input_layernorm.weight", FIRST),
        f"{FIRST}: has no tensor 'llama.layers.9.input_layernorm.weight'",
    ),
    "index names another file": (
        lambda f, m: set_index(f, "lm_head.weight", FIRST),
        f"{FIRST}: has no tensor 'lm_head",
    ),
    "index names a missing file": (lambda f, m: set_index(f, "lm_head.weight", "x.pdparams"), "x.pdparams: missing"),
    "stray shard": (
        lambda f, m: save_pdparams(
            f / "model_state-00003-of-00002.pdparams", {"lm_head.weight": np.ones(2, "f")}, "float32"
        ),
        "model_state-00003-of-00002.pdparams: not in model_state.pdparams.index.json",
    ),
    "no weights": (lambda f, m: [p.unlink() for p in f.glob("*.pdparams")], "no model_state"),
    "a run": (
        lambda f, m: [(f / "checkpoint-2").mkdir(), *(p.unlink() for p in f.glob("*.pdparams"))],
        "the run's newest checkpoint is .*checkpoint-2$",
    ),
    "two formats": (
        lambda f, m: save_single(f, m.native, "float32", ".safetensors"),
        "both .pdparams and .safetensors",
    ),
    "two checkpoints": (lambda f, m: save_single(f, m.native, "float32"), "two checkpoints in one folder"),
    "foreign": (lambda f, m: set_foreign(f), f"{FIRST}: tensor 'gpt.h.0.weight' is in none of the known layouts"),
    "mixed layouts": (damage_mixed_layers, "model_state.pdparams: tensor .*: mixed layouts"),
    "mixed dtypes": (damage_mixed_dtypes, f"{SECOND}: mixed dtypes"),
    "missing tensor": (damage_missing_tensor, "incomplete: no file has 'llama.layers.1.self_attn.k_proj.weight'"),
    "missing rank": (damage_missing_rank, "model_state.tp01.pdparams: missing"),
    "ranks beside a single file": (damage_ranks_beside_single, "files of different checkpoints"),
    "kv heads not divisible": (damage_kv_heads_and_ranks, "num_key_value_heads=2 cannot be divided"),
    "config: hidden size": (lambda f, m: set_config(f, hidden_size=64), f"{FIRST}: .* has shape"),
    "config: kv heads": (lambda f, m: set_config(f, num_key_value_heads=4), f"{FIRST}: .*k_proj.* has shape"),
    "config: heads": (lambda f, m: set_config(f, num_attention_heads=3), "num_attention_heads=3"),
    "config: more layers": (
        lambda f, m: set_config(f, num_hidden_layers=3),
        "incomplete: no file has 'llama.layers.2.",
    ),
    "config: fewer layers": (lambda f, m: set_config(f, num_hidden_layers=1), "config.json has only 1 layers"),
    "config: not Llama's": (lambda f, m: (f / "config.json").write_text('{"n_head": 4}'), "'n_head'=4: this key"),
    "config: no JSON": (lambda f, m: (f / "config.json").write_text("?"), "config.json is not JSON"),
    "config: head_dim": (lambda f, m: set_config(f, head_dim=128), "head_dim=128"),
    "output inside input": (None, "lies inside the input"),
}


def set_foreign(folder):
    save_pdparams(folder / FIRST, {"gpt.h.0.weight": np.ones(2, "f")}, "float32")
    path = folder / "model_state.pdparams.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != FIRST} | {"gpt.h.0.weight": FIRST}
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("damage", DAMAGES)
def test_bad_inputs_leave_nothing(tmp_path, native, damage):
    source, model = native
    change, message = DAMAGES[damage]
    output = tmp_path / "out"
    if change:
        change(source, model)
    else:
        output = source / "out"
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=message):
        convert(source, output, "pd2te", progress=False)
    assert sorted(tmp_path.rglob("*")) == before


def test_bad_arguments(tmp_path, native):
    source, _ = native
    for arguments, message in [
        (dict(mode="te2pd"), "PaddleNLP's native layout, not one for te2pd; --mode may be pd2te"),
        (dict(mode="pd2pd"), "mode 'pd2pd': it may be one of pd2te, te2pd"),
        (dict(mode="pd2te", num_attention_heads=8), "num_attention_heads is 4, but --num_attention_heads 8 was given"),
        (dict(mode="pd2te", num_key_value_heads=4), "num_key_value_heads is 2, but"),
        (dict(mode="pd2te", fuse_attention_qkv=True), "--fuse_attention_qkv: only for"),
        (dict(mode="pd2te", dtype="int8"), "--dtype int8: it may be one of float32, float16, bfloat16"),
        (dict(mode="reshard"), "--mode reshard: nothing would change"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            convert(source, tmp_path / "out", progress=False, **arguments)
        assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="nowhere: not a folder"):
        convert(tmp_path / "nowhere", tmp_path / "out", "pd2te", progress=False)


def test_output_must_be_new_or_empty(tmp_path, native):
    source, _ = native
    output = tmp_path / "out"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="out: not empty"):
        convert(source, output, "pd2te", progress=False)
    (output / "notes.txt").unlink()
    convert(source, output, "pd2te", progress=False)
    with pytest.raises(CheckpointError, match="out: not empty"):
        convert(source, output, "pd2te", progress=False)
    with pytest.raises(CheckpointError, match="the output: .*/out/config.json is no folder"):
        convert(source, output / "config.json/new", "pd2te", progress=False)
    with pytest.raises(CheckpointError, match="out/config.json: is a file"):
        convert(source, output / "config.json", "pd2te", progress=False)
    with pytest.raises(CheckpointError, match="the input .* lies inside the output"):
        convert(source, tmp_path, "pd2te", progress=False)
    link = tmp_path / "link"
    link.symlink_to(source)
    with pytest.raises(CheckpointError, match="lies inside the input"):
        convert(source, link / "out", "pd2te", progress=False)


def test_an_output_that_is_a_link_or_a_mount_point(tmp_path, native, monkeypatch):
    source, _ = native
    (tmp_path / "elsewhere" / "new").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "new")
    convert(source, tmp_path / "link", "pd2te", progress=False)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "elsewhere" / "new" / "config.json").exists()
    (tmp_path / "volume").mkdir()  # as a container's is: it cannot be renamed over
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "volume")
    with pytest.raises(CheckpointError, match="volume: a mount point .* give a folder in it"):
        convert(source, tmp_path / "volume", "pd2te", progress=False)
    convert(source, tmp_path / "volume" / "new", "pd2te", progress=False)


def test_an_interruption_does_not_wait_for_the_file(tmp_path, native, monkeypatch):
    source, _ = native

    class Slow(pdparams.Writer):
        def add(self, arrays):
            super().add(arrays)
            time.sleep(1)

    monkeypatch.setattr(pdparams, "Writer", Slow)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)  # Ctrl-C
    signal.setitimer(signal.ITIMER_REAL, 1.5)
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", "pd2te", progress=False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert time.monotonic() - start < 8, "the file's tensors take longer"
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.incomplete").exists()


def test_an_error_while_writing_leaves_nothing(tmp_path, native, monkeypatch):
    source, _ = native
    before = sorted(tmp_path.rglob("*"))

    def no_space(*_):
        raise OSError(28, "No space left on device", "model_state.pdparams")

    monkeypatch.setattr(converter, "write_json", no_space)
    with pytest.raises(OSError, match="No space left"):
        convert(source, tmp_path / "out", "pd2te", progress=False)
    assert sorted(tmp_path.rglob("*")) == before


def test_not_enough_space_is_told_before(tmp_path, native, monkeypatch):
    source, _ = native
    monkeypatch.setattr(converter, "free_bytes", lambda _: 10)
    with pytest.raises(CheckpointError, match="has only 0.0 GB free"):
        convert(source, tmp_path / "deep" / "out", "pd2te", progress=False)
    assert not (tmp_path / "deep").exists()


SLOW = """
import sys, time
from paddle_te.weights import convert, pdparams
class Slow(pdparams.Writer):
    def close(self):
        super().close()
        print("written", flush=True)
        time.sleep(60)
pdparams.Writer = Slow
convert(sys.argv[1], sys.argv[2], "pd2te", progress=False)
"""


def test_killed_and_run_again(tmp_path, native):
    source, model = native
    run = [sys.executable, "-c", SLOW, str(source), str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(run, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout.readline() == "written\n"
    # while it runs, nobody else writes there
    with pytest.raises(CheckpointError, match="another process is writing it"):
        convert(source, tmp_path / "out", "pd2te", progress=False)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.incomplete").exists()
    time.sleep(0.1)
    convert(source, tmp_path / "out", "pd2te", progress=False)
    assert_same(merged(tmp_path / "out"), model.te())
    assert not (tmp_path / "out.incomplete").exists()
    assert_same(merged(source), model.native)


def in_a_child(work):
    """(process id) of a fork that calls work() and ends with status 0, or 1 after an error."""
    pid = os.fork()
    if pid:
        return pid
    # its own is shared with forks: one that is killed with it would leave it taken
    writing.Bar.set_lock(threading.RLock())
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def test_killed_at_any_moment(tmp_path, native, seed):
    """The output is complete or not there; the input stays; the next run, which finds what the last one left, goes on.

    PADDLE_TE_KILLS says how often."""
    source, model = native
    output, chance = tmp_path / "out", random.Random(seed)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    start = time.monotonic()
    convert(source, tmp_path / "timed", "pd2te", progress=False)
    seconds = time.monotonic() - start
    unfinished = 0
    for _ in range(int(os.environ.get("PADDLE_TE_KILLS", 20))):
        pid = in_a_child(lambda: convert(source, output, "pd2te", workers=2, progress=False))
        time.sleep(chance.uniform(0, 1.5 * seconds))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        unfinished += not output.exists()
        if output.exists():
            assert_same(merged(output), model.te())
            assert {path.name for path in output.iterdir()} == {path.name for path in (tmp_path / "timed").iterdir()}
            shutil.rmtree(output)
    assert unfinished, "no kill came before the end"
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    convert(source, output, "pd2te", progress=False)
    assert_same(merged(output), model.te())
    assert {path.name for path in tmp_path.iterdir()} == {"pd", "out", "timed"}


def test_no_room_while_writing_leaves_nothing(tmp_path, native):
    """What disk_usage does not tell, a quota for one: here, the length of a file."""
    source, _ = native
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, kept[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            convert(source, tmp_path / "out", "pd2te", progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert [path.name for path in tmp_path.iterdir()] == ["pd"]


@pytest.fixture
def public_folder():
    """A folder that other users can reach: pytest's own are private."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("unreadable", [".", FIRST, "config.json"])
def test_unreadable_input_is_named(public_folder, native, unreadable):
    source, report = shutil.copytree(native[0], public_folder / "pd"), public_folder / "report"
    path = source / unreadable
    path.chmod(0)

    def refused():
        with open(report, "w") as written:
            if os.getuid() == 0:
                os.setuid(65534)  # root may read everything
            with pytest.raises((OSError, CheckpointError)) as error:
                convert(source, public_folder / "out", "pd2te", progress=False)
            written.write(str(error.value))

    os.waitpid(in_a_child(refused), 0)
    path.chmod(0o700)
    assert "Permission denied" in report.read_text() and str(path) in report.read_text()
    assert {path.name for path in public_folder.iterdir()} == {"pd", "report"}


def test_progress_counts_bytes(tmp_path, native, capsys):
    source, model = native
    convert(source, tmp_path / "out", "pd2te")
    shown = capsys.readouterr().err
    total = sum(tensor.nbytes for tensor in model.native.values())
    assert "100%" in shown and f"{total / 1000:.1f}k/{total / 1000:.1f}k" in shown


def test_check_layout(tmp_path, native):
    source, _ = native
    convert(source, tmp_path / "te", "pd2te", progress=False)
    check_layout(source, "native")
    check_layout(tmp_path / "te", "te")
    with pytest.raises(ValueError, match="pd: is in PaddleNLP's .* te layout.*; take the backend none, .*--mode pd2te"):
        check_layout(source, "te")
    with pytest.raises(ValueError, match="; take the backend transformer_engine .* or paddle .*, or .*--mode te2pd"):
        check_layout(tmp_path / "te", "native")
    (source / FIRST).unlink()
    with pytest.raises(ValueError, match=f"{FIRST}: missing"):
        check_layout(source, "native")


def test_checksums(tmp_path, native):
    source, _ = native
    with pytest.raises(CheckpointError, match="pd/checksums.json: missing; --verify needs"):
        convert(source, tmp_path / "te", "pd2te", verify=True, progress=False)
    convert(source, tmp_path / "te", "pd2te", checksums=True, progress=False)
    names = {path.name for path in (tmp_path / "te").iterdir()} - {"checksums.json"}
    assert json.loads((tmp_path / "te" / "checksums.json").read_text()).keys() == names
    convert(tmp_path / "te", tmp_path / "back", "te2pd", verify=True, workers=2, progress=False)
    assert not (tmp_path / "back" / "checksums.json").exists()
    damaged = tmp_path / "te" / FIRST
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1  # in the weights: nothing else would notice
    damaged.write_bytes(data)
    convert(tmp_path / "te", tmp_path / "unnoticed", "te2pd", progress=False)
    with pytest.raises(CheckpointError, match=f"{FIRST}: differs from its checksum"):
        convert(tmp_path / "te", tmp_path / "out", "te2pd", verify=True, progress=False)
    (tmp_path / "te" / "checksums.json").write_text("[]")
    with pytest.raises(CheckpointError, match="checksums.json: not a list of checksums"):
        convert(tmp_path / "te", tmp_path / "out", "te2pd", verify=True, progress=False)
    (tmp_path / "te" / "checksums.json").write_text(json.dumps({FIRST: ""}))
    damaged.unlink()
    with pytest.raises(CheckpointError, match=f"{FIRST}: missing; checksums.json names it"):
        convert(tmp_path / "te", tmp_path / "out", "te2pd", verify=True, progress=False)
    assert not (tmp_path / "out").exists()
