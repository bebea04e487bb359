"""What the launcher says of its arguments before it starts anything."""

from argparse import Namespace

import pytest

from paddle_te.launch.checks import check_start, check_weights
from paddle_te.launch.machines import LaunchError


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


def test_weights_that_a_name_would_download_are_fetched_first():
    with pytest.raises(LaunchError, match="no folder 'qwen2.5-7b'; .* download Qwen/Qwen2.5-7B --local-dir FOLDER$"):
        check_weights("model_name", "qwen2.5-7b")
    with pytest.raises(LaunchError, match="no folder 'nowhere'$"):
        check_weights("model_name", "nowhere")


@pytest.mark.parametrize("resume_step", ["none", "auto"])
def test_a_finished_model_is_not_written_over_unasked(tmp_path, resume_step):
    args = Namespace(resume_step=resume_step, OVERWRITE=False, init_weight="none")
    (tmp_path / "config.json").touch()
    check_start(args, tmp_path, "output")
    (tmp_path / "model_state.pdparams").touch()
    with pytest.raises(LaunchError, match=r"finished model \(model_state.pdparams\) .* another output, or OVERWRITE"):
        check_start(args, tmp_path, "output")
    check_start(Namespace(**vars(args) | dict(OVERWRITE=True)), tmp_path, "output")
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-10/.checkpoint_done").touch()
    check_start(Namespace(**vars(args) | dict(resume_step="auto")), tmp_path, "output")
