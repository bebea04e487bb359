import json
from itertools import product

import numpy as np
import pytest

from paddle_te.weights import CheckpointError, convert
from paddle_te.weights.layout import Part
from paddle_te.weights.output_files import pipeline_stages
from paddle_te.weights.tensors import TensorRef
from tests.unit.weights.models import Model, assert_same, load_folder, save_config, save_shards, save_single


def name(tp, pp, degrees):
    """PaddleNLP's name of a rank's file, written out."""
    parts = [f"tp{tp:02d}"] * (degrees[0] > 1) + [f"pp{pp:02d}"] * (degrees[1] > 1)
    return "_".join(["model_state." + parts[0], *parts[1:]]) + ".pdparams" if parts else "model_state.pdparams"


def even_stage(tensor, layers, pp):
    """Stage of a tensor when pp divides the layers."""
    if "layers." in tensor:
        return int(tensor.split(".")[2]) * pp // layers
    return 0 if "embed" in tensor else pp - 1


def save_ranks(folder, model, tp, pp):
    for t, p in product(range(tp), range(pp)):
        state = {k: v for k, v in model.rank(t, tp).items() if even_stage(k, model.layers, pp) == p}
        variant = name(t, p, (tp, pp)).removeprefix("model_state").removesuffix(".pdparams").strip(".")
        save_single(folder, state, model.dtype, variant=variant)
    save_config(folder, model)


def reshard(source, target, tp, pp, mode="reshard", **kwargs):
    degrees = dict(tensor_parallel_degree=tp, pipeline_parallel_degree=pp)
    convert(source, target, mode, progress=False, **degrees, **kwargs)
    return load_folder(target)


@pytest.mark.parametrize("source", [(1, 1), (2, 1), (4, 2), (1, 4), (2, 4)])
@pytest.mark.parametrize("target", [(1, 1), (2, 2), (4, 1), (1, 2), (4, 4)])
@pytest.mark.parametrize("kv_heads, vocab, family", [
    (4, 24, "llama"), (2, 26, "llama"), (2, 24, "qwen2")  # 2 kv heads on 4 ranks, 26 words: not split by 4
])  # fmt: skip
def test_any_to_any(tmp_path, rng, source, target, kv_heads, vocab, family):
    model = Model(rng, "bfloat16", layers=4, kv_heads=kv_heads, vocab=vocab, family=family)
    save_ranks(tmp_path / "in", model, *source)
    files = reshard(tmp_path / "in", tmp_path / "out", *target)
    assert files.keys() == {name(t, p, target) for t, p in product(range(target[0]), range(target[1]))}
    for t, p in product(range(target[0]), range(target[1])):
        expected = {k: v for k, v in model.rank(t, target[0]).items() if even_stage(k, 4, target[1]) == p}
        assert_same(files[name(t, p, target)], expected)


@pytest.mark.parametrize("layout", ["native", "fused", "te"])
@pytest.mark.parametrize("fuse", [None, False, True])
def test_each_tensor_is_read_once_for_all_ranks(tmp_path, rng, monkeypatch, layout, fuse):
    model = Model(rng, heads=8, kv_heads=4)
    state = {"native": model.native, "fused": model.fused(), "te": model.te()}[layout]
    save_single(tmp_path / "in", state, model.dtype)
    save_config(tmp_path / "in", model)
    offsets, read = [], TensorRef.read
    monkeypatch.setattr(TensorRef, "read", lambda self: (offsets.append(self.offset), read(self))[1])
    if fuse is None:
        mode, flags = ("reshard" if layout == "te" else "pd2te"), {}
    else:
        mode = "te2pd" if layout == "te" else "reshard"
        flags = dict(fuse_attention_qkv=fuse, fuse_attention_ffn=fuse)
    reshard(tmp_path / "in", tmp_path / "out", 4, 1, mode, **flags)
    assert len(offsets) == len(set(offsets)) == len(state)


@pytest.mark.parametrize("degrees", [(2, 3), (3, 2)])
def test_degrees_with_no_common_divisor(tmp_path, rng, degrees):
    model = Model(rng, heads=6, kv_heads=6, hidden=36, vocab=30)
    save_ranks(tmp_path / "in", model, degrees[0], 1)
    files = reshard(tmp_path / "in", tmp_path / "out", degrees[1], 1)
    for t in range(degrees[1]):
        assert_same(files[f"model_state.tp{t:02d}.pdparams"], model.rank(t, degrees[1]))


