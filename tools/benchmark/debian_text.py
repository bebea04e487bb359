#!/usr/bin/env python3
"""Make a corpus of the text in Debian packages, as JSON lines that tools/prepare_data.py reads.

  apt-get download $(sed 's/_.*//' packages.txt)
  python tools/benchmark/debian_text.py corpus.jsonl *.deb

Each file of documentation is a document. Markup is taken out of HTML. A line of more than 24 characters counts once in
the whole corpus: its repetitions are left out. Documents are in random order, which depends on the seed and the
packages only.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import random
import re
import subprocess
import tarfile
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path

LONG = 24  # characters of a line that may stand in the corpus more than once
SHORTEST = 200  # characters of a document
MARKUP = (".html", ".htm", ".xhtml", ".xml")
PLAIN = (".txt", ".text", ".md", ".rst", ".adoc", ".info", ".tex", ".org", ".pod")
INVISIBLE = re.compile(r"<!--.*?-->|<(script|style|head|svg)\b.*?</\1\s*>", re.S | re.I)
ENDS_LINE = re.compile(r"</?(p|div|br|li|tr|h[1-6]|pre|dt|dd|table|ul|ol|section)\b[^>]*>", re.I)
TAG = re.compile(r"<[^>]*>")


def text_of(name: str, data: bytes) -> str | None:
    """Return a file's text by its name; None for a file that holds no documentation."""
    if name.endswith(".gz"):
        name = name.removesuffix(".gz")
        if not name.endswith(MARKUP + PLAIN):
            return None
        data = gzip.decompress(data)
    text = data.decode("utf-8", errors="ignore").replace("\0", "")
    if name.endswith(MARKUP):
        return html.unescape(TAG.sub("", ENDS_LINE.sub("\n", INVISIBLE.sub("", text))))
    return text if name.endswith(PLAIN) else None


def documents(package: Path, limit: int) -> list[str]:
    """Return the documents of a package, of at most `limit` characters together."""
    found, size = [], 0
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as process:
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is None or (text := text_of(member.name.lower(), file.read())) is None:
                    continue
                lines = [line.rstrip() for line in text.splitlines()]
                text = "\n".join(line for line, before in zip(lines, ["", *lines], strict=False) if line or before)
                if size + len(text) > limit:
                    break
                if len(text) >= SHORTEST:
                    found.append(text)
                    size += len(text)
        process.kill()  # what is behind the limit is not read
    return found


def without_repetitions(texts: list[str]) -> Iterator[str]:
    """Yield the documents without long lines that stood before, and not those that are then short."""
    seen: set[bytes] = set()
    for text in texts:
        kept = []
        for line in text.split("\n"):
            if len(line) > LONG:
                mark = hashlib.blake2b(line.strip().encode(), digest_size=8).digest()
                if mark in seen:
                    continue
                seen.add(mark)
            kept.append(line)
        if len(text := "\n".join(kept)) >= SHORTEST:
            yield text


def main() -> None:
    """Write the corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="JSON lines to write")
    parser.add_argument("packages", type=Path, nargs="+", help=".deb files")
    parser.add_argument("--limit", type=int, default=25_000_000, help="characters of a package [%(default)s]")
    parser.add_argument("--seed", type=int, default=42, help="of the documents' order [%(default)s]")
    arguments = parser.parse_args()
    packages = sorted(arguments.packages, key=lambda path: path.name)
    with Pool() as pool:
        texts = [
            text
            for found in pool.starmap(documents, [(package, arguments.limit) for package in packages], chunksize=1)
            for text in found
        ]
    random.Random(arguments.seed).shuffle(texts)
    size = written = 0
    with open(arguments.output, "w", encoding="utf-8") as file:
        for text in without_repetitions(texts):
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            size, written = size + len(text), written + 1
    before = sum(map(len, texts))
    print(f"{written:,} documents, {size:,} of {before:,} characters, of {len(packages)} packages")


if __name__ == "__main__":
    main()
