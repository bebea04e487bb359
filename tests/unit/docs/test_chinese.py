"""The pages in Chinese say what the English ones say: the same commands, headings, numbers, names and links."""

import re
from pathlib import Path

import pytest

from tests.unit.docs.test_links import LINK, anchor, anchors, headings

ROOT = Path(__file__).resolve().parents[3]
PAGES = {ROOT / "README_zh.md": ROOT / "README.md", ROOT / "llm/llama/README_TE_zh.md": ROOT / "llm/llama/README_TE.md"}
PAGES |= {page: ROOT / "docs" / page.relative_to(ROOT / "docs/zh") for page in sorted(ROOT.glob("docs/zh/*/*.md"))}
WRITTEN = {page: english for page, english in PAGES.items() if page.name != "options.md"}  # which is made from a table
BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))


def text(page):
    """Return a page without blocks of code and targets of links."""
    return re.sub(r"\]\([^)]*\)", "]", BLOCK.sub("", page.read_text()))


def test_commands(page):
    assert BLOCK.findall(page.read_text()) == BLOCK.findall(WRITTEN[page].read_text())


def test_headings(page):
    """A heading in Chinese stands behind the English one's anchor, so that a link needs no other."""
    assert len(headings(page.read_text())) == len(headings(WRITTEN[page].read_text()))
    title = anchor(headings(WRITTEN[page].read_text())[0])
    assert anchors(WRITTEN[page]) - {title} <= anchors(page)


def test_numbers(page):
    """Numbers that one page writes in digits stand in the other, too."""
    here, there = (set(re.findall(r"\d+(?:[.,]\d+)*", text(each))) for each in (page, WRITTEN[page]))
    assert here == there


def test_names(page):
    """What the pages set as code are the same names, flags and values."""
    here, there = (set(re.findall(r"`([^`]+)`", re.sub(r"\s+", " ", text(each)))) for each in (page, WRITTEN[page]))
    assert here == there


def test_links(page):
    def targets(each):
        found = {link.partition("#")[0] for link in re.findall(LINK, BLOCK.sub("", each.read_text()))} - {""}
        paths = {(each.parent / path).resolve() if ":" not in path else path for path in found}
        return {PAGES.get(path, path) for path in paths} - {PAGES[page]}  # pages in Chinese link to each other

    assert targets(page) == targets(PAGES[page])
