"""LoRA adapters in files: merged into checkpoints, made PEFT's, described, refused.

PEFT's folders are made by hand here, under the names that peft 0.21.2 writes (seen in its files); what is expected is
W + scaling · B · A in float64. tests/end_to_end/weights/test_peft.py compares with PEFT itself.
"""

import json
import sys
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from paddle_te.weights import CheckpointError, command, convert
from paddle_te.weights.adapters import open_adapter
from paddle_te.weights.adapters.peft import convert_adapter
from paddle_te.weights.adapters.settings import Targets
from paddle_te.weights.inspection import inspect
from paddle_te.weights.tensors import TensorRef
from tests.unit.runs.completed import complete
from tests.unit.runs.hostile import hostile_pickle
from tests.unit.weights.models import Model, assert_same, load_folder
from tests.unit.weights.test_huggingface import merged, save_hf

ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]


def base(folder, rng, dtype="float32", family="llama", **config):
    """A checkpoint in Hugging Face's layout, of finite numbers: {name: array}."""
    model = Model(rng, dtype, family=family)
    kind = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
    for name, tensor in model.native.items():
        numbers = rng.standard_normal(tensor.shape, np.float32).astype(kind)
        model.native[name] = numbers.view(tensor.dtype)
    return save_hf(folder, model, **config)


@dataclass
class Peft:
    """An adapter in PEFT's form. tensors: {its name in the file: array}. deltas: {weight's name: float64}."""

    config: dict
    tensors: dict = field(default_factory=dict)
    deltas: dict = field(default_factory=dict)

    def save(self, folder, **config):
        folder.mkdir()
        save_file(self.tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(self.config | config))
        return folder


def draw(rng, state, modules, layers=(0, 1), r=3, alpha=6, rslora=False, ranks=None, alphas=None, **config):
    """A Peft with random A and B beside the modules with these last words."""
    said = dict(peft_type="LORA", task_type="CAUSAL_LM", r=r, lora_alpha=alpha, use_rslora=rslora, bias="none")
    adapter = Peft(said | dict(target_modules=modules) | config)
    for name, weight in state.items():
        module, word = name.removesuffix(".weight"), name.split(".")[-2]
        layer = int(name.split(".")[2]) if ".layers." in name else None
        if word not in modules or layer not in (*layers, None) or weight.ndim == 1:
            continue
        rank, scale = (ranks or {}).get(word, r), (alphas or {}).get(word, alpha)
        a, b = (
            rng.standard_normal(shape).astype(np.float32) for shape in ((rank, weight.shape[1]), (len(weight), rank))
        )
        kind = ("lora_A.weight", "lora_B.weight")
        if word == "embed_tokens":
            a, b, kind = b.T, a.T, ("lora_embedding_A", "lora_embedding_B")
        for factor, array in zip(kind, (a, b), strict=True):
            adapter.tensors[f"base_model.model.{module}.{factor}"] = np.ascontiguousarray(array)
        product = b.astype(np.float64) @ a
        scaling = scale / np.sqrt(rank) if rslora else scale / rank
        adapter.deltas[name] = scaling * (product.T if word == "embed_tokens" else product)
    return adapter


def check_merged(folder, state, adapter):
    found = load_file(folder / "model.safetensors")
    assert found.keys() == state.keys()
    for name, weight in state.items():
        if name not in adapter.deltas:
            assert found[name].tobytes() == weight.tobytes(), name
            continue
        want = weight.astype(np.float64) + adapter.deltas[name]
        np.testing.assert_allclose(found[name], want, rtol=1e-5, atol=1e-5, err_msg=name)
    assert adapter.deltas