@pytest.mark.parametrize("fused", [(False, False), (True, True)])
def test_fused_weights_are_split_as_paddlenlp_splits_them(tmp_path, rng, fused):
    from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM

    model = Model(rng, heads=8, kv_heads=4)
    save_single(tmp_path / "in", model.fused(*fused), "float32")
    save_config(tmp_path / "in", model)
    files = reshard(tmp_path / "in", tmp_path / "out", 2, 1)
    for rank in (0, 1):
        config = LlamaConfig(**model.config)
        config.fuse_attention_qkv, config.fuse_attention_ffn = fused
        config.tensor_parallel_degree, config.tensor_parallel_rank = 2, rank
        actions = LlamaForCausalLM._get_tensor_parallel_mappings(config)
        expected = {
            key: actions[short](tensor) if (short := key.removeprefix("llama.")) in actions else tensor
            for key, tensor in model.fused(*fused).items()
        }
        assert_same(files[f"model_state.tp{rank:02d}.pdparams"], expected)
    assert_same(reshard(tmp_path / "out", tmp_path / "back", 1, 1)["model_state.pdparams"], model.fused(*fused))


@pytest.mark.parametrize("mode", ["pd2te", "reshard"])
def test_together_with_te(tmp_path, rng, mode):
    """te's stacked weights are split as paddle_te.hosts.paddlenlp's tensor parallel table says."""
    from paddlenlp.transformers import LlamaConfig

    from paddle_te.hosts.paddlenlp.tensor_parallel import layer_mappings

    model = Model(rng, "bfloat16", layers=4, kv_heads=4)
    save_single(tmp_path / "in", model.native if mode == "pd2te" else model.te(), "bfloat16")
    save_config(tmp_path / "in", model)
    files = reshard(tmp_path / "in", tmp_path / "te", 4, 2, mode)
    assert len(files) == 8
    for rank in range(4):
        config = LlamaConfig(**model.config)
        config.tensor_parallel_degree, config.tensor_parallel_rank = 4, rank
        actions = layer_mappings(config, is_split=True)
        expected = {
            key: actions[short](np.ascontiguousarray(tensor))
            for key, tensor in model.te().items()
            if (short := key.removeprefix("llama.")) in actions
        }
        got = files[f"model_state.tp{rank:02d}_pp00.pdparams"] | files[f"model_state.tp{rank:02d}_pp01.pdparams"]
        assert_same({key: got[key] for key in expected}, expected)
    # a third layout in between, back to one native file
    reshard(tmp_path / "te", tmp_path / "te22", 2, 2)
    assert_same(reshard(tmp_path / "te22", tmp_path / "back", 1, 1, "te2pd")["model_state.pdparams"], model.native)


def test_virtual_stages(tmp_path, rng):
    model = Model(rng, layers=8)
    save_single(tmp_path / "in", model.native, "float32")
    save_config(tmp_path / "in", model)
    files = reshard(tmp_path / "in", tmp_path / "out", 1, 2, virtual_pp_degree=2)
    layers = {file: sorted({int(k.split(".")[2]) for k in state if "layers." in k}) for file, state in files.items()}
    assert layers == {"model_state.pp00.pdparams": [0, 1, 4, 5], "model_state.pp01.pdparams": [2, 3, 6, 7]}
    assert "llama.embed_tokens.weight" in files["model_state.pp00.pdparams"]
    assert "lm_head.weight" in files["model_state.pp01.pdparams"]
    assert_same(reshard(tmp_path / "out", tmp_path / "back", 1, 1)["model_state.pdparams"], model.native)


