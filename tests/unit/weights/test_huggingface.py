import json
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from paddle_te.configs.families import FAMILIES, MISTRAL
from paddle_te.weights import CheckpointError, convert, read_weights
from paddle_te.weights.config import convert_config, native_config
from paddle_te.weights.layouts import hf_layout, native_layout, te_layout
from tests.unit.weights.models import Model, assert_same, load_folder, save_config, save_single

HF_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
CONFIG = dict(
    hidden_act="silu", rms_norm_eps=1e-5, rope_theta=500000.0, max_position_embeddings=64, eos_token_id=[2, 3]
)


def hf_state(model):
    """The model's weights under Hugging Face's names, by hand: every Linear is [out, in]."""
    state = {}
    for name, tensor in model.native.items():
        name = name.replace(f"{model.family}.", "model.")
        linear = name.endswith("_proj.weight") or name == "lm_head.weight"
        state[name] = np.ascontiguousarray(tensor.T if linear else tensor).view(HF_TYPES[model.dtype])
    return state


def save_hf(folder, model, shards=1, **config):
    folder.mkdir()
    state = hf_state(model)
    names = list(state)
    files = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    )
    place = {name: files[i % shards] for i, name in enumerate(names)}  # parts of a layer lie in different shards
    for file in files:
        save_file({n: state[n] for n in names if place[n] == file}, folder / file, metadata={"format": "pt"})
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    (folder / "config.json").write_text(json.dumps(model.config | CONFIG | config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(b"pieces")
    return state


def merged(folder):
    return {name: tensor for state in load_folder(folder).values() for name, tensor in state.items()}


@pytest.mark.parametrize("family, shards, dtype", [
    *product(["llama"], [1, 3], HF_TYPES), ("qwen2", 3, "bfloat16")
])  # fmt: skip
@pytest.mark.parametrize("layout", ["te", "pd"])
def test_import_and_export(tmp_path, rng, layout, family, shards, dtype):
    model = Model(rng, dtype, family=family)
    state = save_hf(tmp_path / "hf", model, shards)
    convert(tmp_path / "hf", tmp_path / "in", f"hf2{layout}", format="pdparams", progress=False)
    assert_same(merged(tmp_path / "in"), model.te() if layout == "te" else model.native)
    convert(tmp_path / "in", tmp_path / "out", f"{layout}2hf", progress=False)
    exported = merged(tmp_path / "out")
    assert_same(exported, state)
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, "np") as opened:
            assert opened.metadata() == {"format": "pt"}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"} <= names
    assert (tmp_path / "in" / "sentencepiece.bpe.model").read_bytes() == b"pieces"  # PaddleNLP's name
    assert not {"sentencepiece.bpe.model"} & names and not (tmp_path / "in" / "tokenizer.model").exists()
    assert ("model.safetensors.index.json" in names) == (shards > 1)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert model.config.items() <= config.items() and CONFIG.items() <= config.items()
    assert config["torch_dtype"] == dtype


def test_shards_are_read_whatever_digits_their_names_have(tmp_path, rng):
    """DeepSeek publishes model-00001-of-000163.safetensors."""
    model = Model(rng, "bfloat16")
    save_hf(tmp_path / "hf", model, 3)
    index = tmp_path / "hf" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("-of-00003", "-of-000003"))
    for path in (tmp_path / "hf").glob("model-*"):
        path.rename(path.with_name(path.name.replace("-of-00003", "-of-000003")))
    convert(tmp_path / "hf", tmp_path / "pd", "hf2pd", progress=False)
    assert_same(merged(tmp_path / "pd"), model.native)


def test_straight_to_parallel_files_and_back(tmp_path, rng):
    model = Model(rng, "bfloat16", kv_heads=4)
    state = save_hf(tmp_path / "hf", model, 2)
    options = dict(tensor_parallel_degree=2, pipeline_parallel_degree=2, progress=False)
    convert(tmp_path / "hf", tmp_path / "te", "hf2te", format="pdparams", **options)
    assert len(load_folder(tmp_path / "te")) == 4
    convert(tmp_path / "te", tmp_path / "out", "te2hf", progress=False)
    assert_same(merged(tmp_path / "out"), state)
    convert(
        tmp_path / "hf", tmp_path / "fused", "hf2pd", fuse_attention_qkv=True, fuse_attention_ffn=True, progress=False
    )
    assert_same(merged(tmp_path / "fused"), model.fused())


