"""A hook of MkDocs (mkdocs.yml): the site has the repository's pages under the repository's paths.

So a link from docs/guides/pretrain.md to ../../llm/llama/README_TE.md is right in both; `mkdocs build --strict` checks.
"""

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


def on_files(files, config):
    """Called by MkDocs with the files that it and its theme have found, of which those of docs/ are named anew."""
    root = Path(config.config_file_path).parent
    theirs = [file for file in files if file.src_dir != config.docs_dir]
    paths = sorted(path for pattern in PAGES for path in root.glob(pattern) if path.is_file())
    ours = [File(str(path.relative_to(root)), str(root), config.site_dir, config.use_directory_urls) for path in paths]
    return Files([*theirs, *ours])
