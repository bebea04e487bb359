"""tools/benchmark/text_samples.py: a corpus's text as samples for fine-tuning."""

import gzip
import json

import pytest

from tools.benchmark import text_samples


def test_samples_are_the_text(tmp_path):
    """Whole pieces alone, each once, a sixteenth of them the question; none that begins with blanks only."""
    documents = ["".join(chr(97 + (i * 7 + shift) % 26) for i in range(150)) for shift in range(3)] + [" " * 64]
    corpus = tmp_path / "corpus.jsonl.gz"
    with gzip.open(corpus, "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in documents)
    assert text_samples.main([str(corpus), str(tmp_path / "made"), "--characters", "64"]) == 0
    samples = [json.loads(line) for line in (tmp_path / "made/train.json").read_text().splitlines()]
    assert {len(sample["src"]) for sample in samples} == {4}
    want = [text[start : start + 64] for text in documents[:3] for start in (0, 64)]
    assert sorted(sample["src"] + sample["tgt"] for sample in samples) == sorted(want)
    with pytest.raises(SystemExit):
        text_samples.main([str(corpus), str(tmp_path / "none"), "--characters", "1000"])
