"""Whether a small model learns to copy a token over thousands of positions, in the layout that the flags ask for.

    python tools/needle.py --output_dir FOLDER [--documents 2] [--transformer_engine_backend …] …
    python -m paddle.distributed.launch --devices 0,1 tools/needle.py --output_dir FOLDER --context_parallel_degree 2 …

A document begins with one of eight tokens, the needle. Random other ones follow, and now and then a question, whose
answer is the needle. With --documents several of them are packed into each sequence, and each has a needle of its own:
whoever looks into another document cannot know. After training, the loss of the answer at the end of documents that the
model has not seen tells whether it was found; a guess has ln 8 = 2.08. Ends with status 1 where the model does not know
the answer. Further flags are run_pretrain's; --max_seq_length is that of a document.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout, installed or not

from paddle_te.upstream import deferred_imports  # noqa: E402

deferred_imports.apply()

import numpy as np  # noqa: E402
import paddle  # noqa: E402
from paddlenlp.trainer import set_seed  # noqa: E402

from paddle_te.hosts.paddlenlp.modeling import causal_mask_only  # noqa: E402
from paddle_te.hosts.paddlenlp.training import pretrain  # noqa: E402
from paddle_te.hosts.paddlenlp.training.arguments import ModelArguments, PreTrainingArguments  # noqa: E402
from paddle_te.hosts.paddlenlp.training.beginning import parse_arguments  # noqa: E402
from paddle_te.hosts.paddlenlp.training.datasets import DataArguments  # noqa: E402
from paddle_te.hosts.paddlenlp.training.packing import separation  # noqa: E402
from paddle_te.hosts.paddlenlp.training.trainer import PretrainingTrainer  # noqa: E402
from paddle_te.ops import documents  # noqa: E402
from paddle_te.options import Option, with_options  # noqa: E402
from paddle_te.options.option import whole  # noqa: E402

NEEDLES, OTHERS, QUESTION = 8, 8, 16  # tokens: 0 to 7, 8 to 15, 16
DISTANCE = 64  # tokens between questions
IGNORED = -100
KNOWN = 0.1  # a loss: the answer has nine tenths of the probability
CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e8,  # so that some of a head's numbers hardly turn over all positions
    "tie_word_embeddings": False,
}
FLAGS = dict(
    tokenizer_name_or_path="none",
    mock_data="true",
    max_seq_length=4096,
    max_steps=400,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=8,
    eval_iters=8,
    learning_rate=3e-3,
    min_learning_rate=3e-3,
    warmup_steps=10,
    adam_beta2=0.95,
    logging_steps=25,
    do_train="true",
    disable_tqdm="true",
    report_to="none",
    save_strategy="no",
    seed=7,
)


@dataclass
@with_options(Option("documents", whole(1), 1, "documents that are packed into a sequence"))
class NeedleArguments:
    """How many documents a sequence has."""


class Haystacks(paddle.io.Dataset):
    """Rows of documents; of sample i's numbers nothing depends on anything but (seed, i).

    last: only the question at a document's end has an answer.
    """

    def __init__(self, samples, row, seed, last=False):
        super().__init__()
        self.samples, self.row, self.seed, self.last = samples, row, seed, last

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        generator = np.random.default_rng([self.seed, index])
        parts = [self._document(generator, length) for length in self.row]
        return {name: np.concatenate([part[name] for part in parts]) for name in ("input_ids", "labels")}

    def _document(self, generator, length):
        tokens = generator.integers(NEEDLES, NEEDLES + OTHERS, length)
        labels, needle = np.full(length, IGNORED), generator.integers(NEEDLES)
        questions = [length - 1] if self.last else np.arange(DISTANCE - 1, length, DISTANCE)
        tokens[0], tokens[questions], labels[questions] = needle, QUESTION, needle
        return {"input_ids": tokens, "labels": labels}


def collator(row):
    """Batches of Haystacks' rows, with what keeps several documents apart."""

    def collate(samples):
        batch = {name: np.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels")}
        if len(row) > 1:
            rows = [row] * len(samples)
            batch |= dict(position_ids=documents.positions(rows)) | separation(rows, masked=False)
        return batch

    return collate


def main():
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    folder = Path(arguments["--output_dir"]) / "model"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    given = {f"--{name}": str(value) for name, value in FLAGS.items()} | {"--model_name_or_path": str(folder)}
    sys.argv[1:] = [word for pair in (given | arguments).items() for word in pair]
    classes = NeedleArguments, ModelArguments, DataArguments, PreTrainingArguments
    needle_args, model_args, data_args, training_args = parse_arguments(*classes)
    paddle.set_device(training_args.device)
    set_seed(training_args.seed)
    row = [data_args.max_seq_length] * needle_args.documents
    config = pretrain.make_config(model_args, replace(data_args, max_seq_length=sum(row)), training_args, None)
    samples = training_args.max_steps * training_args.per_device_train_batch_size * training_args.dataset_world_size
    trainer = PretrainingTrainer(
        model=pretrain.make_model(config, model_args, training_args),
        args=training_args,
        data_collator=collator(row),
        train_dataset=Haystacks(samples * training_args.gradient_accumulation_steps, row, training_args.seed),
        eval_dataset=Haystacks(64, row, training_args.seed + 1, last=True),
        optimizers=(None, pretrain.make_scheduler(training_args)),
    )
    with causal_mask_only():
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    print(f"the answer over {row[0] - 1} positions has a loss of {loss:.4f}; a guess has {np.log(NEEDLES):.2f}")
    return int(not loss < KNOWN)


if __name__ == "__main__":
    sys.exit(main())
