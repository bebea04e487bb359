"""--with_optimizer: every moment lands where its weight does, from .pdopt files of all ranks and from unified ones."""

import json
import pickle
import shutil

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from paddle_te import manifest
from paddle_te.weights import CheckpointError, convert
from paddle_te.weights.blocks import moment_shape, unpack
from paddle_te.weights.folder import open_checkpoint
from paddle_te.weights.optimizer import kept_how, open_optimizer
from tests.unit.runs.completed import complete
from tests.unit.runs.hostile import assert_it_works, hostile_pickle
from tests.unit.weights.models import Model, assert_same, save_config, save_single

MOMENTS = ("moment1_0", "moment2_0")
POWERS = {"beta1_pow_acc_0": 0.729, "beta2_pow_acc_0": 0.857375}


def save_trained(folder, model, state_of, tp=None, degree=1, shards=None, master=False):
    """A rank's weights and .pdopt as Paddle names them; state_of: {kind: Model} with the values of each kind."""

    def share(kind_model):
        return kind_model.rank(tp, degree) if degree > 1 else kind_model.native

    folder.mkdir(exist_ok=True)
    variant = f".tp{tp:02d}" if degree > 1 else ""
    weights = {name: paddle.to_tensor(np.ascontiguousarray(value)) for name, value in share(model).items()}
    for number, tensor in enumerate(weights.values()):
        tensor.name = f"linear_{number}.w_0"
    paddle.save(weights, str(folder / f"model_state{variant}.pdparams"))
    middle = "_fp32_master_0" if master else ""
    files = [{} for _ in range(shards or 1)]
    for number, (name, tensor) in enumerate(weights.items()):
        file = files[number % len(files)]  # sharding stage 1: each rank has the state of some of the parameters
        for kind in MOMENTS:
            file[f"{tensor.name}{middle}_{kind}"] = paddle.to_tensor(np.ascontiguousarray(share(state_of[kind])[name]))
        for kind, value in POWERS.items():
            file[f"{tensor.name}{middle}_{kind}"] = paddle.to_tensor(np.array([value], np.float32))
        if master:
            value = paddle.to_tensor(np.ascontiguousarray(share(state_of["master_weights"])[name]))
            file.setdefault("master_weights", {})[tensor.name] = value
    for number, file in enumerate(files):
        shard = f"{'_' if variant else '.'}shard{number:02d}" if shards else ""
        file["LR_Scheduler"] = {"last_epoch": 3, "last_lr": np.float64(0.1)}
        paddle.save(file, str(folder / f"optimizer{variant}{shard}.pdopt"))
    save_config(folder, model)


def expected(state_of, layout):
    """{name/kind: array} of a unified optimizer, by hand."""
    moments = {f"{k}/{kind}": v for kind in MOMENTS for k, v in in_layout(state_of[kind], layout).items()}
    names = in_layout(state_of[MOMENTS[0]], layout)
    return moments | {f"{k}/{kind}": np.array([v], np.float32) for k in names for kind, v in POWERS.items()}


def in_layout(model, layout):
    return model.te() if layout == "te" else model.native


@pytest.fixture
def state_of(rng):
    return {kind: Model(rng, kv_heads=4) for kind in (*MOMENTS, "master_weights")}