@pytest.mark.parametrize(
    "layers, pp, vp", [(4, 2, 1), (8, 4, 2), (8, 2, 2), (5, 2, 1), (7, 4, 1), (6, 4, 1), (9, 3, 3), (3, 1, 1)]
)
def test_stages_are_paddles(layers, pp, vp):
    """Against Paddle's own SegmentLayers, called as PaddleNLP's LlamaForCausalLMPipe does."""
    from paddle.distributed.fleet.meta_parallel.parallel_layers.pp_layers import LayerDesc, SegmentLayers
    from paddle.nn import Layer

    class LlamaDecoderLayerPipe(Layer):
        pass

    descriptions = [LayerDesc(Layer), *[LayerDesc(LlamaDecoderLayerPipe)] * layers, LayerDesc(Layer), LayerDesc(Layer)]
    method = "layer:LlamaDecoderLayer" if layers % pp == 0 else "uniform"
    starts = SegmentLayers(descriptions, pp, method, vp if vp > 1 else None).do_segment()
    theirs = [
        next(c for c in range(len(starts)) if starts[c] <= item < starts[c + 1]) % pp for item in range(layers + 3)
    ]
    stage_of = pipeline_stages(layers, pp, vp)
    ours = [stage_of(Part(None, None, "embed")), *(stage_of(Part(n, None, "q")) for n in range(layers))]
    assert ours + [stage_of(Part(None, None, name)) for name in ("norm", "lm_head")] == theirs


@pytest.mark.parametrize("workers", [1, 3])
def test_shards_format_and_workers(tmp_path, rng, workers):
    model = Model(rng, "bfloat16", layers=4)
    save_ranks(tmp_path / "in", model, 2, 2)
    options = dict(max_shard_size=10_000, format="safetensors", workers=workers)
    files = reshard(tmp_path / "in", tmp_path / "out", 1, 1, **options)
    assert len(files) > 3 and all(sum(t.nbytes for t in state.values()) <= 10_000 for state in files.values())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {key: file for file, state in files.items() for key in state}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in model.native.values())
    merged = {key: tensor for state in files.values() for key, tensor in state.items()}
    assert_same(merged, model.native)
    back = reshard(tmp_path / "out", tmp_path / "back", 2, 2, format="pdparams", workers=workers)
    assert back.keys() == load_folder(tmp_path / "in").keys()
    for file, state in load_folder(tmp_path / "in").items():
        assert_same(back[file], state)


def test_format_alone_keeps_the_shards(tmp_path, rng):
    model = Model(rng, "float16")
    save_shards(tmp_path / "in", model.native, "float16", lambda key: 1 if "layers.0" in key else 2)
    save_config(tmp_path / "in", model)
    convert(tmp_path / "in", tmp_path / "out", "reshard", format="safetensors", progress=False)
    files = load_folder(tmp_path / "out")
    assert sorted(files) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    convert(tmp_path / "out", tmp_path / "back", "reshard", format="pdparams", progress=False)
    before, after = load_folder(tmp_path / "in"), load_folder(tmp_path / "back")
    assert before.keys() == after.keys()
    for file in before:
        assert_same(after[file], before[file])


def test_errors(tmp_path, rng):
    model = Model(rng, kv_heads=2)
    save_single(tmp_path / "in", model.native, "float32")
    save_config(tmp_path / "in", model)
    for mode, options, message in [
        ("reshard", {}, "give --tensor_parallel_degree"),
        ("reshard", dict(tensor_parallel_degree=0), "--tensor_parallel_degree 0: it must be at least 1"),
        (
            "reshard",
            dict(tensor_parallel_degree=3),
            "num_attention_heads=4 cannot be divided by tensor_parallel_degree=3",
        ),
        (
            "pd2te",
            dict(tensor_parallel_degree=4),
            "num_key_value_heads=2 cannot be divided by tensor_parallel_degree=4",
        ),
        ("reshard", dict(pipeline_parallel_degree=9), "the model has only 5 parts to spread"),
        ("reshard", dict(pipeline_parallel_degree=2, virtual_pp_degree=2), "2 layers cannot be divided into 4 equal"),
        ("reshard", dict(format="torch"), "--format torch"),
        ("pd2hf", dict(tensor_parallel_degree=2), "Hugging Face's layout is whole"),
        ("pd2hf", dict(format="pdparams"), "Hugging Face's layout is whole"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / "in", tmp_path / "out", mode, progress=False, **options)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]
    save_single(tmp_path / "shard", model.native, "float32", variant="tp00_shard01")
    with pytest.raises(CheckpointError, match="model_state.tp00_shard01.pdparams: not one of the file names"):
        convert(tmp_path / "shard", tmp_path / "out", "reshard", format="pdparams", progress=False)
