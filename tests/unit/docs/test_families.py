"""A family of models costs few lines of its own: docs/background/architecture.md."""

import ast
from pathlib import Path

import pytest

from paddle_te.configs.families import FAMILIES
from paddle_te.configs.schema import SCHEMAS

PACKAGE = Path(__file__).parents[3] / "paddle_te"
MOST = 200  # lines: a family that costs more shows that what is shared is cut in the wrong places


def parsed(folder):
    """All nodes of the syntax trees of a folder's files."""
    return [node for path in sorted((PACKAGE / folder).glob("*.py")) for node in ast.walk(ast.parse(path.read_text()))]


def lines(first, last):
    return last.end_lineno - first.lineno + 1


def folder_lines(family):
    return sum(len(path.read_text().splitlines()) for path in (PACKAGE / "hosts/paddlenlp" / family).glob("*.py"))


def row_lines(family):
    """Of its row in configs/families.py."""
    calls = [node for node in parsed("configs") if isinstance(node, ast.Call) and ast.unparse(node.func) == "Family"]
    (row,) = [call for call in calls if call.args[0].value == family]
    return lines(row, row)


def record_lines(family):
    """Of what config.json says of it, in configs/schema.py."""
    name = SCHEMAS[family].__name__
    (record,) = [node for node in parsed("configs") if isinstance(node, ast.ClassDef) and node.name == name]
    return lines(record, record)


def weights_lines(family):
    """Of what stands under its name in tables of weights/, where it has neither files nor functions of its own."""
    assert not list((PACKAGE / "weights").glob(f"*{family}*.py"))
    own = 0
    for node in parsed("weights"):
        assert not (isinstance(node, ast.FunctionDef) and family in node.name)
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            own += sum(lines(key, value) for key, value in pairs if getattr(key, "value", None) == family)
    return own


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_lines_of_a_family(family):
    counted = [count(family.model_type) for count in (folder_lines, row_lines, record_lines, weights_lines)]
    assert sum(counted) <= MOST
