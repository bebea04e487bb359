"""Hand-written pages read at first sight: short cells and sentences, and none of the constructions that CONTRIBUTING
lists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
GENERATED = {"options.md", "recipes.md", "config.md", "status.md"}
ABOVE = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "nvgpu/README.md", "llm/llama/README_TE.md")
PAGES = [*(ROOT / name for name in ABOVE), *(page for page in ROOT.glob("docs/*/*.md") if page.name not in GENERATED)]
LONGEST_CELL, LONGEST_SENTENCE = 120, 35  # characters that a reader sees, words
AVOIDED = {
    r"\b(has|have) not\b(?! (been|\w+ed\b|run|begun|read|seen|told|taken))": "does not have, does not support",
    r"\balone\b": "only",
    r"\bin the place of\b": "instead of",
    r"\bthat there (is|are)\b": "name the thing",
    r"\bbut that\b": "except that",
    r"\bhence\b": "so",
    r"(?<=[.:] )Of (?!course)": "subject first",
}


def visible(markdown: str) -> str:
    """Return a text as a reader of the page sees it: links without targets, no footnote marks, no code marks."""
    return re.sub(r"\[\^[^\]]*\]|[`*]", "", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", markdown))


def cells(page: Path) -> list[str]:
    rows = (line for line in page.read_text().splitlines() if line.startswith("|"))
    return [cell.strip() for row in rows for cell in visible(row.replace(r"\|", "/")).split("|")]


def paragraphs(page: Path) -> list[str]:
    """Return a page's prose, each paragraph and item of a list in one line: no code, tables or headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    text = re.sub(r"^(\s*)([-*]|\d+\.) ", r"\n\1", text, flags=re.M)
    blocks = re.split(r"\n\s*\n", "\n".join("" if line.startswith(("|", "#")) else line for line in text.splitlines()))
    return [visible(" ".join(block.split())) for block in blocks if block.strip()]


def sentences(page: Path) -> list[str]:
    return [sentence for block in paragraphs(page) for sentence in re.split(r"(?<=[.!?:;])\s+", block)]


def names(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_cells_are_short(page):
    assert [cell for cell in cells(page) if len(cell) > LONGEST_CELL] == []


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_sentences_are_short(page):
    assert [sentence for sentence in sentences(page) if len(sentence.split()) > LONGEST_SENTENCE] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CONTRIBUTING.md"], ids=names)
def test_words(page):
    """CONTRIBUTING has the list of what to avoid."""
    text = " ".join(paragraphs(page) + cells(page))
    found = [(match, better) for pattern, better in AVOIDED.items() for match in re.finditer(pattern, text)]
    assert [(text[max(0, match.start() - 40) : match.end() + 30], better) for match, better in found] == []
