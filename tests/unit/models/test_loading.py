"""Models from checkpoint folders: the right weights, and errors before any work."""

import numpy as np
import paddle
import pytest

from paddle_te.models.llama import LlamaForCausalLM
from paddle_te.models.loading import check_same_model, load_model, read_config
from paddle_te.weights import CheckpointError, convert
from tests.small_llama import first
from tests.unit.models.native import relative, tiny_config, two_models


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
