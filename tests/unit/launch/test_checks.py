"""What the launcher says of its arguments before it starts anything."""

import pytest

from paddle_te.launch.checks import check_weights
from paddle_te.launch.machines import LaunchError


@pytest.mark.parametrize("files", [("adapter_config.json", "adapter_model.safetensors"), ("lora_config.json",)])
def test_an_adapter_is_no_model(tmp_path, files):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(
        LaunchError, match="holds a LoRA adapter, not a model: give the model's folder, and the adapter"
    ):
        check_weights("model_name", str(tmp_path))
