"""Common misspellings in the pages that people read."""

import subprocess
import sys

from tests.unit.docs.test_links import ROOT, pages

KNOWN = "te"  # not "the"


def misspelled(paths):
    command = [sys.executable, "-m", "codespell_lib", "--ignore-words-list", KNOWN, *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True).stdout


def test_no_page_has_a_common_misspelling():
    # results of benchmarks are tables with the names of kernels, cut short
    read = [page for page in pages() if "benchmarks" not in page.parts or page.name == "README.md"]
    assert ROOT / "README.md" in read and misspelled(read) == ""


def test_a_misspelling_would_be_seen(tmp_path):
    (tmp_path / "page.md").write_text("te and teh")  # codespell:ignore
    assert "teh ==> the" in misspelled([tmp_path / "page.md"])  # codespell:ignore
