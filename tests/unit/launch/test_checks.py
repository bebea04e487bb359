"""What the launcher says of its arguments before it starts anything."""

from argparse import Namespace

import pytest

from paddle_te.launch.checks import check_start, check_weights
from paddle_te.launch.errors import LaunchError


@pytest.mark.parametrize("files", [("adapter_config.json", "adapter_model.safetensors"), ("lora_config.json",)])
def test_an_adapter_is_no_model(tmp_path, files):
    for name in files:
        (tmp_path / name).touch()
    said = "holds a LoRA adapter, not a model: "
    with pytest.raises(LaunchError, match=said + "give the model's folder, and the adapter with --lora_path"):
        check_weights("model_name", str(tmp_path))
    with pytest.raises(LaunchError, match=said + "merge it first"):  # pretraining has no --lora_path
        check_weights("init_weight", str(tmp_path))


@pytest.mark.parametrize("place", ["", "output"])
def test_a_run_is_no_model(tmp_path, place):
    """The remedy is its newest checkpoint, by number."""
    for name in ("checkpoint-20", "checkpoint-100", "checkpoint-x"):
        (tmp_path / place / name).mkdir(parents=True)
    with pytest.raises(LaunchError, match=r"model_state.*; the run's newest checkpoint is .*checkpoint-100$"):
        check_weights("init_weight", str(tmp_path))


@pytest.mark.parametrize("stem, suffix", [("model", "safetensors"), ("model_state", "pdparams")])
def test_an_index_without_weights_is_no_model(tmp_path, stem, suffix):
    """So a download that was broken off leaves it."""
    (tmp_path / f"{stem}.{suffix}.index.json").touch()
    with pytest.raises(LaunchError, match="holds neither"):
        check_weights("model_name", str(tmp_path))
    (tmp_path / f"{stem}-00001-of-00002.{suffix}").touch()
    check_weights("model_name", str(tmp_path))


def test_weights_that_a_name_would_download_are_fetched_first():
    with pytest.raises(LaunchError, match="no folder 'qwen2.5-7b'; .* download Qwen/Qwen2.5-7B --local-dir FOLDER$"):
        check_weights("model_name", "qwen2.5-7b")
    with pytest.raises(LaunchError, match="no folder 'nowhere'$"):
        check_weights("model_name", "nowhere")


ARGUMENTS = dict(OVERWRITE=False, init_weight="none", model_name="tiny-llama-demo", EXTRA_ARGS="")


@pytest.mark.parametrize("resume_step", ["none", "auto"])
def test_a_finished_model_is_not_written_over_unasked(tmp_path, resume_step):
    args = Namespace(resume_step=resume_step, **ARGUMENTS)
    (tmp_path / "config.json").touch()
    check_start(args, tmp_path, "output")
    (tmp_path / "model_state.pdparams").touch()
    with pytest.raises(LaunchError, match=r"finished model \(model_state.pdparams\) .* another output, or OVERWRITE"):
        check_start(args, tmp_path, "output")
    check_start(Namespace(**vars(args) | dict(OVERWRITE=True)), tmp_path, "output")
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-10/.checkpoint_done").touch()
    check_start(Namespace(**vars(args) | dict(resume_step="auto")), tmp_path, "output")


@pytest.mark.parametrize(
    "start, given",
    [
        ("model", dict(model_name="model")),
        ("model", dict(init_weight="model")),
        ("model", dict(EXTRA_ARGS="--lora_path model")),
        ("model/checkpoint-10", dict(init_weight="model/checkpoint-10")),
    ],
)
def test_what_a_run_starts_from_is_not_moved_aside(tmp_path, monkeypatch, start, given):
    """Nor by another name; a run that does not train moves nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / start).mkdir(parents=True)
    (tmp_path / start / "lora_model_state.pdparams").touch()
    (tmp_path / start / "model_state.pdparams").touch()
    (tmp_path / "output").symlink_to("model")
    args = Namespace(**ARGUMENTS | dict(resume_step="none", OVERWRITE=True) | given)
    for output in ("model", "output"):
        with pytest.raises(
            LaunchError, match=f"^[a-z_]+: the run reads .*/{start}, and .*{output}; set another output"
        ):
            check_start(args, tmp_path / output, "output")
    check_start(args, tmp_path / "another", "output")
    args.EXTRA_ARGS += " --do_train false"
    check_start(Namespace(**vars(args) | dict(OVERWRITE=False)), tmp_path / "output", "output")
