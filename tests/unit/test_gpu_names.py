"""What tests of a GPU take from other modules exists there: CI only collects them."""

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

FILES = sorted((Path(__file__).parents[1] / "gpu").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_attributes_of_modules_exist(path):
    module = importlib.import_module(f"tests.gpu.{path.stem}")
    asked = {
        (node.value.id, node.attr)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    modules = {name: value for name, value in vars(module).items() if isinstance(value, ModuleType)}
    missing = [f"{name}.{part}" for name, part in asked if name in modules and not hasattr(modules[name], part)]
    assert not missing
