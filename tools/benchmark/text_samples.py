#!/usr/bin/env python
"""Cuts the text of a corpus into samples for fine-tuning: FOLDER/train.json, JSON lines {"src", "tgt"}.

    python tools/benchmark/text_samples.py CORPUS.jsonl.gz FOLDER --characters 5000

Each sample is a piece of a document of so many characters, of which a sixteenth is src. What is left of a document is
no sample. The order is random, and the same each time.
"""

import argparse
import gzip
import json
import random
import sys
from pathlib import Path


def pieces(texts, characters):
    """[{"src", "tgt"}] of the texts, in random order."""
    whole = (
        text[start : start + characters] for text in texts for start in range(0, len(text) - characters + 1, characters)
    )
    cut = characters // 16
    samples = [{"src": piece[:cut], "tgt": piece[cut:]} for piece in whole if piece[:cut].strip()]
    random.Random(0).shuffle(samples)
    return samples


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help='JSON lines {"text"}, compressed')
    parser.add_argument("folder", type=Path, help="made if it is not there")
    parser.add_argument("--characters", type=int, required=True, help="of a sample")
    arguments = parser.parse_args(argv)
    with gzip.open(arguments.corpus, "rt", encoding="utf-8") as file:
        samples = pieces((json.loads(line)["text"] for line in file), arguments.characters)
    if not samples:
        parser.error(f"no document of {arguments.corpus} has {arguments.characters} characters")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(sample) + "\n" for sample in samples)
    (arguments.folder / "train.json").write_text("".join(lines), encoding="utf-8")
    print(f"{len(samples)} samples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
