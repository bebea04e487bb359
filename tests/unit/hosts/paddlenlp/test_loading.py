"""Models from checkpoint folders: the right weights, and errors before any work."""

import gc
import json
import tracemalloc

import numpy as np
import paddle
import pytest
from paddle.base import core

from paddle_te import device, fp8
from paddle_te.hosts.paddlenlp.gpt import GPTForCausalLM
from paddle_te.hosts.paddlenlp.llama import LlamaForCausalLM
from paddle_te.hosts.paddlenlp.loading import (
    check_same_model,
    from_pretrained,
    load_config,
    load_model,
    read_config,
    stage_layer_names,
)
from paddle_te.models.pipeline import _whole_name
from paddle_te.weights import CheckpointError, convert
from paddle_te.weights import folder as folders
from tests import emulated_te
from tests.small_models import first
from tests.te_weights import relative
from tests.unit.hosts.paddlenlp.native import tiny_config, two_models


@pytest.fixture
def folder(tmp_path, seed):
    model = LlamaForCausalLM(tiny_config(use_fp8=True, initializer_range=0.2))
    model.save_pretrained(str(tmp_path / "te"))
    return tmp_path / "te"


def test_both_layouts_give_the_same_logits(folder, tmp_path):
    convert(folder, tmp_path / "native", "te2pd", progress=False)
    ours, native = load_model(folder, "paddle"), load_model(tmp_path / "native", "none")
    assert not ours.training and not ours.config.use_fp8  # of the run that saved it
    ids = paddle.randint(0, 96, [2, 9])
    assert relative(ours(ids), native(ids)) < 1e-5
    fp8 = load_model(folder, "paddle", use_fp8=True, fp8_recipe="current")
    assert 1e-3 < relative(fp8(ids), ours(ids)) < 0.5  # 60 seeds: at most 0.23; unrelated logits: 1.4


@pytest.mark.parametrize("backend, mode", [("paddle", "reshard"), ("none", "te2pd")])
def test_files_of_single_ranks_are_read_whole(folder, tmp_path, backend, mode):
    """As initial weights of a run in other degrees; PaddleNLP would look for model_state.pdparams."""
    options = dict(tensor_parallel_degree=2, pipeline_parallel_degree=2, format="pdparams", progress=False)
    convert(folder, tmp_path / "ranks", mode, **options)
    assert (tmp_path / "ranks/model_state.tp01_pp01.pdparams").is_file()
    ids = paddle.randint(0, 96, [2, 9])
    assert relative(load_model(tmp_path / "ranks", backend)(ids), load_model(folder, "paddle")(ids)) < 1e-5


def test_weights_are_opened_once(monkeypatch, tmp_path, seed):
    opened, opens = [], folders.open_checkpoint
    monkeypatch.setattr(folders, "open_checkpoint", lambda *args: opened.append(args) or opens(*args))
    LlamaForCausalLM(tiny_config()).save_pretrained(str(tmp_path))
    load_model(tmp_path, "paddle")
    assert len(opened) == 1


@pytest.mark.parametrize("where", [True, "grad"])
def test_what_a_te_run_has_saved_computes_on_pd(tmp_path, seed, where):
    """Its configuration says where te's GEMMs added up gradients, which pd's do not."""
    LlamaForCausalLM(tiny_config(fuse_wgrad_accumulation=False)).save_pretrained(str(tmp_path))
    path, ids = tmp_path / "config.json", paddle.randint(0, 96, [1, 9])
    want = load_model(tmp_path, "paddle")(ids)[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(fuse_wgrad_accumulation=where)))
    np.testing.assert_array_equal(load_model(tmp_path, "paddle")(ids)[0].numpy(), want.numpy())