@pytest.mark.parametrize("settings", [
    dict(modules=ATTENTION + MLP),
    dict(modules=["q_proj", "v_proj"], rslora=True, r=4, alpha=16),
    dict(modules=ATTENTION + MLP, layers=[1], layers_to_transform=[1]),
    dict(modules=MLP, ranks=dict(up_proj=5), rank_pattern=dict(up_proj=5)),
    dict(modules=MLP, alphas=dict(up_proj=9), alpha_pattern={"up_proj": 9}, rslora=True),
    dict(modules=["q_proj", "lm_head", "embed_tokens"]),
    dict(modules=ATTENTION, family="qwen2"),
], ids=["all", "rslora", "layers", "ranks", "alphas", "embed", "qwen2"])  # fmt: skip
def test_merging_adds_the_products(tmp_path, rng, settings):
    state = base(tmp_path / "base", rng, family=settings.pop("family", "llama"))
    adapter = draw(rng, state, **settings)
    adapter.save(tmp_path / "adapter")
    convert(tmp_path / "base", tmp_path / "out", lora_path=tmp_path / "adapter", progress=False)
    check_merged(tmp_path / "out", state, adapter)
    assert (tmp_path / "out/tokenizer.json").is_file()


@pytest.mark.parametrize("mode, options", [
    ("hf2te", dict(tensor_parallel_degree=2)),
    ("hf2te", dict(tensor_parallel_degree=2, pipeline_parallel_degree=2, dtype="bfloat16")),
    ("hf2pd", dict(fuse_attention_qkv=True, fuse_attention_ffn=True, tensor_parallel_degree=2)),
    ("hf2pd", dict(tensor_parallel_degree=4)),  # more ranks than kv heads
])  # fmt: skip
def test_merged_on_the_way_to_any_layout(tmp_path, rng, mode, options):
    """To the bit what merging first gives."""
    state = base(tmp_path / "base", rng)
    draw(rng, state, ATTENTION + ["up_proj", "down_proj"]).save(tmp_path / "adapter")
    convert(tmp_path / "base", tmp_path / "merged", lora_path=tmp_path / "adapter", progress=False)
    convert(tmp_path / "merged", tmp_path / "want", mode, progress=False, **options)
    convert(tmp_path / "base", tmp_path / "got", mode, lora_path=tmp_path / "adapter", progress=False, **options)
    want, got = load_folder(tmp_path / "want"), load_folder(tmp_path / "got")
    assert want.keys() == got.keys()
    for name in want:
        assert_same(got[name], want[name])
    # onto a base of several ranks, back in one
    convert(tmp_path / "base", tmp_path / "ranks", mode, progress=False, **options | dict(dtype=None))
    back = dict(progress=False, tensor_parallel_degree=1, pipeline_parallel_degree=1)
    convert(tmp_path / "ranks", tmp_path / "back", lora_path=tmp_path / "adapter", **back)
    convert(tmp_path / "back", tmp_path / "hf", f"{mode[-2:]}2hf", progress=False)
    assert_same(merged(tmp_path / "hf"), merged(tmp_path / "merged"))


