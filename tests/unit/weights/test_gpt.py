"""GPT's weights in PaddleNLP's layout, Transformer Engine's and that of transformers' GPT-2."""

import json

import numpy as np
import paddle
import pytest
from paddlenlp.transformers.conversion_utils import fuse_param_func

from paddle_te.configs.families import GPT
from paddle_te.configs.spec import spec_of
from paddle_te.hosts.paddlenlp.loading import load_model, read_config
from paddle_te.weights import CheckpointError, convert, layer_splits, native_to_te, te_layout, te_to_native
from paddle_te.weights.dims import Dims
from tests.unit.hosts.paddlenlp.native import paddlenlps, tiny_config
from tests.unit.weights.models import assert_same, load_folder, save_single

KINDS = "weight", "bias"
HIDDEN, FFN, LAYERS, HEADS, VOCAB, POSITIONS = 32, 48, 2, 4, 24, 40
CONFIG = dict(
    model_type="gpt", architectures=["GPTForCausalLM"], hidden_size=HIDDEN, intermediate_size=FFN,
    num_hidden_layers=LAYERS, num_attention_heads=HEADS, vocab_size=VOCAB, max_position_embeddings=POSITIONS,
    hidden_activation="gelu", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, tie_word_embeddings=True,
    ignore_index=-100,
)  # fmt: skip


@pytest.fixture
def native(seed):
    """Weights in PaddleNLP's layout: [in, out]."""
    draw = np.random.default_rng(seed).standard_normal
    linears = {f"self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "out")}
    linears |= {"linear1": (HIDDEN, FFN), "linear2": (FFN, HIDDEN)}
    shapes = {
        "gpt.embeddings.word_embeddings.weight": (VOCAB, HIDDEN),
        "gpt.embeddings.position_embeddings.weight": (POSITIONS, HIDDEN),
    }
    for n in range(LAYERS):
        layer = f"gpt.decoder.layers.{n}."
        for name, shape in linears.items():
            shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[1:]}
        shapes |= {f"{layer}norm{i}.{kind}": (HIDDEN,) for i in (1, 2) for kind in KINDS}
    shapes |= {f"gpt.decoder.norm.{kind}": (HIDDEN,) for kind in KINDS}
    state = {name: draw(shape).astype("float32") for name, shape in shapes.items()}
    return state | {"lm_head.weight": state["gpt.embeddings.word_embeddings.weight"]}


def in_te(native):
    """The same in Transformer Engine's layout, by hand."""
    state = {name: value for name, value in native.items() if ".layers." not in name}
    for n in range(LAYERS):
        layer, ours = f"gpt.decoder.layers.{n}.", f"gpt.decoder.layers.{n}.transformer."
        get = {name.removeprefix(layer): value for name, value in native.items() if name.startswith(layer)}
        weight, bias = (np.concatenate([get[f"self_attn.{p}_proj.{kind}"] for p in "qkv"], -1) for kind in KINDS)
        attention, mlp = f"{ours}self_attention.", f"{ours}layernorm_mlp."
        state |= {
            f"{attention}layernorm_qkv.ln_weight": get["norm1.weight"],
            f"{attention}layernorm_qkv.ln_bias": get["norm1.bias"],
            f"{attention}layernorm_qkv.weight": weight.T,
            f"{attention}layernorm_qkv.bias": bias,
            f"{attention}proj.weight": get["self_attn.out_proj.weight"].T,
            f"{attention}proj.bias": get["self_attn.out_proj.bias"],
            f"{mlp}ln_weight": get["norm2.weight"],
            f"{mlp}ln_bias": get["norm2.bias"],
            f"{mlp}fc1_weight": get["linear1.weight"].T,
            f"{mlp}fc1_bias": get["linear1.bias"],
            f"{mlp}fc2_weight": get["linear2.weight"].T,
            f"{mlp}fc2_bias": get["linear2.bias"],
        }
    return state


def fused(native):
    """q, k and v fused by PaddleNLP's own function."""
    fuse, state = fuse_param_func(), dict(native)
    for n in range(LAYERS):
        for kind in KINDS:
            parts = [state.pop(f"gpt.decoder.layers.{n}.self_attn.{part}_proj.{kind}") for part in "qkv"]
            name = f"gpt.decoder.layers.{n}.self_attn.qkv_proj.{kind}"
            state[name] = fuse(parts, is_qkv=True, num_heads=HEADS, num_key_value_heads=HEADS)
    return state


