"""Imports between the package's rooms go downwards only: the picture in docs/background/architecture.md."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "paddle_te"
LAYERS = {"ops", "fp8", "distributed"}
# room, a folder or a file of the package: what it may import of the others
MAY_IMPORT = {
    "native": set(),
    "device": {"native"},
    "host": set(),
    "options": {"host", "recipes", "records"},
    "job": {"configs", "host", "options", "records"},
    "recipes": {"table"},
    "files": set(),
    "folders": set(),
    "records": set(),
    "typed": {"files"},
    "manifest": {"files", "folders", "typed"},
    "table": set(),
    "outputs": set(),
    "commands": set(),
    "fp8": {"options"},
    "distributed": {"fp8", "device"},
    "upstream": {"device", "runs"},
    "optimizer": {"device", "distributed", "native", "ops", "options", "weights", "planner"},
    "ops": {"native", "fp8", "device", "options"},
    "layers": LAYERS | {"options"},
    "weights": {"commands", "configs", "files", "folders", "manifest", "options", "outputs", "table", "typed"},
    "models": LAYERS | {"layers", "weights", "device", "configs", "options"},
    "training": {"device", "fp8", "distributed", "host", "models", "native", "options", "planner", "runs"},
    "hosts": LAYERS
    | {
        "job",
        "training",
        "models",
        "layers",
        "weights",
        "device",
        "native",
        "configs",
        "options",
        "upstream",
        "optimizer",
        "data",
        "folders",
        "host",
        "runs",
        "manifest",
        "outputs",
        "planner",
        "records",
        "commands",
    },
    "configs": {"typed", "options", "records"},
    "runs": {"configs", "weights", "options", "manifest", "outputs", "table", "host", "files", "folders"},
    "launch": {
        "commands",
        "folders",
        "job",
        "runs",
        "configs",
        "weights",
        "options",
        "planner",
        "host",
        "data",
        "recipes",
        "outputs",
    },
    "planner": {"commands", "configs", "job", "native", "options", "runs", "table", "weights"},
    "data": {"files", "host", "manifest", "options", "outputs", "runs"},
    "scripts": {"hosts", "runs", "upstream", "host"},
    "selftest": {"device", "env", "fp8", "layers", "options", "outputs", "runs", "table"},
    "env": {"native", "device", "options", "outputs", "runs", "host"},
    "completion": {"runs"},
}
# What a host's own classes have: a table that every room may read
CAPABILITIES = re.compile(r"hosts\.\w+\.capabilities\b")
# The libraries that models and a Trainer come from: their packages are called as their folders here.
HOSTS = {path.parent.name for path in PACKAGE.glob("hosts/*/__init__.py")}
# The rooms that import a host. A repair of a host's own code must.
MAY_IMPORT_A_HOST = {"hosts", "upstream"}


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
            if package == "paddle_te" and other in MAY_IMPORT and not CAPABILITIES.match(rest):
                assert other == room or other in MAY_IMPORT[room], f"{path}: {name}"


def test_what_a_host_has_is_a_table():
    """Rooms without Paddle read it: it imports nothing of this package, and no library but Python's."""
    for path in PACKAGE.glob("hosts/*/capabilities.py"):
        assert {name.partition(".")[0] for name in imported(path)} <= {"__future__", "dataclasses"}, path


def hosts_of(path):
    """The hosts that a file imports."""
    return HOSTS & {name.partition(".")[0] for name in imported(path)}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_only_some_rooms_import_a_host(room):
    """A room that no longer imports one leaves the table."""
    assert any(hosts_of(path) for path in files(room)) == (room in MAY_IMPORT_A_HOST)


@pytest.mark.parametrize("host", sorted(HOSTS))
def test_hosts_do_not_know_each_other(host):
    for path in (PACKAGE / "hosts" / host).rglob("*.py"):
        others = HOSTS - {host}
        assert not others & hosts_of(path), path
        assert not any(name.startswith(f"paddle_te.hosts.{other}") for name in imported(path) for other in others), path


def test_backends_do_not_know_each_other():
    for mine, other in ("pd", "te"), ("te", "pd"):
        for path in (PACKAGE / "ops" / mine).glob("*.py"):
            assert not any(name.startswith(f"paddle_te.ops.{other}") for name in imported(path)), path


def test_only_device_tests_for_a_place():
    for path in PACKAGE.rglob("*.py"):
        if path.stem not in ("device", "env"):  # env finds a device to train on
            text = path.read_text()
            assert not any(word in text for word in ("is_gpu_place", "is_custom_place", "is_compiled_with_cuda")), path