def test_quantized_as_they_are_read(tmp_path, seed):
    """The host holds at most twice the largest tensor at a time, and the bytes are those of any layout and run."""
    sizes = dict(vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=3)
    LlamaForCausalLM(tiny_config(**sizes)).save_pretrained(str(tmp_path / "te"))
    convert(tmp_path / "te", tmp_path / "hf", "te2hf", progress=False)
    states, largest = [], 4 * 1024 * 256
    for layout in ("te", "hf"):
        config = load_config(tmp_path / layout, "paddle", use_fp8=True, fp8_recipe="current")
        tracemalloc.start()
        model = from_pretrained(LlamaForCausalLM, tmp_path / layout, config, "float32", in_fp8=True)
        _, peak = tracemalloc.get_traced_memory()  # NumPy's arrays and Python's objects
        tracemalloc.stop()
        states.append(model.state_dict())
        assert peak < 2 * largest + 2**18
        assert sum(4 * weight.size for weight in states[-1].values()) > 6 * largest
    assert sum(weight.dtype == paddle.uint8 for weight in states[0].values()) == 3 * 4
    for name, weight in states[0].items():
        np.testing.assert_array_equal(weight.numpy(), states[1][name].numpy(), err_msg=name)


@pytest.mark.parametrize("keeps", [False, True], ids=["", "keeping transposes"])
def test_no_weight_stays_in_its_own_precision(monkeypatch, tmp_path, seed, keeps):
    """On te's device, here the host's memory, which Paddle's allocator counts."""
    emulated_te.install(monkeypatch.setattr)
    sizes = dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=6)
    LlamaForCausalLM(tiny_config(**sizes)).save_pretrained(str(tmp_path))
    config = load_config(tmp_path, "transformer_engine", use_fp8=True)
    gc.collect()  # what earlier tests left in circles of references could be let go of meanwhile
    before = core.host_memory_stat_current_value("Allocated", 0)
    device.reset_peak_memory()
    model = from_pretrained(LlamaForCausalLM, tmp_path, config, "bfloat16", in_fp8=True, keep_transpose_cache=keeps)
    held = core.host_memory_stat_current_value("Allocated", 0) - before
    peak = device.peak_memory() - before
    parameters = model.parameters()
    in_bf16, largest = 2 * sum(p.size for p in parameters), 2 * max(p.size for p in parameters)
    transposes = sum(p.size for p in parameters if p.dtype == paddle.uint8) * keeps
    least = sum(p.size * p.element_size() for p in parameters) + transposes
    assert least <= held < least + 2**12  # and a scale for each weight
    # of one weight what it is initialised from, or quantized from
    assert peak < held + 4 * largest and (keeps or held + 4 * largest < in_bf16)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_other_families_in_every_layout(tmp_path, seed, family):
    """And no bias is left out where a model without biases is asked for."""
    _, model = two_models(family, initializer_range=0.2)
    model.save_pretrained(str(tmp_path / "te"))
    ids = paddle.randint(0, 96, [2, 9])
    model.eval()
    for mode, backend in (("te2pd", "none"), ("te2hf", "none"), ("te2hf", "paddle")):
        convert(tmp_path / "te", tmp_path / f"{mode}_{backend}", mode, progress=False)
        loaded = load_model(tmp_path / f"{mode}_{backend}", backend)
        assert loaded.config.model_type == family and relative(first(loaded(ids)), first(model(ids))) < 1e-5
    with pytest.raises(CheckpointError, match=f"a model with model_type={family}, .*this run's has model_type=llama"):
        check_same_model(tiny_config(), tmp_path / "te2hf_none")


@pytest.mark.parametrize("said, meant", [(None, -100), (7, 7)])
def test_all_words_of_gpt_have_a_loss_unless_its_configuration_says_otherwise(tmp_path, said, meant):
    """PaddleNLP's default leaves out word 0."""
    tiny_config("gpt", ignore_index=7).save_pretrained(str(tmp_path))
    content = json.loads((tmp_path / "config.json").read_text())
    assert content.pop("ignore_index") == 7
    (tmp_path / "config.json").write_text(json.dumps(content | ({"ignore_index": said} if said else {})))
    assert read_config(tmp_path).ignore_index == meant


def test_longer_texts_than_paddlenlps_mistral_has_a_window_for(tmp_path):
    """What reads a folder may not say how long its sequences are: then the model's longest count."""
    model, _ = two_models("mistral", sliding_window=16, seq_length=None)
    model.save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="sequences of 64 tokens with sliding_window=16"):
        load_model(tmp_path)
    load_model(tmp_path, seq_length=16)