def test_how_a_state_was_kept_is_told_by_its_dtypes(tmp_path):
    """In .pdopt files and unified checkpoints; of a folder without any state nothing is told."""
    assert kept_how(tmp_path) == {}
    ones = paddle.ones([3])
    state = {f"w_fp32_master_0_{kind}": ones.astype("bfloat16") for kind in MOMENTS}
    state["w_fp32_master_0_beta1_pow_acc_0"] = paddle.ones([1])
    adamw = {"optim": "adamw"}
    for remainder, master_weights in (("int16", "bf16_remainder"), ("float32", "float32")):
        paddle.save(state | {"master_weights": {"w": ones.astype(remainder)}}, str(tmp_path / "optimizer.pdopt"))
        assert kept_how(tmp_path) == adamw | {"optim_moments": "bfloat16", "master_weights": master_weights}
    for moments in ("float32", "int8"):
        paddle.save({f"w_{kind}": ones.astype(moments) for kind in MOMENTS}, str(tmp_path / "optimizer.pdopt"))
        assert kept_how(tmp_path) == adamw | {"optim_moments": moments}
    momentum_beside_adamw = {f"w_{kind}": ones for kind in MOMENTS} | {"matrix_moment1_0": ones}
    paddle.save(momentum_beside_adamw, str(tmp_path / "optimizer.pdopt"))
    assert kept_how(tmp_path) == {"optim": "muon", "optim_moments": "float32"}
    for stem, tensors in {
        "optimizer": {f"w/{kind}": np.zeros(3, "uint16") for kind in MOMENTS}
        | {"w/beta1_pow_acc_0": np.zeros(1, "float32")},
        "master_weights": {"w": np.zeros(3, "int16")},
    }.items():
        file = f"{stem}-00001-of-00001.safetensors"
        save_file(tensors, tmp_path / file)
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file)}
        (tmp_path / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    assert kept_how(tmp_path) == adamw | {"optim_moments": "bfloat16", "master_weights": "bf16_remainder"}


def test_moments_in_blocks(tmp_path, rng, state_of):
    """They are opened as elements of the weights' shapes, and not converted."""
    model = Model(rng, kv_heads=4)
    for kind in MOMENTS:
        for name, weight in state_of[kind].native.items():
            size = np.prod(moment_shape(weight.shape))
            state_of[kind].native[name] = rng.integers(-128, 128, size, "int8").reshape(moment_shape(weight.shape))
    save_trained(tmp_path / "in", model, state_of)
    opened = open_optimizer(open_checkpoint(tmp_path / "in"))
    for kind in MOMENTS:
        for name, ref in next(iter(opened[kind].ranks.values())).tensors.items():
            np.testing.assert_array_equal(ref.read(), unpack(state_of[kind].native[name], ref.shape[-1]))
            assert ref.shape == model.native[name].shape
    with pytest.raises(CheckpointError, match="does not convert moments of --optim_moments int8; a run goes on from"):
        convert(tmp_path / "in", tmp_path / "out", "reshard", with_optimizer=True, progress=False)


def test_muons_state(tmp_path, rng, state_of):
    """Matrices have a momentum only; it is opened as such, and not converted. Where one matrix of several has no second
    moment, the state is broken."""
    model = Model(rng, kv_heads=4)
    save_trained(tmp_path / "in", model, state_of, shards=2)
    layout = open_checkpoint(tmp_path / "in").layout
    matrices = [number for number, name in enumerate(model.native) if layout.is_matrix(name)]
    of_adam = [f"linear_{n}.w_0_{kind}" for n in matrices for kind in (MOMENTS[1], *POWERS)]
    for file in sorted((tmp_path / "in").glob("*.pdopt")):
        state = paddle.load(str(file))
        paddle.save({key: value for key, value in state.items() if key not in of_adam}, str(file))
    opened = open_optimizer(open_checkpoint(tmp_path / "in"))
    for kind in (*MOMENTS, *POWERS):
        names = {name for rank in opened[kind].ranks.values() for name in rank.tensors}
        assert names == {name for name in model.native if kind == MOMENTS[0] or not layout.is_matrix(name)}
    with pytest.raises(CheckpointError, match="does not convert the state of --optim muon"):
        convert(tmp_path / "in", tmp_path / "out", "reshard", with_optimizer=True, progress=False)
    save_trained(tmp_path / "in", model, state_of, shards=2)
    state = paddle.load(str(file))
    del state[next(key for key in of_adam if key in state)]
    paddle.save(state, str(file))
    with pytest.raises(CheckpointError, match="has no moment2_0 of"):
        open_optimizer(open_checkpoint(tmp_path / "in"))


TRAINERS = ("trainer_state.json", "scheduler.pdparams", "rng_state.pth")


@pytest.mark.parametrize("kind", ["scheduler.pdparams", "scaler.pdparams", "rng_state.pth", "rng_state_2.pth"])
def test_hostile_trainer_files_are_refused_and_not_run(tmp_path, rng, state_of, kind):
    assert_it_works(tmp_path)
    save_trained(tmp_path / "in", Model(rng, kv_heads=4), state_of, 0, 1, None, False)
    (tmp_path / "in" / kind).write_bytes(hostile_pickle(tmp_path / "ran"))
    with pytest.raises(CheckpointError, match=f"{kind}: refused: it holds posix.system.*it was not run"):
        convert(tmp_path / "in", tmp_path / "out", "reshard", with_optimizer=True, progress=False)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", ["pd2te", "reshard"])
@pytest.mark.parametrize("degree, shards", [(1, None), (1, 2), (2, None), (2, 3)])
@pytest.mark.parametrize("master", [False, True])
def test_from_pdopt_and_on(tmp_path, rng, state_of, mode, degree, shards, master):
    model = Model(rng, "bfloat16" if master else "float32", kv_heads=4)
    for tp in range(degree):
        save_trained(tmp_path / "in", model, state_of, tp, degree, shards, master)
    for name in TRAINERS:
        (tmp_path / "in" / name).write_bytes(pickle.dumps({"of": name}, protocol=4))
    complete(tmp_path / "in", {"step": 3, "model": {"weights": "in the input's layout"}})
    assert convert(tmp_path / "in", tmp_path / "out", mode, with_optimizer=True, progress=False) == []
    layout = "te" if mode == "pd2te" else "pd"
    check_unified(tmp_path / "out", model, state_of, layout, master)
    if layout == "te":  # from a unified one, and back
        convert(tmp_path / "out", tmp_path / "back", "te2pd", with_optimizer=True, progress=False)
        check_unified(tmp_path / "back", model, state_of, "pd", master)


def test_damage_is_not_believed_afterwards(tmp_path, rng, state_of):
    save_trained(tmp_path / "in", Model(rng, kv_heads=4), state_of)
    complete(tmp_path / "in")
    file = tmp_path / "in/optimizer.pdopt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="in: damaged, .*: optimizer.pdopt has another checksum than when it was"):
        convert(tmp_path / "in", tmp_path / "out", "reshard", with_optimizer=True, progress=False)
    assert not (tmp_path / "out").exists()


def check_unified(folder, model, state_of, layout, master):
    for name in TRAINERS:
        assert pickle.loads((folder / name).read_bytes()) == {"of": name}
    assert manifest.damage(folder) == [] and manifest.read(folder).run == {"step": 3}
    wanted = {"model": in_layout(model, layout), "optimizer": expected(state_of, layout)}
    if master:
        wanted["master_weights"] = in_layout(state_of["master_weights"], layout)
    assert {path.name for path in folder.glob("*.safetensors")} == {
        f"{stem}-00001-of-00001.safetensors" for stem in wanted
    }
    for stem, tensors in wanted.items():
        file = f"{stem}-00001-of-00001.safetensors"
        assert_same(load_file(folder / file), tensors)
        index = json.loads((folder / f"{stem}.safetensors.index.json").read_text())
        assert index["weight_map"] == dict.fromkeys(tensors, file)
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        assert index.get("master_weights") == (master if stem == "optimizer" else None)


def test_slices_of_sharding_stage_3(tmp_path, rng, state_of):
    """Each rank has its part of the flat tensor; the last one's is padded. What is small is whole on every rank."""
    model = Model(rng, kv_heads=4)
    save_trained(tmp_path / "in", model, state_of)
    whole = paddle.load(str(tmp_path / "in" / "optimizer.pdopt"), return_numpy=True)
    (tmp_path / "in" / "optimizer.pdopt").unlink()
    for rank in range(3):
        state = {}
        for key, value in whole.items():
            sliced = np.ndim(value) == 2
            if sliced:
                flat = np.concatenate([value.reshape(-1), np.zeros(-value.size % 3 + 3, value.dtype)])
                value = np.split(flat, 3)[rank]
            state[f"slice@{key}" if sliced else key] = paddle.to_tensor(value) if np.ndim(value) else value
        paddle.save(state, str(tmp_path / "in" / f"optimizer.shard{rank:02d}.pdopt"))
    convert(tmp_path / "in", tmp_path / "out", "pd2te", with_optimizer=True, progress=False)
    assert_same(load_file(tmp_path / "out" / "optimizer-00001-of-00001.safetensors"), expected(state_of, "te"))
    (tmp_path / "in" / "optimizer.shard02.pdopt").unlink()
    with pytest.raises(CheckpointError, match="does not make a tensor of shape"):
        convert(tmp_path / "in", tmp_path / "again", "pd2te", with_optimizer=True, progress=False)


def test_several_files(tmp_path, rng, state_of):
    """No file is larger than --max_shard_size, and what is read from them is the whole."""
    model, largest = Model(rng, kv_heads=4), 20_000
    save_trained(tmp_path / "in", model, state_of)
    options = dict(with_optimizer=True, progress=False)
    convert(tmp_path / "in", tmp_path / "shards", "pd2te", max_shard_size=largest, **options)
    files = {path.name: load_file(path) for path in (tmp_path / "shards").glob("*.safetensors")}
    assert sum(name.startswith("optimizer-") for name in files) > 2 < sum(name.startswith("model-") for name in files)
    assert all(sum(tensor.nbytes for tensor in tensors.values()) <= largest for tensors in files.values())
    convert(tmp_path / "shards", tmp_path / "whole", "reshard", **options)
    assert_same(load_file(tmp_path / "whole" / "optimizer-00001-of-00001.safetensors"), expected(state_of, "te"))


def split_in_buckets(folder, ranks, align, per_bucket):
    """Makes of optimizer.pdopt what ranks save with split_param: parameters, each padded to `align` elements times the
    ranks, lie in buckets one after another, and of each bucket every rank has a part.
    """
    whole = paddle.load(str(folder / "optimizer.pdopt"), return_numpy=True)
    (folder / "optimizer.pdopt").unlink()
    whole.pop("LR_Scheduler")
    master = whole.pop("master_weights", {})
    files = [{"master_weights": {}} if master else {} for _ in range(ranks)]
    parameters = sorted({key.split("_fp32")[0].split("_moment")[0] for key in whole if "moment1" in key})
    for first in range(0, len(parameters), per_bucket):
        bucket, begins, sizes = parameters[first : first + per_bucket], {}, {}
        for name in bucket:
            begins[name] = sum(sizes.values())
            numel = next(value for key, value in whole.items() if key.startswith(f"{name}_") and "moment1" in key).size
            sizes[name] = -(-numel // (align * ranks)) * align * ranks
        part = sum(sizes.values()) // ranks
        for name, rank in ((name, rank) for name in bucket for rank in range(ranks)):
            begin = max(begins[name], rank * part) - begins[name]
            end = min(begins[name] + sizes[name], (rank + 1) * part) - begins[name]
            if end <= begin:
                continue

            def share(value, size=sizes[name], begin=begin, end=end):
                flat = np.concatenate([value.reshape(-1), np.zeros(size - value.size, value.dtype)])
                return paddle.to_tensor(flat[begin:end])

            for key, value in whole.items():
                if key.startswith((f"{name}_moment", f"{name}_fp32_master_0_moment")):
                    files[rank][key] = share(value)
                elif key.startswith(f"{name}_"):
                    files[rank][key] = paddle.to_tensor(value)
            if master:
                files[rank]["master_weights"][name] = share(master[name])
    for rank, file in enumerate(files):
        paddle.save(file, str(folder / f"optimizer.shard{rank:02d}.pdopt"))


@pytest.mark.parametrize("ranks, align, per_bucket", [(2, 64, 100), (3, 8, 4), (2, 16, 1), (4, 128, 5)])
@pytest.mark.parametrize("master", [False, True])
def test_slices_of_split_parameters(tmp_path, rng, state_of, ranks, align, per_bucket, master):
    """Sharding stage 1 with split_param (OVERLAP=1): a tensor may lie across ranks, in one, or be smaller than its
    padding."""
    model, folder = Model(rng, "bfloat16" if master else "float32", kv_heads=4), tmp_path / "in"
    save_trained(folder, model, state_of, master=master)
    split_in_buckets(folder, ranks, align, per_bucket)
    convert(folder, tmp_path / "out", "pd2te", with_optimizer=True, progress=False)
    assert_same(load_file(tmp_path / "out" / "optimizer-00001-of-00001.safetensors"), expected(state_of, "te"))
    if master:
        got = load_file(tmp_path / "out" / "master_weights-00001-of-00001.safetensors")
        assert_same(got, in_layout(state_of["master_weights"], "te"))
    (folder / "optimizer.shard00.pdopt").unlink()
    with pytest.raises(CheckpointError, match="shard00.pdopt: missing, though"):
        convert(folder, tmp_path / "again", "pd2te", with_optimizer=True, progress=False)


@pytest.mark.parametrize("same", [True, False])
def test_a_power_that_two_files_have(tmp_path, rng, state_of, same):
    """As unified checkpoints of OVERLAP=1 have them: with the same bytes it is one, with others an error."""
    save_trained(tmp_path / "in", Model(rng, kv_heads=4), state_of)
    convert(tmp_path / "in", tmp_path / "unified", "pd2te", with_optimizer=True, progress=False)
    file, index = (
        tmp_path / "unified" / f"optimizer{end}" for end in ("-00001-of-00001.safetensors", ".safetensors.index.json")
    )
    twice = next(name for name in load_file(file) if name.endswith("beta1_pow_acc_0"))
    value = np.array([POWERS["beta1_pow_acc_0"] if same else 0.5], np.float32)
    save_file(
        {"lm_head.weight/moment2_0": load_file(file)["lm_head.weight/moment2_0"], twice: value}, tmp_path / "second"
    )
    rest = {name: tensor for name, tensor in load_file(file).items() if name != "lm_head.weight/moment2_0"}
    file.unlink()
    save_file(rest, file)
    (tmp_path / "second").rename(tmp_path / "unified/optimizer-00002-of-00002.safetensors")
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight/moment2_0"] = "optimizer-00002-of-00002.safetensors"
    index.write_text(json.dumps(content))
    if not same:
        with pytest.raises(CheckpointError, match=f"{twice}' is in optimizer-00001-of-00001.safetensors too, with"):
            convert(tmp_path / "unified", tmp_path / "out", "reshard", with_optimizer=True, progress=False)
        return
    convert(tmp_path / "unified", tmp_path / "out", "te2pd", with_optimizer=True, progress=False)
    assert_same(load_file(tmp_path / "out" / "optimizer-00001-of-00001.safetensors"), expected(state_of, "pd"))


def test_degrees_are_those_of_the_resume(tmp_path, rng, state_of):
    """Whole tensors in any case; fp8 scales go along where both layouts have them."""
    save_trained(tmp_path / "in", Model(rng, kv_heads=4), state_of)
    scales = pickle.dumps({"scale": 2.0}, protocol=4)
    (tmp_path / "in" / "fp8_state.pp00.pdparams").write_bytes(scales)
    degrees = dict(tensor_parallel_degree=2, pipeline_parallel_degree=2, with_optimizer=True, progress=False)
    assert convert(tmp_path / "in", tmp_path / "te", "pd2te", **degrees) == ["fp8_state.pp00.pdparams"]
    plain = tmp_path / "plain"
    convert(tmp_path / "in", plain, "pd2te", with_optimizer=True, progress=False)
    for path in plain.iterdir():
        assert path.read_bytes() == (tmp_path / "te" / path.name).read_bytes()
    (tmp_path / "te" / "fp8_state.pp00.pdparams").write_bytes(scales)
    assert convert(tmp_path / "te", tmp_path / "again", "reshard", **degrees) == []
    assert (tmp_path / "again" / "fp8_state.pp00.pdparams").read_bytes() == scales
    assert convert(tmp_path / "te", tmp_path / "pd", "te2pd", **degrees) == ["fp8_state.pp00.pdparams"]


def test_errors(tmp_path, rng, state_of):
    model, source = Model(rng, kv_heads=4), tmp_path / "in"

    def refused(message, mode="pd2te", **options):
        with pytest.raises(CheckpointError, match=message):
            convert(source, tmp_path / "out", mode, with_optimizer=True, progress=False, **options)
        assert not (tmp_path / "out").exists()

    save_single(source, model.native, "float32")
    save_config(source, model)
    refused("optimizer.pdopt: missing; --with_optimizer")
    save_trained(source, model, state_of)
    refused("leave --format out", format="pdparams")
    refused("leave --dtype out", dtype="bfloat16")
    refused("num_attention_heads=4 cannot be divided", tensor_parallel_degree=3)
    refused("the model has only 5 parts", pipeline_parallel_degree=6)
    refused("no optimizer state", mode="pd2hf")
    optimizer = paddle.load(str(source / "optimizer.pdopt"))
    of_another = {f"conv_0.w_0_{kind}": paddle.ones([2]) for kind in MOMENTS}
    paddle.save(optimizer | of_another, str(source / "optimizer.pdopt"))
    refused("optimizer.pdopt: has state of 'conv_0.w_0', which no weight is called")
    paddle.save({k: v for k, v in optimizer.items() if k != "linear_3.w_0_moment2_0"}, str(source / "optimizer.pdopt"))
    refused("has no moment2_0 of 'llama.layers.0.self_attn.v_proj.weight'")
    paddle.save(optimizer | {"linear_3.w_0_moment2_0": paddle.ones([5])}, str(source / "optimizer.pdopt"))
    refused(r"optimizer.pdopt: moment2_0 of .*, \[5\] elements in 1 sharding")
    paddle.save(optimizer | {"linear_3.w_0_beta1_pow_acc_0": paddle.ones([1])}, str(source / "optimizer.pdopt"))
    refused("parts of different age")
    shutil.rmtree(source)
    save_trained(source, model, state_of, shards=2)
    (source / "optimizer.shard01.pdopt").unlink()
    refused("the optimizer's state has no moment1_0")
