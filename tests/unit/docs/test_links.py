"""The links between the Markdown pages lead to files, and to headings, that are there, and so do names of source files.
Needs no network."""

import re
import subprocess
import unicodedata
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[3]
LINK = r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?[^)]*\)"


def pages():
    found = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    if found.returncode == 0:
        return [ROOT / name for name in found.stdout.split()]
    return [path for path in ROOT.rglob("*.md") if not {"build", ".venv"} & set(path.relative_to(ROOT).parts)]


def without_code(text):
    text = re.sub(r"^ {0,3}(`{3,}|~{3,}).*?^ {0,3}\1[^\n]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", text)


def headings(text):
    text = re.sub(r"^ {0,3}(`{3,}|~{3,}).*?^ {0,3}\1[^\n]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^#{1,6}\s+(.*?)\s*#*$", text, re.MULTILINE)


def anchor(heading):
    """As GitHub makes it: lower case, letters, digits, - and _ of any script, spaces as hyphens."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    kept = (c for c in heading.lower() if c in "-_ " or unicodedata.category(c)[0] in "LNM")
    return "".join(kept).replace(" ", "-")


def anchors(path):
    found, seen = set(), {}
    text = path.read_text()
    for name in map(anchor, headings(text)):
        number = seen[name] = seen.get(name, -1) + 1
        found.add(f"{name}-{number}" if number else name)
    return found | set(re.findall(r"""<a (?:id|name)=["']([^"']+)""", text))


@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links(page):
    wrong = []
    for link in re.findall(LINK, without_code(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, fragment = unquote(link).partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists():
            wrong.append(f"{link}: no such file")
        elif fragment and path.suffix == ".md" and fragment not in anchors(path):
            wrong.append(f"{link}: no such heading")
    assert not wrong


def unknown(page):
    """Names of source files on a page, such as fp8/scaling.py, with which no file's path in the repository ends."""
    text = re.sub(r"\]\([^)]*\)", "]", page.read_text())  # links are test_links'
    names = re.findall(r"(?<![\w./$<{*-])(?:\.\./)*((?:[\w.-]+/)*[\w-]+\.(?:py|cuh?|cc|cpp|sh|sub))(?![\w/(*])", text)
    return [name for name in names if not any(f"/{path}".endswith(f"/{name}") for path in repository())]


@cache
def repository():
    """The paths of its files, also those that are not committed yet; [] outside a checkout."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()


def of_today():
    """All pages but those that say how something was measured once, with the program of that day."""
    return [page for page in pages() if ROOT / "benchmarks" not in page.parents]


@pytest.mark.skipif(not repository(), reason="not a git checkout")
@pytest.mark.parametrize("page", of_today(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named(page):
    assert not unknown(page)


def test_a_wrong_link_would_be_seen(tmp_path):
    (tmp_path / "other.md").write_text("# One\n## `code`, and Two!\n```bash\n# no heading\n```\n## 中文：标题\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#one) [b](other.md#code-and-two) [c](other.md#中文标题) `[no](link.md)` [d](https://x.y/z)"
    )
    test_links(page)
    assert not unknown(page)
    page.write_text("`test_links.py`, ../docs/test_links.py and `scaling.py` are there, layers/scaling.py is not")
    assert unknown(page) == ["layers/scaling.py"]
    for link in ("none.md", "other.md#no-heading", "#here"):
        page.write_text(f"[a [b]]({link})")
        with pytest.raises(AssertionError):
            test_links(page)
