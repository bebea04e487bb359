"""Imports between the package's rooms go downwards only: the picture in docs/architecture.md."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "paddle_te"
LAYERS = {"ops", "fp8", "distributed"}
# room, a folder or a file of the package: what it may import of the others
MAY_IMPORT = {
    "native": set(),
    "device": {"native"},
    "options": set(),
    "manifest": set(),
    "table": set(),
    "fp8": {"options"},
    "distributed": {"fp8", "device"},
    "upstream": {"device"},
    "ops": {"native", "fp8", "device"},
    "layers": LAYERS | {"options"},
    "weights": {"configs", "manifest", "table"},
    "models": LAYERS | {"layers", "weights", "device", "configs", "options"},
    "configs": set(),
    "runs": {"configs", "weights", "options", "manifest", "table"},
    "training": LAYERS
    | {"models", "weights", "device", "native", "configs", "runs", "options", "upstream", "manifest", "planner"},
    "evaluation": {"training", "runs", "models", "distributed", "device", "fp8", "options", "upstream"},
    "launch": {"runs", "configs", "weights", "options", "planner"},
    "planner": {"configs", "options", "runs", "table"},
    "data": set(),
    "scripts": {"training", "runs", "upstream"},
    "selftest": {"device", "env", "fp8", "layers", "runs", "table"},
    "env": {"native", "device", "options"},
    "completion": {"runs"},
}


def imported(path):
    """Full names of all modules that a file imports, inside functions too."""
    package = path.relative_to(PACKAGE.parent).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def rooms():
    return {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}


def files(room):
    return [*(PACKAGE / room).rglob("*.py"), *PACKAGE.glob(f"{room}.py")]


def test_every_room_is_in_the_table():
    assert rooms() - {"__init__", "__main__"} == MAY_IMPORT.keys()


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_go_downwards(room):
    for path in files(room):
        for name in imported(path):
            package, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if package == "paddle_te" and other in MAY_IMPORT:
                assert other == room or other in MAY_IMPORT[room], f"{path}: {name}"


def test_backends_do_not_know_each_other():
    for mine, other in ("pd", "te"), ("te", "pd"):
        for path in (PACKAGE / "ops" / mine).glob("*.py"):
            assert not any(name.startswith(f"paddle_te.ops.{other}") for name in imported(path)), path


def test_only_device_tests_for_a_place():
    for path in PACKAGE.rglob("*.py"):
        if path.stem not in ("device", "env"):  # env finds a device to train on
            text = path.read_text()
            assert not any(word in text for word in ("is_gpu_place", "is_custom_place", "is_compiled_with_cuda")), path