def test_a_sum_is_rounded_once(tmp_path, rng):
    state = base(tmp_path / "base", rng, "bfloat16")
    adapter = draw(rng, state, MLP)
    adapter.save(tmp_path / "adapter")
    convert(tmp_path / "base", tmp_path / "half", lora_path=tmp_path / "adapter", progress=False)
    convert(tmp_path / "base", tmp_path / "wide", lora_path=tmp_path / "adapter", dtype="float32", progress=False)
    half, wide = (load_file(tmp_path / name / "model.safetensors") for name in ("half", "wide"))
    for name, delta in adapter.deltas.items():
        want = state[name].astype(np.float64) + delta
        np.testing.assert_allclose(wide[name], want, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(half[name], wide[name].astype(ml_dtypes.bfloat16))


def test_weights_and_biases_that_an_adapter_has_whole(tmp_path, rng):
    """modules_to_save, and bias="all"; LoRA beside a head that was saved too is added to the saved one."""
    state = base(tmp_path / "base", rng, family="qwen2")
    adapter = draw(rng, state, ["q_proj", "lm_head"], bias="all", modules_to_save=["embed_tokens"])
    new = {name: rng.standard_normal(weight.shape).astype(np.float32) for name, weight in state.items()}
    whole = {
        "model.embed_tokens.weight": "model.embed_tokens.weight",
        "lm_head.weight": "lm_head.base_layer.weight",
        "model.layers.0.self_attn.q_proj.bias": "model.layers.0.self_attn.q_proj.base_layer.bias",
        "model.layers.1.self_attn.v_proj.bias": "model.layers.1.self_attn.v_proj.bias",
    }
    for name, theirs in whole.items():
        adapter.tensors[f"base_model.model.{theirs}"] = new[name]
    adapter.save(tmp_path / "adapter")
    convert(tmp_path / "base", tmp_path / "out", lora_path=tmp_path / "adapter", progress=False)
    check_merged(tmp_path / "out", state | {name: new[name] for name in whole}, adapter)
    with pytest.raises(CheckpointError, match="changes 'lm_head', which with tie_word_embeddings=true"):
        save = base(tmp_path / "tied", rng, family="qwen2", tie_word_embeddings=True)
        save_file({n: w for n, w in save.items() if n != "lm_head.weight"}, tmp_path / "tied/model.safetensors")
        convert(tmp_path / "tied", tmp_path / "no", lora_path=tmp_path / "adapter", progress=False)


PLACES = {"self_attn.o_proj": "self_attention.proj.o_proj"}
PLACES |= {f"self_attn.{x}_proj": f"self_attention.layernorm_qkv.{x}_proj" for x in "qkv"}
PLACES |= {f"mlp.{x}_proj": f"layernorm_mlp.{x}_proj" for x in ("gate", "up", "down")}


def paddles(adapter, kind):
    """A Peft's A and B in the names of te, pd or PaddleFormers, [in, r] and [r, out]."""
    found = {}
    for name, array in adapter.tensors.items():
        layer, module, factor = (
            name.removeprefix("base_model.model.model.layers.").removesuffix(".weight").partition(".")[0],
            *name.split(".", 5)[5].removesuffix(".weight").rsplit(".", 1),
        )
        stem = {
            "te": f"llama.layers.{layer}.transformer.{PLACES[module]}",
            "pd": f"llama.layers.{layer}.{module}",
            "formers": f"model.layers.{layer}.{module}",
        }[kind]
        found[f"{stem}.{factor}"] = np.ascontiguousarray(array.T)
    return found


def save_paddles(folder, model_folder, adapter, tensors, ranks=1, **config):
    """What PaddleNLP's LoRAModel saves; ranks: tensors is a list of theirs."""
    folder.mkdir()
    said = dict(r=adapter.config["r"], lora_alpha=adapter.config["lora_alpha"], rslora=adapter.config["use_rslora"])
    said |= dict(tensor_parallel_degree=ranks, target_modules=[".*q_proj"], pissa=False, dtype="float32")
    (folder / "lora_config.json").write_text(json.dumps(said | config))
    (folder / "config.json").write_text((model_folder / "config.json").read_text())
    for rank, share in enumerate(tensors if ranks > 1 else [tensors]):
        variant = f".tp{rank:02d}" * (ranks > 1)
        weights = {name: paddle.to_tensor(array) for name, array in share.items()}
        paddle.save(weights, str(folder / f"lora_model_state{variant}.pdparams"))
    return folder


def split(tensors, kind):
    """Two tensor parallel ranks' shares: B of q, k, v, gate and up, A of o and down."""
    ranks = []
    for rank in (0, 1):
        share = {}
        for name, array in tensors.items():
            row = any(word in name for word in ("o_proj", "down_proj"))
            axis = {("lora_A", True): 0, ("lora_B", False): 1}.get((name.rpartition(".")[2], row))
            share[name] = array if axis is None else np.split(array, 2, axis)[rank]
        ranks.append(share)
    return ranks


@pytest.mark.parametrize("kind", ["te", "pd", "formers"])
@pytest.mark.parametrize("rslora", [False, True])
def test_paddles_adapters(tmp_path, rng, kind, rslora):
    """Merged as PEFT's of the same numbers, in one file or in those of two ranks, and made PEFT's again, to the bit."""
    state = base(tmp_path / "base", rng)
    adapter = draw(rng, state, ATTENTION + MLP, rslora=rslora)
    adapter.save(tmp_path / "peft")
    tensors = paddles(adapter, kind)
    save_paddles(tmp_path / "one", tmp_path / "base", adapter, tensors, base_model_name_or_path="the/base")
    save_paddles(tmp_path / "two", tmp_path / "base", adapter, split(tensors, kind), ranks=2)
    for name in ("peft", "one", "two"):
        convert(tmp_path / "base", tmp_path / f"m-{name}", lora_path=tmp_path / name, progress=False)
        assert_same(merged(tmp_path / f"m-{name}"), merged(tmp_path / "m-peft"))
    for name in ("one", "two"):
        convert_adapter(tmp_path / name, tmp_path / f"p-{name}", "te2hf" if kind == "te" else "pd2hf")
        assert_same(load_file(tmp_path / f"p-{name}/adapter_model.safetensors"), adapter.tensors)
    said = json.loads((tmp_path / "p-one/adapter_config.json").read_text())
    assert said["target_modules"] == sorted(ATTENTION + MLP) and said["base_model_name_or_path"] == "the/base"
    assert (said["r"], said["lora_alpha"], said["use_rslora"]) == (3, 6, rslora)
    # what vLLM's peft_helper refuses, or does not read
    assert said["bias"] == "none" and said["modules_to_save"] is None and not said["use_dora"]
    assert said["rank_pattern"] == said["alpha_pattern"] == {}


def test_adapters_of_fused_weights(tmp_path, rng):
    """PaddleNLP's qkv_proj has one A, and B's rows go by kv head: PEFT's q, k and v get the same A each."""
    state = base(tmp_path / "base", rng)
    adapter = draw(rng, state, ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"])
    fused, groups = {}, 2
    for layer in (0, 1):
        for module, parts in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            stem = f"base_model.model.model.layers.{layer}.{module}"
            a = adapter.tensors[f"{stem}.{parts[0]}_proj.lora_A.weight"]
            b = [adapter.tensors[f"{stem}.{part}_proj.lora_B.weight"] for part in parts]
            for part in parts:
                name = f"{stem.removeprefix('base_model.model.')}.{part}_proj.weight"
                adapter.tensors[f"{stem}.{part}_proj.lora_A.weight"] = a
                adapter.deltas[name] = 2.0 * adapter.tensors[f"{stem}.{part}_proj.lora_B.weight"].astype(np.float64) @ a
            rows = np.concatenate([x for g in range(groups) for x in (np.split(y, groups)[g] for y in b)])
            whole = rows if parts == "qkv" else np.concatenate(b)
            name = f"llama.layers.{layer}.{module}.{'qkv_proj' if parts == 'qkv' else 'gate_up_fused_proj'}"
            fused |= {f"{name}.lora_A": np.ascontiguousarray(a.T), f"{name}.lora_B": np.ascontiguousarray(whole.T)}
    save_paddles(tmp_path / "fused", tmp_path / "base", adapter, fused)
    ranks = [{name: of_rank(name, array, rank) for name, array in fused.items()} for rank in (0, 1)]
    save_paddles(tmp_path / "two", tmp_path / "base", adapter, ranks, ranks=2)
    convert_adapter(tmp_path / "two", tmp_path / "peft-of-two", "pd2hf")
    assert_same(load_file(tmp_path / "peft-of-two/adapter_model.safetensors"), adapter.tensors)
    convert_adapter(tmp_path / "fused", tmp_path / "peft", "pd2hf")
    assert_same(load_file(tmp_path / "peft/adapter_model.safetensors"), adapter.tensors)
    convert(tmp_path / "base", tmp_path / "out", lora_path=tmp_path / "fused", progress=False)
    check_merged(tmp_path / "out", state, adapter)


def of_rank(name, array, rank):
    """One of two ranks' share of a fused module's A or B: kv heads, or the same rows of gate and of up."""
    if name.endswith("lora_A"):
        return array
    if "qkv" in name:
        return np.split(array, 2, 1)[rank]
    return np.concatenate([np.split(half, 2, 1)[rank] for half in np.split(array, 2, 1)], 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_adapter_of_a_pipelines_stages(tmp_path, rng, ranks):
    """Each stage has the tensors of its layers, or each rank's share of them."""
    state = base(tmp_path / "base", rng)
    adapter = draw(rng, state, ATTENTION)
    folder = save_paddles(tmp_path / "a", tmp_path / "base", adapter, paddles(adapter, "te"))
    (folder / "lora_model_state.pdparams").unlink()
    whole = paddles(adapter, "te")
    for stage in (0, 1):
        of_stage = {name: array for name, array in whole.items() if f".layers.{stage}." in name}
        assert of_stage
        for rank in range(ranks):
            mark = f"tp{rank:02d}_pp{stage:02d}" if ranks > 1 else f"pp{stage:02d}"
            paddle.save(of_stage, str(folder / f"lora_model_state.{mark}.pdparams"))
    assert {name: len(refs) for name, refs in open_adapter(folder).tensors.items()} == dict.fromkeys(whole, ranks)
    (folder / "lora_model_state.pp01.pdparams").unlink(missing_ok=True)
    paddle.save(of_stage, str(folder / f"lora_model_state.{mark[:-2]}02.pdparams"))
    with pytest.raises(CheckpointError, match="missing, though other ranks' files|files of two stages"):
        open_adapter(folder)


def test_several_adapters_or_none_in_a_folder(tmp_path, rng):
    state = base(tmp_path / "base", rng)
    adapter = draw(rng, state, ATTENTION)
    folder = save_paddles(tmp_path / "a", tmp_path / "base", adapter, paddles(adapter, "te"))
    paddle.save({}, str(folder / "lora_model_state.tp00.pdparams"))
    with pytest.raises(CheckpointError, match="several adapters: lora_model_state.pdparams, lora_model_state.tp00"):
        open_adapter(folder)
    (folder / "lora_model_state.tp00.pdparams").rename(folder / "lora_model_state.tp01.pdparams")
    (folder / "lora_model_state.pdparams").unlink()
    with pytest.raises(CheckpointError, match="tp00.pdparams: missing, though other ranks' files are there"):
        open_adapter(folder)
    (folder / "lora_model_state.tp01.pdparams").unlink()
    with pytest.raises(CheckpointError, match="no weights of an adapter"):
        open_adapter(folder)
    (folder / "lora_config.json").unlink()
    with pytest.raises(CheckpointError, match="neither adapter_config.json nor lora_config.json"):
        open_adapter(folder)


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if name not in key}


BAD = {
    "dora": (dict(use_dora=True), None, "use_dora=True: adapters with it are not understood"),
    "unknown": (dict(flash_lora={"x": 1}), None, "flash_lora="),
    "type": (dict(peft_type="LOHA"), None, "peft_type='LOHA'"),
    "task": (dict(task_type="SEQ_CLS"), None, "task_type='SEQ_CLS'"),
    "pissa": (dict(init_lora_weights="pissa"), None, "init_lora_weights='pissa' changed the base"),
    "replicated": (dict(layer_replication=[[0, 2]]), None, "layer_replication="),
    "tokens": (dict(trainable_token_indices=[1]), None, "trainable_token_indices="),
    "rank": (dict(r=4), None, r"q_proj.lora_A.weight' and .* have rank 3, but adapter_config.json says 4"),
    "no rank": (dict(r=0), None, "r is 0: it must be a whole number of at least 1"),
    "words": (dict(lora_alpha="16"), None, "lora_alpha is '16': it must be a number"),
    "no targets": (dict(target_modules=None), None, "target_modules is None"),
    "bad pattern": (dict(target_modules="(q_proj"), None, "is no regular expression"),
    "other targets": (
        dict(target_modules=["q_proj"]),
        None,
        "'model.layers.0.self_attn.v_proj' has A and B in the file",
    ),
    "more targets": (dict(target_modules=ATTENTION), None, "'model.layers.0.self_attn.k_proj' has no A and B"),
    "saved": (dict(modules_to_save=["lm_head"]), None, "modules_to_save names 'lm_head', which is not in the file"),
    "no B": ({}, without("layers.1.self_attn.v_proj.lora_B"), "v_proj.lora_A.weight' has no B beside it"),
    "a layer": (
        {},
        without("layers.1.self_attn.v_proj"),
        "'model.layers.1.self_attn.v_proj' has no A and B in the file",
    ),
    "nothing": ({}, lambda tensors: {"x": np.zeros(1, np.float32)}, "'x' is none of the tensors that LoRA has"),
    "bias of B": (
        {},
        lambda tensors: tensors | {"base_model.model.model.layers.0.mlp.up_proj.lora_B.bias": np.zeros(3, np.float32)},
        "lora_B.bias' is none of the tensors",
    ),
    "vector": ({}, lambda tensors: {name: value[0] for name, value in tensors.items()}, "which is no matrix"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_understood_is_refused_by_name(tmp_path, rng, case):
    config, change, message = BAD[case]
    state = base(tmp_path / "base", rng)
    adapter = draw(rng, state, ["q_proj", "v_proj"])
    adapter.tensors = (change or dict)(adapter.tensors)
    adapter.save(tmp_path / "adapter", **config)
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "base", tmp_path / "out", lora_path=tmp_path / "adapter", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change, message", [
    (dict(layers=3), r"layers.2.*', and .*base has 2 layers"),
    (dict(intermediate=64), r"mlp.down_proj' is a weight \[32, 64\] there, and \[32, 48\] in .*base"),
    (dict(kv_heads=4), r"self_attn.k_proj' is a weight \[32, 32\] there, and \[16, 32\]"),
])  # fmt: skip
def test_an_adapter_of_another_base(tmp_path, rng, change, message):
    base(tmp_path / "base", rng)
    other = save_hf(tmp_path / "other", Model(rng, **change))
    draw(rng, other, ATTENTION + MLP, layers=range(9)).save(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "base", tmp_path / "out", lora_path=tmp_path / "adapter", progress=False)


def test_another_family(tmp_path, rng):
    state = base(tmp_path / "base", rng)
    adapter = draw(rng, state, ATTENTION)
    tensors = {name.replace("llama.", "qwen2."): value for name, value in paddles(adapter, "te").items()}
    save_paddles(tmp_path / "adapter", tmp_path / "base", adapter, tensors)
    with pytest.raises(CheckpointError, match="'qwen2.layers.0.*' is none of the tensors that LoRA has beside a Llama"):
        convert(tmp_path / "base", tmp_path / "out", lora_path=tmp_path / "adapter", progress=False)


def test_a_contradicting_scaling(tmp_path, rng):
    adapter = draw(rng, base(tmp_path / "base", rng), ATTENTION)
    folder = save_paddles(tmp_path / "a", tmp_path / "base", adapter, paddles(adapter, "te"), scaling=4.0)
    with pytest.raises(CheckpointError, match="scaling=4.0, but 2 follows from r=3, lora_alpha=6, rslora=False"):
        open_adapter(folder)


JUNK = [None, True, -1, 0, 1e400, "x", "(", [], [1], ["("], {}, {"(": 1}, {"q_proj": -1}, {"q_proj": "x"}, [[]]]


def test_junk_in_a_configuration_is_an_error_of_one_line(tmp_path, rng):
    state = base(tmp_path / "base", rng)
    folder = draw(rng, state, ["q_proj"]).save(tmp_path / "adapter")
    path, said = folder / "adapter_config.json", json.loads((folder / "adapter_config.json").read_text())
    keys = "exclude_modules layers_to_transform layers_pattern rank_pattern alpha_pattern modules_to_save "
    refused = 0
    for key in (*said, *keys.split(), "lora_dropout", "init_lora_weights"):
        for junk in JUNK:
            path.write_text(json.dumps(said | {key: junk}))
            try:
                convert(tmp_path / "base", tmp_path / f"{key}-{refused}", lora_path=folder, progress=False)
            except CheckpointError as error:
                assert "adapter" in str(error) and "\n" not in str(error)
                refused += 1
            finally:
                for made in tmp_path.glob(f"{key}-*"):
                    made.rename(tmp_path / f"done-{key}-{JUNK.index(junk)}-{len(list(tmp_path.iterdir()))}")
    assert refused > 100
    for text in ("", "[]", "{", "{}", "1e999"):
        path.write_text(text)
        with pytest.raises(CheckpointError, match="adapter_config.json"):
            open_adapter(folder)


def test_pickles_are_not_run(tmp_path, rng):
    state = base(tmp_path / "base", rng)
    adapter = draw(rng, state, ATTENTION)
    folder = adapter.save(tmp_path / "adapter")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(hostile_pickle(tmp_path / "ran"))
    with pytest.raises(CheckpointError, match="adapter_model.bin: is a pickle.*safe_serialization=True"):
        open_adapter(folder)
    ours = save_paddles(tmp_path / "ours", tmp_path / "base", adapter, paddles(adapter, "te"))
    (ours / "lora_model_state.pdparams").write_bytes(hostile_pickle(tmp_path / "ran"))
    with pytest.raises(CheckpointError, match="refused: it holds"):
        convert(tmp_path / "base", tmp_path / "out", lora_path=ours, progress=False)
    assert not (tmp_path / "ran").exists()


def test_a_flipped_bit_in_an_adapter_with_a_manifest(tmp_path, rng):
    adapter = draw(rng, base(tmp_path / "base", rng), ATTENTION)
    folder = save_paddles(tmp_path / "a", tmp_path / "base", adapter, paddles(adapter, "te"))
    complete(folder)
    path = folder / "lora_model_state.pdparams"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for call in (
        lambda **more: convert(tmp_path / "base", tmp_path / "out", lora_path=folder, progress=False, **more),
        lambda **more: convert_adapter(folder, tmp_path / "peft", "te2hf", **more),
    ):
        with pytest.raises(CheckpointError, match="lora_model_state.pdparams has another checksum"):
            call()
        call(verify_checkpoint="none")


def test_not_a_number_is_told(tmp_path, rng):
    adapter = draw(rng, base(tmp_path / "base", rng), ATTENTION)
    next(iter(adapter.tensors.values()))[0, 0] = np.nan
    told = []
    adapter.save(tmp_path / "adapter")
    convert(tmp_path / "base", tmp_path / "out", lora_path=tmp_path / "adapter", progress=False, tell=told.append)
    save_paddles(tmp_path / "ours", tmp_path / "base", adapter, paddles(adapter, "te"))
    convert_adapter(tmp_path / "ours", tmp_path / "peft", "te2hf", tell=told.append)
    assert len(told) == 2 and all("NaN or infinity" in line and "self_attn.q_proj" in line for line in told)


def run(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["paddle-te convert", *map(str, words)])
    status = None
    try:
        command.main()
    except SystemExit as stop:
        status = stop.code
    return status, capsys.readouterr().out


def test_the_commands(tmp_path, rng, monkeypatch, capsys):
    state = base(tmp_path / "base", rng)
    adapter = draw(rng, state, ATTENTION)
    ours = save_paddles(
        tmp_path / "ours",
        tmp_path / "base",
        adapter,
        paddles(adapter, "te"),
        base_model_name_or_path=str(tmp_path / "base"),
    )
    (ours / "tokenizer.json").write_text("{}")
    take = "--input_ckpt_path", ours, "--output_ckpt_path"
    status, _ = run(monkeypatch, capsys, *take, tmp_path / "out")
    merge = f"paddle-te convert --input_ckpt_path {tmp_path / 'base'} --lora_path {ours} --output_ckpt_path OUTPUT"
    assert "holds a LoRA adapter in Transformer Engine's names, rank 3, scaled by alpha / rank = 2" in status
    assert merge in status and "--mode te2hf" in status
    assert run(monkeypatch, capsys, *take, tmp_path / "peft", "--mode", "te2hf") == (
        None,
        f"{tmp_path}/peft: complete\n",
    )
    assert (tmp_path / "peft/tokenizer.json").is_file()
    status, _ = run(monkeypatch, capsys, *take, tmp_path / "x", "--mode", "te2hf", "--tensor_parallel_degree", 2)
    assert "--tensor_parallel_degree" in status and "leave it out" in status
    words = merge.replace("OUTPUT", str(tmp_path / "merged")).split()[2:]
    assert run(monkeypatch, capsys, *words) == (None, f"{tmp_path}/merged: complete\n")
    adapter.save(tmp_path / "want")
    convert(tmp_path / "base", tmp_path / "direct", lora_path=tmp_path / "want", progress=False)
    assert_same(merged(tmp_path / "merged"), merged(tmp_path / "direct"))
    for more, message in (
        (("--mode", "te2formers"), "in Hugging Face's layout"),
        (("--with_optimizer",), "--with_optimizer with --lora_path"),
    ):
        status, _ = run(monkeypatch, capsys, *words[:-1], tmp_path / "no", *more)
        assert message in status
    with pytest.raises(CheckpointError, match="holds a LoRA adapter, not a model: give the model's folder here"):
        convert(ours, tmp_path / "no", "te2hf", progress=False)


def test_inspection(tmp_path, rng, monkeypatch):
    adapter = draw(rng, base(tmp_path / "base", rng), ["q_proj", "v_proj"], rslora=True, r=4, alpha=8)
    folder = adapter.save(tmp_path / "adapter", base_model_name_or_path="somewhere/Llama")
    monkeypatch.setattr(TensorRef, "read", None)
    facts, _, table = inspect(folder).partition("\n\n")
    facts = dict(line.split(maxsplit=1) for line in facts.splitlines())
    assert facts["adapter"] == "LoRA, in PEFT's names" and facts["rank"] == "4" and facts["scaling"] == "4"
    assert facts["beside"] == "q, v of 2 layers" and facts["parameters"] == f"{2 * 4 * (32 + 32 + 32 + 16):,}"
    assert f"--input_ckpt_path MODEL --lora_path {folder}" in inspect(folder)
    assert len(table.splitlines()) == 1 + len(adapter.tensors)


# What check_target_module_exists of peft 0.21.2 says
MATCHES = [
    (Targets(["q_proj"]), "model.layers.0.self_attn.q_proj", True),
    (Targets(["proj"]), "model.layers.0.self_attn.q_proj", False),
    (Targets(r".*\.[qv]_proj"), "model.layers.0.self_attn.v_proj", True),
    (Targets(r"[qv]_proj"), "model.layers.0.self_attn.v_proj", False),
    (Targets(["q_proj"], layers=[1]), "model.layers.1.self_attn.q_proj", True),
    (Targets(["q_proj"], layers=1), "model.layers.11.self_attn.q_proj", False),
    (Targets(["q_proj"], layers=[0], layers_pattern="layers"), "model.layers.0.self_attn.q_proj", True),
    (Targets(["q_proj"], layers=[0], layers_pattern=["h"]), "model.layers.0.self_attn.q_proj", False),
    (Targets(r".*q_proj", layers=[1]), "model.layers.0.self_attn.q_proj", True),  # a text's layers are in it
    (Targets(["q_proj"], exclude=["layers.0.self_attn.q_proj"]), "model.layers.0.self_attn.q_proj", False),
    (Targets(["q_proj"], exclude=r".*\.0\..*"), "model.layers.1.self_attn.q_proj", True),
    (Targets("all-linear"), "model.layers.0.mlp.up_proj", True),
    (Targets("all-linear"), "lm_head", False),
]


@pytest.mark.parametrize("targets, module, wanted", MATCHES)
def test_targets(targets, module, wanted):
    assert targets.match(module) == wanted
