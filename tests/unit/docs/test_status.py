"""docs/reference/status.md is made from tests/status.toml, whose tests are there, and tests/status.json."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tools import status

ROOT = Path(__file__).parents[3]
FEATURES = status.load_features()
TESTS = status.tests_of(FEATURES, status.TIERS)
REPORT = """<?xml version="1.0"?><testsuites><testsuite timestamp="2031-02-03T04:05:06">
<properties><property name="cards" value="2 × H100"/></properties>
<testcase classname="tests.gpu.test_a" name="test_one[x]"/>
<testcase classname="tests.gpu.test_a" name="test_one[y]"><failure/></testcase>
<testcase classname="tests.gpu.test_a" name="test_one_more"/>
<testcase classname="tests.gpu.test_b" name="test_two"><skipped/></testcase>
<testcase classname="tests.gpu.test_c" name="test_three"><error/></testcase>
</testsuite></testsuites>"""


def functions(path):
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_the_page_is_made_from_the_data():
    assert status.PAGE.read_text(encoding="utf-8") == status.page(), "python tools/status.py writes it"


def test_every_test_is_there():
    for test in TESTS:
        path, _, case = test.partition("::")
        assert (ROOT / path).is_file(), test
        assert not case or case.partition("[")[0] in functions(ROOT / path), test


class Collected:
    """A plugin of pytest that keeps the names of what it collects."""

    def pytest_collection_finish(self, session):
        self.cases = {item.nodeid for item in session.items}


def test_every_case_is_there():
    """Those that name a test's parameters, which pytest knows only when it has collected them."""
    cases, collected = [test for test in TESTS if "[" in test], Collected()
    without = [f"-pno:{plugin}" for plugin in ("terminal", "faulthandler", "timeout", "cacheprovider", "xdist")]
    options = [
        "--collect-only",
        "--capture=no",
        f"--rootdir={ROOT}",
        f"--config-file={ROOT / 'pyproject.toml'}",
        *without,
    ]
    tests = sorted({str(ROOT / case.partition("[")[0]) for case in cases})
    # -ra and --durations of pyproject.toml are of plugins that are left out
    assert pytest.main([*options, "--override-ini=addopts=--import-mode=importlib", *tests], [collected]) == 0
    assert {*cases} - collected.cases == set()


def test_a_tier_has_tests_or_nothing_to_run():
    for feature in FEATURES:
        assert {*feature.absent} <= status.TIERS.keys()
        assert not any(feature.tests(tier) for tier in feature.absent), feature.name
        where = {"cpu": "tests/", "emulated": "tests/", "gpu": "tests/gpu", "gpus": "tests/gpu"}
        assert all(test.startswith((where[tier], "nvgpu/")) for tier in where for test in feature.tests(tier))


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(REPORT, encoding="utf-8")
    return status.read_report(path)


def test_a_report_is_added_up_by_test(report):
    results = {"tests/gpu/test_b.py": {"H100": dict(passed=1, failed=0, skipped=0, date="2030-01-01", commit="a")}}
    wanted = [
        f"tests/gpu/test_{name}" for name in ("a.py", "a.py::test_one", "a.py::test_one[x]", "b.py", "c.py", "d.py")
    ]
    assert status.add(results, wanted, report, "abc") == [wanted[0], wanted[1], wanted[2], wanted[4]]
    counts = {test: tuple(rows["2 × H100"].values()) for test, rows in results.items() if "2 × H100" in rows}
    at = ("2031-02-03T04:05", "abc")
    assert counts == {
        "tests/gpu/test_a.py": (2, 1, 0, *at),
        "tests/gpu/test_a.py::test_one": (1, 1, 0, *at),
        "tests/gpu/test_a.py::test_one[x]": (1, 0, 0, *at),
        "tests/gpu/test_c.py": (0, 1, 0, *at),
    }
    assert results["tests/gpu/test_b.py"]["H100"]["date"] == "2030-01-01", "which was only skipped"


def test_a_failure_is_forgotten_where_the_test_is_skipped_now(report):
    kept = {"2 × H100": {"passed": 1, "failed": 0}}
    results = {"tests/gpu/test_b.py": {"2 × H100": {"passed": 0, "failed": 1}, "H200": {"passed": 0, "failed": 1}}}
    assert status.add(results, ["tests/gpu/test_b.py"], report, "abc") == []
    assert results == {"tests/gpu/test_b.py": {"H200": {"passed": 0, "failed": 1}}}
    results = {"tests/gpu/test_b.py": kept}
    status.add(results, ["tests/gpu/test_b.py"], report, "abc")
    assert results == {"tests/gpu/test_b.py": kept}


def test_marks(report):
    results = {}
    row = dict(passed=2, failed=0, skipped=0, date="2030-01-01T10:00", commit="0123456789")
    results["tests/gpu/test_a.py"] = {"H200": row, "H100": row | dict(date="2029-01-01", failed=2)}
    results["tests/gpu/test_b.py"] = {"H200": row | dict(date="2029-12-31", commit="older")}
    both = ["tests/gpu/test_a.py", "tests/gpu/test_b.py"]
    ran = ["benchmarks/throughput/2026-11-28_h200x4_8b-accumulated.json"]
    cell = lambda tier, **given: status.cell(status.Feature("", "", **given), tier, results)  # noqa: E731
    assert cell("gpu", gpu=both[:1]) == "✓ H200<br>2030-01-01 01234567"
    assert cell("gpu", gpu=both) == "✓ H200<br>2029-12-31 older", "the oldest of the last runs"
    assert cell("gpu", gpu=[*both, "tests/gpu/test_c.py"]).startswith("✓ in part H200")
    results["tests/gpu/test_a.py"]["H100"]["date"] = "2031-01-01"
    assert cell("gpu", gpu=both[:1]) == "✗ 2 of 4 H100<br>2031-01-01 01234567"
    assert cell("cpu", gpu=both) == "–" and cell("cpu", absent=["cpu"]) == ""
    assert cell("gpus", ran=ran).startswith("[✓ 4 × H200](../../benchmarks/throughput/2026-11-28_h200x4_8b-acc")


def test_a_real_report(tmp_path):
    (tmp_path / "test_real.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('a', [1, 2])\ndef test_it(a):\n    assert a == 1\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml", "test_real.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True)
    found = status.read_report(tmp_path / "report.xml")
    assert found.cases == {"test_real.py::test_it[1]": "passed", "test_real.py::test_it[2]": "failed"}
    assert found.cards == "CPU" and len(found.date) == 16
