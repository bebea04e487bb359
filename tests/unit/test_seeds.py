"""A seed that a failing test prints repeats the failure: in another process, whatever ran before it."""

import ast
import os
import random
from pathlib import Path

import numpy as np
import paddle
import pytest

from tests import seeds

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("tests/**/*.py"), *ROOT.glob("nvgpu/tests/**/*.py")])
# what gives a set, what takes its elements one after another, and what makes nothing of their order
SETS = {"set", "frozenset", "union", "intersection", "difference", "symmetric_difference"}
ORDERED = {"list", "tuple", "enumerate", "zip", "map", "iter", "join", "fromkeys", "sample", "choice", "parametrize"}
WITHOUT_ORDER = {"sorted", "set", "frozenset", "all", "any", "sum", "min", "max", "len"}
UNSEEDED = {"default_rng", "Random", "RandomState"}


def draw():
    return random.random(), np.random.random(), paddle.rand([]).item()


@pytest.fixture(scope="module")
def shared():
    return draw()


@pytest.fixture(scope="module")
def asked_for_late():
    return draw()


def expected(name):
    seeds.set_seed(seeds.seed_of(name))
    return draw()


def test_a_test_draws_by_its_name(request, seed):
    assert draw() == expected(request.node.nodeid)
    assert seed == seeds.seed_of(request.node.nodeid)


def test_what_tests_share_is_drawn_by_its_name_and_moves_nothing(request):
    file = request.node.nodeid.partition("::")[0]
    late = request.getfixturevalue("asked_for_late")
    assert draw() == expected(request.node.nodeid)
    assert [request.getfixturevalue("shared"), late] == [
        expected(f"{file}::{name}") for name in ("shared", "asked_for_late")
    ]


def test_other_seeds(monkeypatch):
    drawn = []
    for given in ("", "0", "1", "fresh", "fresh"):
        monkeypatch.setenv(seeds.VARIABLE, given)
        seeds.settle(os.environ)
        assert os.environ[seeds.VARIABLE].isdigit()
        drawn.append(seeds.seed_of("a test"))
    assert drawn[0] == drawn[1] and len(set(drawn)) == 4


def name_of(node):
    """The last part of what a Call calls."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", None) or getattr(function, "id", None)


def is_set(node):
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor | ast.Sub):
        return any(is_set(side) or name_of(side) == "keys" for side in (node.left, node.right))
    return isinstance(node, ast.Set | ast.SetComp) or name_of(node) in SETS


def taken_in_order(node):
    """The expressions whose elements a node takes one after another."""
    if isinstance(node, ast.For | ast.comprehension):
        return [node.iter]
    if isinstance(node, ast.Starred):
        return [node.value]
    return node.args if name_of(node) in ORDERED else []


def by_chance(source):
    """The lines of a source that depend on the order of a set, which another process has otherwise, or on no seed."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if name_of(node) in UNSEEDED and not node.args and not node.keywords:
            yield node.lineno
        outer = parents.get(parents[node] if isinstance(node, ast.comprehension) else node)
        if isinstance(outer, ast.Set) or isinstance(parents.get(node), ast.SetComp) or name_of(outer) in WITHOUT_ORDER:
            continue
        yield from (taken.lineno for taken in taken_in_order(node) if is_set(taken))


def test_no_test_depends_on_a_sets_order_or_draws_without_a_seed():
    found = [f"{path.relative_to(ROOT)}:{line}" for path in SOURCES for line in by_chance(path.read_text())]
    assert not found, "sort them, or take dict.fromkeys; draw with the fixture `seed`"


@pytest.mark.parametrize(
    "source",
    [
        "names = [*{name for name in found}, *others]",
        "for name in {*one} & {*other}:\n    pass",
        "for name in one.keys() - other:\n    pass",
        "names = list(set(found))",
        "one = {name: 1 for name in frozenset(found)}",
        "draw.sample({1, 2}, 1)",
        "generator = np.random.default_rng()",
    ],
)
def test_it_is_found(source):
    assert [*by_chance(source)]


@pytest.mark.parametrize(
    "source",
    [
        "names = sorted({*one} & {*other})",
        "assert all(name in there for name in {*one})",
        "both = {*set(one), *other}",
        "same = {name.lower() for name in set(found)}",
        "names = dict.fromkeys(found)",
        "generator = np.random.default_rng(seed)",
    ],
)
def test_it_is_left(source):
    assert not [*by_chance(source)]
