"""Keep docs/reference/status.md: what ran where, when and at which commit.

    python tools/status.py                                    write the page
    python tools/status.py add REPORT... --commit COMMIT      take in reports of pytest --junitxml, then write the page
    python tools/status.py tests [cpu emulated gpu gpus]      name the tests that the page asks for

tests/status.toml says which tests show that a feature works. tests/status.json says how each test ended last. A report
names the GPUs on which it ran (tests/gpu/conftest.py). Give it whole files: nothing reports a case that was left out.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FEATURES, RESULTS = ROOT / "tests/status.toml", ROOT / "tests/status.json"
PAGE = ROOT / "docs/reference/status.md"
TIERS = {"cpu": "CPU", "emulated": "te, emulated", "gpu": "one GPU", "gpus": "several GPUs"}
CPU = "CPU"
PASSED, FAILED, NEVER = "✓", "✗", "–"
HEAD = f"""# Status: what ran where

Made by `python tools/status.py` from `tests/status.toml` and `tests/status.json`; edit these instead.

{PASSED} passed, {FAILED} failed in its last run, {NEVER} **never ran**; nothing where there is nothing to run. Date and
commit are those of the last run, as far as they were recorded. A mark with a link is a training or a measurement, the
others are tests.

- **CPU**: PaddleNLP's layers (`none`) and ours in plain Paddle (`pd`); several processes on
  [nvgpu's](../../nvgpu/README.md) host runtime.
- **te, emulated**: te's layers on a CPU, with NumPy instead of Transformer Engine's library.
- **one GPU, several GPUs**: te with its kernels, on Paddle's CPU wheel with nvgpu; several GPUs of one machine.
"""
TAIL = """## Add a run

`JUNIT=DIR bash scripts/test.sh` leaves reports in DIR, and so does `python -m pytest tests/gpu --junitxml=DIR/gpu.xml`
on a machine with GPUs. `python tools/status.py add DIR/*.xml --commit COMMIT` takes them in. A new feature is an entry
of `tests/status.toml`.
"""


@dataclass(frozen=True)
class Feature:
    """A row of the page: its tests by tier, its trainings and measurements, and tiers without anything to run."""

    area: str
    name: str
    page: str = ""  # of docs, which explains it
    cpu: list[str] = field(default_factory=list)
    emulated: list[str] = field(default_factory=list)
    gpu: list[str] = field(default_factory=list)
    gpus: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)  # files in benchmarks/, or names of [run.NAME]
    absent: list[str] = field(default_factory=list)

    def tests(self, tier: str) -> list[str]:
        """Return the node ids of a tier's tests: files, functions or single cases."""
        return getattr(self, tier)


class Run(NamedTuple):
    """Where and when a feature ran last, how many cases failed there, and how many of its tests never ran there."""

    tier: str
    cards: str  # "CPU", "H200", "2 × H200"
    date: str  # with the time, where it is known; "" where it was not recorded
    commit: str  # "" where it was not recorded
    failed: int = 0  # cases
    ran: int = 0  # cases
    missing: int = 0  # tests
    link: str = ""


class Count(NamedTuple):
    """How many cases of a test passed, failed and were skipped."""

    passed: int
    failed: int
    skipped: int


Results = dict[str, dict[str, dict[str, int | str]]]  # {test: {cards: counts, date, commit}}


def load_features() -> list[Feature]:
    """Return the rows of tests/status.toml in their order."""
    areas = tomllib.loads(FEATURES.read_text(encoding="utf-8"))["area"]
    return [Feature(area["name"], **feature) for area in areas for feature in area["feature"]]


@cache
def load_runs() -> dict[str, Run]:
    """Return tests/status.toml's runs that left no file in benchmarks/, by name."""
    return {name: Run(**run) for name, run in tomllib.loads(FEATURES.read_text(encoding="utf-8"))["run"].items()}


def load_results() -> Results:
    """Return how each test ended last, on each kind of hardware."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}


def save_results(results: Results, wanted: Iterable[str]) -> None:
    """Write the results of `wanted` tests, a line for each test and hardware."""
    lines = []
    for test in sorted(test for test in set(wanted) if results.get(test)):
        rows = [
            f"  {json.dumps(cards, ensure_ascii=False)}: {json.dumps(row)}"
            for cards, row in sorted(results[test].items())
        ]
        lines.append(f" {json.dumps(test)}: {{\n" + ",\n".join(rows) + "\n }")
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def short(card: str) -> str:
    """Return a card's name as the page has it: H100 for NVIDIA H100 80GB HBM3."""
    return card.removeprefix("NVIDIA ").split(" ")[0]


def of_cards(name: str, count: int | None) -> str:
    """Return "H200" or "2 × H200"."""
    return f"{count} × {short(name)}" if count and count > 1 else short(name)


@cache
def measured(path: str) -> Run:
    """Return the run that a result in benchmarks/ describes; the cell links the result's page."""
    result = json.loads((ROOT / path).read_text(encoding="utf-8"))
    hardware, page = result["hardware"], Path(path).with_suffix(".md")
    cards = of_cards(hardware["name"], hardware.get("gpus"))
    link = page if (ROOT / page).is_file() else path
    tier = "gpus" if "×" in cards else "gpu"
    return Run(tier, cards, result["date"][:16], result["commit"], link=f"../../{link}")


def others(feature: Feature) -> list[Run]:
    """Return the trainings and measurements that a feature names."""
    named = load_runs()
    return [named[name] if name in named else measured(name) for name in feature.ran]


def belongs(case: str, test: str) -> bool:
    """Return whether a node id is one of a test's cases."""
    return case == test or case.startswith((f"{test}[", f"{test}::"))


class Report(NamedTuple):
    """A file of pytest --junitxml: how each case ended, when, and on which GPUs."""

    cases: dict[str, str]
    date: str
    cards: str


def read_report(path: Path) -> Report:
    """Return what a file of pytest --junitxml says."""
    suite = next(ElementTree.parse(path).iter("testsuite"))
    cases: dict[str, str] = {}
    for case in suite.iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        tags = {child.tag for child in case}
        ended = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        if cases.get(name) != "failed":  # a test may fail and then its teardown pass
            cases[name] = ended
    found = {each.get("name"): each.get("value") or "" for each in suite.iter("property")}
    return Report(cases, (suite.get("timestamp") or "")[:16], found.get("cards", CPU))


def count(cases: dict[str, str], test: str) -> Count:
    """Return how a test's cases ended."""
    ended = Counter(how for case, how in cases.items() if belongs(case, test))
    return Count(ended["passed"], ended["failed"], ended["skipped"])


def add(results: Results, wanted: Iterable[str], report: Report, commit: str) -> list[str]:
    """Replace the earlier results of a report's tests; return the tests that ran."""
    ran = []
    for test in wanted:
        counts = count(report.cases, test)
        if counts.passed + counts.failed:
            row = counts._asdict() | {"date": report.date, "commit": commit}
            results.setdefault(test, {})[report.cards] = row
            ran.append(test)
        elif counts.skipped and results.get(test, {}).get(report.cards, {}).get("failed"):
            del results[test][report.cards]  # what failed is no longer asked for there
    return ran


def tested(tests: list[str], tier: str, results: Results) -> list[Run]:
    """Return the last run of a tier's tests on each kind of hardware, with the date of the oldest result."""
    on_gpus = tier.startswith("gpu")
    kinds = {cards for test in tests for cards in results.get(test, {}) if (cards != CPU) == on_gpus}
    runs = []
    for cards in sorted(kinds):
        rows = [results[test][cards] for test in tests if cards in results.get(test, {})]
        oldest = min(rows, key=lambda row: str(row["date"]))
        passed, failed = (sum(int(row[how]) for row in rows) for how in ("passed", "failed"))
        kind = cards.split("× ")[-1] if tier == "gpu" else cards  # a test of one GPU on a machine with several
        date, commit = str(oldest["date"]), str(oldest["commit"])
        runs.append(Run(tier, kind, date, commit, failed, passed + failed, len(tests) - len(rows)))
    return runs


def runs_of(feature: Feature, tier: str, results: Results) -> list[Run]:
    """Return a cell's runs, the last one first; a failure comes before a success of the same time."""
    runs = tested(feature.tests(tier), tier, results) + [run for run in others(feature) if run.tier == tier]
    return sorted(runs, key=lambda run: (run.date, run.failed, -run.missing), reverse=True)


def mark(feature: Feature, tier: str, runs: list[Run]) -> str:
    """Return a cell's mark."""
    if not runs:
        return "" if tier in feature.absent else NEVER
    return FAILED if runs[0].failed else PASSED


def cell(feature: Feature, tier: str, results: Results) -> str:
    """Return a cell of the page."""
    runs = runs_of(feature, tier, results)
    sign = mark(feature, tier, runs)
    if not runs:
        return sign
    last = runs[0]
    also = [] if last.failed else [run.cards for run in runs if not run.failed and not run.missing]
    cards = ", ".join(dict.fromkeys([last.cards, *also])).replace(CPU, "")
    how = f"{last.failed} of {last.ran}" if last.failed else "in part" if last.missing else ""
    text = " ".join(word for word in (sign, how, cards) if word)
    when = [word for word in (last.date[:10], last.commit[:8]) if word]
    return f"{f'[{text}]({last.link})' if last.link else text}<br>{' '.join(when) or 'not recorded'}"


def row(cells: list[str]) -> str:
    """Return a row of a table."""
    return "".join(f"| {text} " if text else "| " for text in cells) + "|"


def table(features: list[Feature], results: Results) -> str:
    """Return the table of an area."""
    rows = [row(["", *TIERS.values()]), "|---" * (len(TIERS) + 1) + "|"]
    for feature in features:
        name = f"[{feature.name}]({feature.page})" if feature.page else feature.name
        cells = [name, *(cell(feature, tier, results) for tier in TIERS)]
        rows.append(row(cells))
    return "\n".join(rows)


def signs(feature: Feature, results: Results) -> dict[str, str]:
    """Return a feature's mark of each tier."""
    return {tier: mark(feature, tier, runs_of(feature, tier, results)) for tier in TIERS}


def summary(areas: dict[str, list[Feature]], results: Results) -> str:
    """Return the table that counts each area's features by mark."""
    rows = [row(["", *TIERS.values()]), "|---" * (len(TIERS) + 1) + "|"]
    for area, features in areas.items():
        marks = [signs(feature, results) for feature in features]
        counts = [Counter(each[tier] for each in marks) for tier in TIERS]
        cells = [", ".join(f"{sign} {n[sign]}" for sign in (PASSED, FAILED, NEVER) if n[sign]) for n in counts]
        rows.append(row([f"[{area}](#{anchor(area)})", *cells]))
    return "\n".join(rows)


def anchor(heading: str) -> str:
    """Return a heading's anchor."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def never(areas: dict[str, list[Feature]], results: Results) -> str:
    """Return the list of features that could run on a GPU and never did."""
    lines = []
    for area, features in areas.items():
        found = [each for each in features if not {PASSED, FAILED} & {signs(each, results)[t] for t in ("gpu", "gpus")}]
        names = [each.name for each in found if not {"gpu", "gpus"} <= {*each.absent}]
        if names:
            lines.append(f"- **{area}**: {'; '.join(names)}")
    return "\n".join(lines)


def page() -> str:
    """Return docs/reference/status.md."""
    results = load_results()
    areas: dict[str, list[Feature]] = {}
    for feature in load_features():
        areas.setdefault(feature.area, []).append(feature)
    parts = [HEAD, summary(areas, results), "", "## Never on a GPU", "", never(areas, results), ""]
    for area, features in areas.items():
        parts += [f"## {area}", "", table(features, results), ""]
    return "\n".join([*parts, TAIL])


def tests_of(features: list[Feature], tiers: Iterable[str]) -> list[str]:
    """Return the tests of some tiers, each once."""
    return [*dict.fromkeys(test for feature in features for tier in tiers for test in feature.tests(tier))]


def main(argv: list[str] | None = None) -> None:
    """Run the command line that the docstring of this file shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    adding = commands.add_parser("add", help="take in reports of pytest --junitxml")
    adding.add_argument("reports", nargs="+", type=Path)
    adding.add_argument("--commit", required=True, help="that ran")
    naming = commands.add_parser("tests", help="name the tests that the page asks for")
    naming.add_argument("tiers", nargs="*", choices=[*TIERS, []], default=list(TIERS))
    arguments = parser.parse_args(argv)
    wanted = tests_of(load_features(), TIERS)
    if arguments.command == "tests":
        print("\n".join(tests_of(load_features(), arguments.tiers)))
        return
    if arguments.command == "add":
        results = load_results()
        for path in arguments.reports:
            report = read_report(path)
            ran = add(results, wanted, report, arguments.commit)
            print(f"{path}: {len(ran)} of {len(wanted)} tests on {report.cards}, {report.date}")
        save_results(results, wanted)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
