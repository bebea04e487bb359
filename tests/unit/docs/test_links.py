"""Every link between the Markdown pages leads to a file, and to a heading, that is there. Needs no network."""

import re
import subprocess
import unicodedata
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


def test_a_wrong_link_would_be_seen(tmp_path):
    (tmp_path / "other.md").write_text("# One\n## `code`, and Two!\n```bash\n# no heading\n```\n## 中文：标题\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#one) [b](other.md#code-and-two) [c](other.md#中文标题) `[no](link.md)` [d](https://x.y/z)"
    )
    test_links(page)
    for link in ("none.md", "other.md#no-heading", "#here"):
        page.write_text(f"[a [b]]({link})")
        with pytest.raises(AssertionError):
            test_links(page)
