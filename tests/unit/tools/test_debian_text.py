"""tools/benchmark/debian_text.py: the text of packages."""

import gzip
import json
import shutil
import subprocess
import sys

import pytest

from tools.benchmark import debian_text


def test_markup_is_taken_out():
    page = (
        "<html><head><title>gone</title></head><!-- gone --><p>One &amp; two</p><script>gone()</script><li>three</html>"
    )
    assert debian_text.text_of("usr/page.html", page.encode()).split() == ["One", "&", "two", "three"]
    assert debian_text.text_of("usr/notes.md.gz", gzip.compress(b"a <b> c")) == "a <b> c"
    assert debian_text.text_of("usr/bin/program", b"a") is None and debian_text.text_of("a.tar.gz", b"a") is None


def test_a_long_line_counts_once():
    long, short = "a licence that each file begins with", "a short line"
    texts = [f"{long}\n{short}\n" + first * 200 for first in "xy"]
    first, second = debian_text.without_repetitions(texts)
    assert first == texts[0] and second == f"{short}\n" + "y" * 200
    assert list(debian_text.without_repetitions([long * 6, long * 6])) == [long * 6]  # the second is empty then


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="makes a package with dpkg-deb")
def test_a_corpus_of_packages(tmp_path, monkeypatch, capsys):
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "DEBIAN").mkdir(parents=True)
        (folder / "DEBIAN/control").write_text(
            f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b>\nDescription: a\n"
        )
        (folder / "usr/share/doc").mkdir(parents=True)
        for page in range(3):
            (folder / f"usr/share/doc/{page}.txt").write_text(f"{name} {page} " * 40)
        subprocess.run(["dpkg-deb", "--build", folder, f"{folder}.deb"], check=True, capture_output=True)
    orders = []
    for limit, seed in ((10_000, 1), (10_000, 1), (10_000, 2), (400, 1)):
        arguments = [
            tmp_path / "out.jsonl",
            tmp_path / "two.deb",
            tmp_path / "one.deb",
            "--limit",
            limit,
            "--seed",
            seed,
        ]
        monkeypatch.setattr(sys, "argv", ["debian_text.py", *map(str, arguments)])
        debian_text.main()
        orders.append([json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()])
    first, again, other, short = orders
    assert first == again != other and sorted(first) == sorted(other) and len(first) == 6
    assert len(short) == 2 and {*short} < {*first}
    assert "2 documents, " in capsys.readouterr().out