def in_gpt2(native):
    """The same as transformers names it: Conv1D's weights are [in, out], q, k and v side by side."""
    names = {"norm1": "ln_1", "norm2": "ln_2", "self_attn.out_proj": "attn.c_proj"}
    names |= {"linear1": "mlp.c_fc", "linear2": "mlp.c_proj"}
    outside = {"embeddings.word_embeddings": "wte", "embeddings.position_embeddings": "wpe", "decoder.norm": "ln_f"}
    state = {}
    for kind in KINDS:
        for theirs, name in outside.items():
            if f"gpt.{theirs}.{kind}" in native:
                state[f"transformer.{name}.{kind}"] = native[f"gpt.{theirs}.{kind}"]
        for n in range(LAYERS):
            layer, new = f"gpt.decoder.layers.{n}.", f"transformer.h.{n}."
            state |= {f"{new}{name}.{kind}": native[f"{layer}{theirs}.{kind}"] for theirs, name in names.items()}
            qkv = [native[f"{layer}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            state[f"{new}attn.c_attn.{kind}"] = np.concatenate(qkv, -1)
    return state


def test_native_to_te_and_back(native):
    te = native_to_te(native, CONFIG)
    assert_same({name: np.ascontiguousarray(value) for name, value in te.items()}, in_te(native))
    assert_same(native_to_te(fused(native), CONFIG), te)
    assert_same(te_to_native(te, CONFIG), native)
    assert_same(te_to_native(te, CONFIG, fuse_attention_qkv=True), fused(native))


def test_ranks_share_what_paddlenlps_ranks_do(native):
    splits = layer_splits(te_layout(True, GPT), Dims(spec_of(CONFIG)))
    axes = {name.removeprefix("transformer."): split.axis for name, split in splits.items()}
    assert axes == {
        "self_attention.layernorm_qkv.weight": 0,
        "self_attention.layernorm_qkv.bias": 0,
        "self_attention.proj.weight": 1,
        "layernorm_mlp.fc1_weight": 0,
        "layernorm_mlp.fc1_bias": 0,
        "layernorm_mlp.fc2_weight": 1,
    }
    te = native_to_te(native, CONFIG)
    for name, split in splits.items():
        whole = te[f"gpt.decoder.layers.1.{name}"]
        shares = [split.share(whole, 2, rank) for rank in range(2)]
        assert (split.whole(shares) == whole).all() and shares[0].shape[split.axis] == whole.shape[split.axis] // 2


GPT2 = dict(
    model_type="gpt2", architectures=["GPT2LMHeadModel"], n_embd=HIDDEN, n_inner=FFN, n_layer=LAYERS, n_head=HEADS,
    vocab_size=VOCAB, n_positions=POSITIONS, activation_function="gelu_new", resid_pdrop=0.0, attn_pdrop=0.0,
    embd_pdrop=0.0, torch_dtype="float32", bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def write(folder, state, config, suffix=".safetensors"):
    save_single(folder, state, "float32", suffix)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_hugging_face_to_te_and_back(tmp_path, native):
    source = write(tmp_path / "gpt2", in_gpt2(native), GPT2)
    convert(source, tmp_path / "te", "hf2te")
    te = {name: value for tensors in load_folder(tmp_path / "te").values() for name, value in tensors.items()}
    want = in_te(native)
    assert {**te, "lm_head.weight": want["lm_head.weight"]}.keys() == want.keys()
    assert_same(te, {name: want[name] for name in te})
    convert(tmp_path / "te", tmp_path / "back", "te2hf")
    (back,) = load_folder(tmp_path / "back").values()
    assert_same(back, in_gpt2(native))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: config[key] for key in GPT2} == GPT2


def test_what_paddlenlps_gpt_does_not_compute_is_refused(tmp_path, native):
    for change, message in [
        (dict(activation_function="gelu"), "activation_function='gelu'.*only 'gelu_new'"),
        (dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True"),
        (dict(layer_norm_epsilon=1e-6), "layer_norm_epsilon=1e-06"),
    ]:
        folder = write(tmp_path / "gpt2", in_gpt2(native), GPT2 | change)
        with pytest.raises(CheckpointError, match=message):
            convert(folder, tmp_path / "te", "hf2te")
        with pytest.raises(CheckpointError, match=message):
            read_config(folder)


@pytest.mark.parametrize("degree", [2, 4])
def test_reshard_and_back(tmp_path, native, degree):
    source = write(tmp_path / "te", in_te(native), CONFIG, ".pdparams")
    convert(source, tmp_path / "split", "reshard", tensor_parallel_degree=degree)
    convert(tmp_path / "split", tmp_path / "whole", "reshard", tensor_parallel_degree=1)
    (whole,) = load_folder(tmp_path / "whole").values()
    assert_same(whole, in_te(native))


@pytest.mark.parametrize("backend", ["none", "paddle"])
def test_a_folder_of_hugging_face_is_loaded(tmp_path, native, backend):
    """The model computes what one does with the weights put in by hand."""
    folder = write(tmp_path / "gpt2", in_gpt2(native), GPT2)
    got = load_model(folder, backend)
    config = tiny_config("gpt", **{key: CONFIG[key] for key in CONFIG if key not in ("model_type", "architectures")})
    wanted = paddlenlps(config, "ForCausalLM")(config)
    wanted.set_state_dict(native)
    wanted.eval()
    ids = paddle.randint(0, VOCAB, [2, 12])
    got, want = (model(ids, return_dict=True).logits.numpy() for model in (got, wanted))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