def test_weights_of_another_model_are_refused_by_all_values_that_differ(folder, tmp_path):
    config = read_config(folder)
    check_same_model(config, folder)
    config.num_hidden_layers, config.rms_norm_eps = 6, 1e-3
    wanted = "num_hidden_layers=2, rms_norm_eps=.*, this run's has num_hidden_layers=6, rms_norm_eps=0.001: give"
    with pytest.raises(CheckpointError, match=wanted):
        check_same_model(config, folder)


@pytest.mark.parametrize(
    "backend, settings, message",
    [
        ("none", {}, "te2pd"),
        ("paddle", dict(dtype="bfloat16"), "float32"),
        ("paddle", dict(dtype="int8"), "it may be"),
        ("pd", {}, "none, paddle, transformer_engine"),
        ("none", dict(use_fp8=True), "fp8 needs"),
    ],
)
def test_what_does_not_fit_is_refused(folder, backend, settings, message):
    with pytest.raises(ValueError, match=message):
        load_model(folder, backend, **settings)


def test_transformer_engine_says_what_is_missing(folder):
    from paddle_te.native import BackendUnavailable, load

    try:
        load(False)
    except BackendUnavailable as error:
        with pytest.raises(BackendUnavailable, match="transformer_engine|Transformer Engine") as raised:
            load_model(folder, "transformer_engine")
        assert str(raised.value) == str(error)
    else:
        assert np.isfinite(load_model(folder, "transformer_engine", "bfloat16").lm_head.weight.numpy()).all()


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no config.json"):
        load_model(tmp_path)


class LastStage(paddle.nn.Layer):
    """What a pipeline's last stage has of a whole GPT: a decoder layer, and the head under the embedding's name."""

    def __init__(self, model):
        super().__init__()
        self.add_sublayer("2", model.gpt.decoder.layers[1])
        self.shared_layers = paddle.nn.LayerDict({"gpt_shared_weight": model.lm_head})
        self._pp_to_single_mapping = {
            "2.transformer.self_attention.proj.weight": "gpt.decoder.layers.1.transformer.self_attention.proj.weight",
            "2.transformer.layernorm_mlp.fc1_weight": "gpt.decoder.layers.1.transformer.layernorm_mlp.fc1_weight",
            "2.transformer.self_attention.layernorm_qkv.weight": "gpt.decoder.layers.1.transformer.self_attention."
            "layernorm_qkv.weight",
            "shared_layers.gpt_shared_weight.weight": "gpt.embeddings.word_embeddings.weight",
        }


def test_a_stages_layers_have_the_whole_models_names():
    """Of layers with fp8 state, the head's too, which PaddleNLP's GPT calls after the embedding."""
    model = GPTForCausalLM(tiny_config("gpt", use_fp8=True, fp8_lm_head=True))
    whole = {name for name in fp8.name_modules(model) if "layers.0" not in name}
    assert {*stage_layer_names(LastStage(model)).values()} == whole and "lm_head" in whole
    assert stage_layer_names(model) == {}


LAYER = "transformer.self_attention"
WEIGHTS = {
    "llama.4.transformer.layernorm_mlp.fc1_weight": "llama.layers.3.transformer.layernorm_mlp.fc1_weight",
    f"llama.4.{LAYER}.proj.weight": f"llama.layers.3.{LAYER}.proj.weight",
    f"llama.40.{LAYER}.proj.weight": f"llama.layers.39.{LAYER}.proj.weight",
}


@pytest.mark.parametrize("name, whole", [
    ("llama.4.transformer.layernorm_mlp", "llama.layers.3.transformer.layernorm_mlp"),
    (f"llama.4.{LAYER}.proj", f"llama.layers.3.{LAYER}.proj"),
    (f"llama.40.{LAYER}.core_attention", f"llama.layers.39.{LAYER}.core_attention"),  # which has no weights
])  # fmt: skip
def test_a_layers_name_in_the_whole_model(name, whole):
    assert _whole_name(name, WEIGHTS) == whole


def test_a_layer_without_any_weight_around_it_is_named():
    with pytest.raises(KeyError, match="elsewhere.attention: no weight"):
        _whole_name("elsewhere.attention", WEIGHTS)
