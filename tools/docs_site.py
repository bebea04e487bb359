"""A hook of MkDocs (mkdocs.yml): the site has the repository's pages under the repository's paths.

So a link from docs/guides/pretrain.md to ../../llm/llama/README_TE.md is right in both; `mkdocs build --strict` checks.
README.md is the front page, with buttons and the benchmarks' table of whole runs.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

PAGES = [
    "README.md",
    "README_zh.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE",
    "Dockerfile",
    "docs/**/*",
    "llm/llama/*.md",
    "nvgpu/README.md",
    "benchmarks/**/*",
]
FRONT = "README.md"
WIDE = "docs/reference/status.md"  # whose tables take the room of the table of contents
BUTTONS = """
[Install](docs/get-started/install.md){ .md-button .md-button--primary }
[Tutorial](docs/get-started/tutorial.md){ .md-button }
[What ran where](docs/reference/status.md){ .md-button }
[中文](README_zh.md){ .md-button }
"""


def speeds(root):
    """The table of whole runs in benchmarks/README.md, with links as README.md has them and without footnotes."""
    text = (root / "benchmarks/README.md").read_text(encoding="utf-8")
    [table] = re.findall(r"^## End to end\n.*?\n(\|.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    return re.sub(r"\[\^\w+\]", "", table).replace("](", "](benchmarks/")


def on_page_markdown(markdown, page, config, files):
    """Called by MkDocs with each page."""
    if page.file.src_uri == WIDE:
        page.meta["hide"] = ["toc"]
    if page.file.src_uri != FRONT:
        return markdown
    page.meta["hide"] = ["navigation", "toc"]
    root = Path(config.config_file_path).parent
    first, picture, rest = re.split(r"(^!\[.*\n)", markdown, maxsplit=1, flags=re.MULTILINE)
    first = first.replace("[中文](README_zh.md)\n\n", "")
    table = f"Tokens/s per GPU of whole training runs:\n\n{speeds(root)}\n"
    return "\n".join([first.rstrip(), BUTTONS, picture, table, rest])


def on_files(files, config):
    """Called by MkDocs with the files that it and its theme have found, of which those of docs/ are named anew."""
    root = Path(config.config_file_path).parent
    theirs = [file for file in files if file.src_dir != config.docs_dir]
    paths = sorted(path for pattern in PAGES for path in root.glob(pattern) if path.is_file())
    ours = [File(str(path.relative_to(root)), str(root), config.site_dir, config.use_directory_urls) for path in paths]
    return Files([*theirs, *ours])