def test_tied_embeddings_have_no_lm_head(tmp_path, rng):
    model = Model(rng)
    del model.native["lm_head.weight"]
    state = save_hf(tmp_path / "hf", model, tie_word_embeddings=True)
    convert(tmp_path / "hf", tmp_path / "pd", "hf2pd", progress=False)
    assert_same(merged(tmp_path / "pd"), model.native)
    # PaddleNLP itself saves the head too
    tied = model.native | {"lm_head.weight": model.native["llama.embed_tokens.weight"]}
    save_single(tmp_path / "saved", tied, "float32")
    (tmp_path / "saved" / "config.json").write_text(json.dumps(model.config | {"tie_word_embeddings": True}))
    convert(tmp_path / "saved", tmp_path / "out", "pd2hf", progress=False)
    assert_same(merged(tmp_path / "out"), state)


def test_older_files_hold_computed_buffers(tmp_path, rng):
    model = Model(rng)
    save_hf(tmp_path / "hf", model)
    state = hf_state(model) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    save_file(state, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    convert(tmp_path / "hf", tmp_path / "pd", "hf2pd", progress=False)
    assert_same(merged(tmp_path / "pd"), model.native)


def test_pytorch_pickles_are_not_read(tmp_path, rng):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="pytorch_model.*.bin is not read: save the model as safetensors"):
        convert(tmp_path / "hf", tmp_path / "out", "hf2pd", progress=False)


def test_modes_must_fit(tmp_path, rng):
    model = Model(rng)
    save_hf(tmp_path / "hf", model)
    save_single(tmp_path / "pd", model.native, "float32")
    save_config(tmp_path / "pd", model)
    for source, mode, message in [
        ("hf", "pd2te", "Hugging Face's layout, not one for pd2te; --mode may be hf2te or hf2pd"),
        ("hf", "reshard", "use hf2te or hf2pd"),
        ("pd", "hf2te", "--mode may be pd2te or pd2hf"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / source, tmp_path / "out", mode, progress=False, format="safetensors")


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPE = [
    # Hugging Face's (transformers 4, transformers 5), PaddleNLP's
    ({"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}, {}),
    (
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0},
    ),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling_type": "dynamic_ntk", "rope_scaling_factor": 2.0},
    ),
    ({"rope_scaling": LLAMA3}, {"rope_parameters": LLAMA3}, {"rope_scaling": LLAMA3}),
    ({"rope_scaling": YARN}, {"rope_parameters": YARN}, {"rope_scaling": YARN}),
    # what the dictionary lacks transformers takes from CONFIG's max_position_embeddings
    (
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": YARN | {"original_max_position_embeddings": 64}},
    ),
    (
        {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 16}},
        {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 16}},
        {"rope_scaling": YARN},
    ),
]


@pytest.mark.parametrize("old, new, native", ROPE)
def test_rope_in_config(rng, old, new, native):
    base = Model(rng).config | CONFIG
    theta = base.pop("rope_theta")
    new = {"rope_parameters": new["rope_parameters"] | {"rope_theta": theta}}
    for config in (base | old | {"rope_theta": theta}, base | new):
        converted = convert_config(config, hf_layout(), te_layout(), "bfloat16")
        assert converted["rope_theta"] == theta and converted["dtype"] == "bfloat16"
        assert {k: v for k, v in converted.items() if k.startswith("rope_scaling")} == native
        again = convert_config(converted, te_layout(), hf_layout(), "bfloat16")
        assert convert_config(again, hf_layout(), te_layout(), "bfloat16") == converted


