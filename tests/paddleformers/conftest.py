"""The tests of PaddleFormers as a host, which need a Python that has it: HOST=paddleformers bash scripts/test.sh.

One process imports it once, in 20 seconds, so all of them are in one. nvgpu's host runtime is there for what Paddle has
no kernels for on a CPU: bfloat16.
"""

import importlib.util
import os

import pytest

from tests.nvgpu_processes import build_host
from tests.paddleformers import recipe

if importlib.util.find_spec("paddleformers"):
    os.environ["CUSTOM_DEVICE_ROOT"] = build_host()  # read when Paddle is imported


@pytest.fixture
def te(monkeypatch):
    """te's kernels in NumPy on nvgpu's host runtime, which is the device meanwhile."""
    import paddle

    from tests import emulated_te

    paddle.set_device("nvgpu")
    emulated_te.install(monkeypatch.setattr)
    yield
    paddle.set_device("cpu")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    recipe.write_model(folder)
    return folder


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    recipe.write_data(folder)
    return folder


@pytest.fixture(scope="session")
def recipe_of(model_folder, data_folder):
    """The recipe of a stage, as a function."""
    return lambda stage: recipe.recipe(stage, model_folder, data_folder)
