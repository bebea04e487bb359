"""The fine-tuning runs of throughput.py: all weights or LoRA, with several samples packed into a row or one in each."""

import hashlib
import json
import statistics
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from paddle_te import configs
from paddle_te.configs.spec import spec_of
from paddle_te.weights.dims import Dims
from paddle_te.weights.layouts import hf_layout
from paddle_te.weights.safetensors import Writer
from paddle_te.weights.tensors import TensorSpec
from tools.benchmark.problem import bf16_bits
from tools.benchmark.trainings import Run

RANDOM_WEIGHTS = Path(__file__).with_name("random_weights.py")
SAMPLES, MEDIAN_LENGTH, SPREAD = 4000, 300, 1.0
DEFINITION = (
    "Fine-tuning is llm/llama/run_finetune.py on questions and answers of random words, whose lengths are log-normal "
    f"(median {MEDIAN_LENGTH} tokens, sigma {SPREAD:g}) and at most half a row. A packed row has as many samples as "
    "fit in. Samples that are not packed have a row each, which is padded to the longest of its batch. Padding does "
    "not count. With a base in fp8 the decoder layers' frozen weights exist in fp8 only (--quantize_base fp8)."
)


def lengths_of_samples(row):
    """Tokens of each sample for rows of so many, the end of text included."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN_LENGTH), SPREAD, SAMPLES)
    return drawn.clip(4, row // 2).astype(int)


@dataclass(frozen=True)
class Finetuning(Run):
    """llm/llama/run_finetune.py, started by its launcher, from random weights.

    method: the launcher's, full or lora. packed: several samples to a row of size.dims.sequence tokens. on_device: the
    weights are made on the device, by random_weights.py, and not read from a file. fp8_base: frozen weights exist in
    fp8 only.
    """

    method: str = "full"
    packed: bool = True
    on_device: bool = False
    fp8_base: bool = False

    job: ClassVar[str] = "finetune"
    script: ClassVar[Path] = RANDOM_WEIGHTS  # with on_device
    kind: ClassVar[str] = "finetuning"  # of the shared files
    packing: ClassVar[str] = "--zero_padding true --greedy_zero_padding true"

    @property
    def layout(self):
        base = "base in fp8" if self.fp8_base else ""
        rows = "packed" if self.packed else "a sample a row"
        return ", ".join(filter(None, [super().layout, self.method, base, rows]))

    @property
    def tiny(self):
        return replace(super().tiny, precision=self.precision if self.fp8_base else "bf16")

    @cached_property
    def lengths(self):
        """Tokens of each sample, the end of text included."""
        return lengths_of_samples(self.size.dims.sequence)

    def inputs(self, conditions):
        shared = conditions.folder.parent / self._shared_name
        if not shared.exists():  # the runs of a size have the same weights and samples
            self.write_config(shared / "model")
            self._write_tokenizer(shared / "model")
            weights = shared / "model/model.safetensors"
            weights.touch() if self.on_device else self._write_weights(weights)
            self._write_samples(shared / "data")
        return {
            **({"training_script": self.script} if self.on_device else {}),
            "model_name": shared / "model",
            "dataset": shared / "data",
            "output": self.output(conditions),
            "method": self.method,
        }

    @property
    def _shared_name(self):
        """Return the name of the folder that all runs with the same files share."""
        size = replace(self.size, micro_batches=1)  # which no file depends on
        digest = hashlib.sha256(repr(size).encode()).hexdigest()[:16]
        return f"{self.kind}-{digest}" + "-on-device" * self.on_device

    @property
    def all_flags(self):
        packing = self.packing if self.packed else ""
        base = "--quantize_base fp8" if self.fp8_base else ""
        return " ".join(filter(None, [packing, base, super().all_flags]))

    def _write_tokenizer(self, folder):
        """One token for each word "w0", "w1" and so on; those of a vocabulary's beginning are special."""
        special = ["<unk>", "<s>", "</s>"]
        words = [*special, *(f"w{number}" for number in range(len(special), self.size.vocabulary))]
        tokenizer = {
            "version": "1.0",
            "added_tokens": [
                {"id": i, "content": word, "special": True, "normalized": False}
                | {"single_word": False, "lstrip": False, "rstrip": False}
                for i, word in enumerate(special)
            ],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {
                "type": "WordLevel",
                "vocab": {word: number for number, word in enumerate(words)},
                "unk_token": special[0],
            },
        }
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        names = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": special[0]}
        names |= {"bos_token": special[1], "eos_token": special[2]}
        (folder / "tokenizer_config.json").write_text(json.dumps(names))

    def _write_weights(self, path):
        """Hugging Face's layout in bf16. All matrices are cut from the same random numbers, to write them fast."""
        dims, layout = self.size.dims, hf_layout()
        sizes = Dims(spec_of(configs.read(str(path.parent))))
        specs = [
            TensorSpec(layout.full_name(place), "bfloat16", sizes.slot_shape(place))
            for place in layout.tensors(sizes.spec)
        ]
        greatest = max(spec.nbytes // 2 for spec in specs)
        numbers, ones = bf16_bits((greatest,), 0.0, 0.02, 0), np.full(dims.hidden, 0x3F80, np.uint16)
        file = Writer(path, specs, "pt")
        for spec in specs:
            file.add([ones if len(spec.shape) == 1 else numbers[: spec.nbytes // 2]])
        file.close()

    def _write_samples(self, folder):
        """train.json: a fifth of a sample is its question."""
        folder.mkdir()
        generator = np.random.default_rng(1)
        with (folder / "train.json").open("w") as file:
            for length in self.lengths - 1:  # the end of text follows
                words = [f"w{token}" for token in generator.integers(3, self.size.vocabulary, length)]
                question = max(1, int(length) // 5)
                file.write(json.dumps({"src": " ".join(words[:question]), "tgt": " ".join(words[question:])}) + "\n")

    @staticmethod
    def output(conditions):
        return conditions.folder / "output"

    def speeds(self, ms, records):
        """Return the speeds that the run logs; a step's tokens are the mean of its samples'."""
        tokens = statistics.median(record["tokens_per_second"] for record in records)
        return {
            "tokens_per_second": tokens,
            "samples_per_second": tokens / float(np.mean(self.lengths - 1)),
            "tflops_per_gpu": None,  # LoRA's backward is smaller, and documents have little attention
        }