@pytest.mark.parametrize("window", [4096, None])
def test_a_sliding_window_goes_along(rng, window):
    """Left out, it is transformers' default."""
    config = Model(rng, family="mistral").config
    for given in (config | {"sliding_window": window}, config if window else None):
        if given:
            converted = convert_config(given, hf_layout(family=MISTRAL), te_layout(family=MISTRAL), "bfloat16")
            again = convert_config(converted, te_layout(family=MISTRAL), hf_layout(family=MISTRAL), "bfloat16")
            assert converted["sliding_window"] == again["sliding_window"] == window
            assert converted["model_type"] == again["model_type"] == "mistral"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        (
            {"model_type": "falcon"},
            "model_type='falcon' is not supported; it may be one of: llama, qwen2, .*, mistral",
        ),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=True: PaddleNLP's Qwen2"),
        ({"model_type": "qwen2", "attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"head_dim": 128}, "head_dim=128: the heads of PaddleNLP's Llama have only"),
        ({"sliding_window": 4096}, "sliding_window=4096: PaddleNLP's Llama has only None"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window=0"),
        ({"model_type": "mistral", "tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling of type dynamic lacks factor"),
        ({"rope_parameters": YARN | {"factor": -2.0}}, "rope_parameters.factor=-2.0: it must be a number above 0"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
    ],
)
def test_what_paddlenlp_cannot_express(rng, change, message):
    with pytest.raises(CheckpointError, match=message):
        convert_config(Model(rng).config | change, hf_layout(), te_layout(), "float32")


@pytest.mark.parametrize("family, scaling", [("llama", YARN), ("qwen2", LLAMA3), ("mistral", YARN)])
def test_scalings_that_paddlenlps_own_layers_have_not(rng, family, scaling):
    family = FAMILIES[family]
    config = Model(rng, family=family.model_type).config | CONFIG | {"rope_scaling": scaling}
    with pytest.raises(CheckpointError, match=f"PaddleNLP's own {family.title} would leave it out"):
        convert_config(config, hf_layout(family=family), native_layout(family=family), "float32")


BAD_VALUES = [
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("model_type", "bloom"),
    ("model_type", ["llama"]),
    ("sliding_window", 4096),
    ("rope_theta", 0),
    ("rope_theta", "x"),
    ("rope_theta", float("nan")),
    ("rms_norm_eps", -1),
    ("rms_norm_eps", float("inf")),
    ("vocab_size", -5),
    ("vocab_size", 100.5),
    ("head_dim", 128),
    ("hidden_size", "64"),
    ("hidden_size", 66),
    ("intermediate_size", True),
    ("num_hidden_layers", 0),
    ("num_attention_heads", 0),
    ("num_key_value_heads", 3),
    ("max_position_embeddings", -1),
    ("rope_scaling_factor", 0),
]


@pytest.mark.parametrize("theirs", [False, True])
@pytest.mark.parametrize("key, value", BAD_VALUES)
def test_values_that_no_llama_has(rng, key, value, theirs):
    """In PaddleNLP's words, where it would take them in silence, as in Hugging Face's."""
    config = Model(rng).config | {key: value} | ({"transformers_version": "4.40.0"} if theirs else {})
    if theirs and key == "rope_scaling_factor":
        config |= {"rope_scaling": {"rope_type": "linear", "factor": value}}
        key = "rope_scaling.factor"
    with pytest.raises(CheckpointError, match=f"config.json: .*{key}="):
        native_config(config)
    if not theirs:
        with pytest.raises(CheckpointError, match=f"config.json: .*{key}="):
            convert_config(config, te_layout(), hf_layout(), "float32")


def test_a_configuration_that_is_no_object():
    with pytest.raises(CheckpointError, match="not a JSON object"):
        native_config([1, 2])


@pytest.mark.parametrize("change", [{"alibi": True}, {"rope_scaling_type": "ntk", "rope_scaling_factor": 2.0}])
def test_what_hugging_face_cannot_express(rng, change):
    with pytest.raises(CheckpointError, match="config.json"):
        convert_config(Model(rng).config | change, te_layout(), hf_layout(), "float32")


@pytest.mark.parametrize("target", [te_layout(), native_layout(), native_layout(True, True)])
def test_streamed_weights_are_the_converted_ones(tmp_path, rng, target):
    """What a tensor parallel rank reads directly from the folder."""
    save_hf(tmp_path / "hf", Model(rng, "bfloat16", kv_heads=4), 2)
    fused = {flag: getattr(target, flag) for flag in ("fuse_attention_qkv", "fuse_attention_ffn")}
    options = dict(tensor_parallel_degree=2, format="pdparams", progress=False)
    options |= fused if target.kind == "pd" else {}
    convert(tmp_path / "hf", tmp_path / "tp2", f"hf2{target.kind}", **options)
    for rank in (0, 1):
        want = load_folder(tmp_path / "tp2")[f"model_state.tp0{rank}.pdparams"]
        assert_same(dict(read_weights(tmp_path / "hf", target, set(want), 2, rank)), want)
    some = {"llama.norm.weight", "lm_head.weight"}
    assert {name for name, _ in read_weights(tmp_path / "hf", target, some)} == some
