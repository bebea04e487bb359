"""What a folder holds, by the names in it."""

import pytest

from paddle_te import folders


@pytest.fixture
def holding(tmp_path):
    def make(*names):
        for name in names:
            (tmp_path / name).touch()
        return tmp_path

    return make


@pytest.mark.parametrize("config", ["adapter_config.json", "lora_config.json"])
@pytest.mark.parametrize(
    "weights",
    ["model_state.tp00.pdparams", "model_state.pdparams.index.json", "model-00001-of-00002.safetensors"],
)
def test_a_model_beside_an_adapter_is_a_model(holding, config, weights):
    assert folders.is_adapter(holding(config, "lora_model_state.pdparams", "peft_model.safetensors"))
    assert not folders.is_adapter(holding(weights))


def test_weights_without_an_adapters_settings_are_none(holding):
    assert not folders.is_adapter(holding("adapter_model.safetensors"))
    assert not folders.is_adapter("nowhere")


def test_all_weights_are_found_once_and_in_order(holding):
    names = [
        "adapter_model.safetensors",
        "lora_model_state.tp00.pdparams",
        "model.safetensors.index.json",
        "model_state.pdparams",
        "peft_model-00001-of-00002.pdparams",
    ]
    folder = holding(*names, "lora_config.json", "optimizer.pdopt", "tokenizer.model")
    assert [path.name for path in folders.files_of(folder, folders.ALL_WEIGHTS * 2)] == names


def test_checkpoints_are_known_by_their_steps(tmp_path):
    for name in ("checkpoint-100", "checkpoint-9", "checkpoint-x", "checkpoint-9-copy", "notes"):
        (tmp_path / name).mkdir()
    there = folders.checkpoints_in(tmp_path)
    assert there == [(step, folders.checkpoint_folder(tmp_path, step)) for step in (9, 100)]
    assert [folders.step_of(folder) for _, folder in there] == [9, 100]
    assert folders.step_of(tmp_path / "checkpoint-9-copy") is None


@pytest.mark.parametrize("place", ["", folders.OUTPUT])
def test_a_runs_file_is_found_by_the_folder_around_it(tmp_path, place):
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "log").touch()
    assert folders.output_of(tmp_path, "log") == tmp_path / place
