"""A small recipe of PaddleFormers, with its model, tokenizer and data."""

import json
import re

import numpy as np

STEPS = 4


def write_model(folder, **settings):
    """A small Llama with a tokenizer of one token a word. settings: of its configuration."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.paddleformers.llama import model_class, tiny_config

    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(90))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = tiny_config("none", **settings)
    model_class(config)(config).save_pretrained(str(folder))


def write_data(folder):
    """PT.jsonl, documents, and SFT.jsonl, questions and answers."""
    generator = np.random.default_rng(0)
    lines = {
        "PT": [{"text": _words(generator, 5, 40)} for _ in range(60)],
        "SFT": [{"src": [_words(generator, 3, 9)], "tgt": [_words(generator, 3, 9)]} for _ in range(60)],
    }
    for stage, samples in lines.items():
        (folder / f"{stage}.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def write_indexed(folder):
    """PT.bin and PT.idx: documents of token ids, and LONG.bin and LONG.idx: one that fills all sequences."""
    import paddle
    from paddleformers.data.indexed_dataset import MMapIndexedDatasetBuilder

    generator = np.random.default_rng(0)
    for name, lengths in (("PT", generator.integers(5, 40, 60)), ("LONG", [2000])):
        (folder / f"{name}.bin").unlink(missing_ok=True)  # PaddleFormers' builder appends
        builder = MMapIndexedDatasetBuilder(str(folder / f"{name}.bin"), np.uint16)
        for length in lengths:
            builder.add_item(paddle.to_tensor(generator.integers(3, 93, length)))
            builder.end_document()
        builder.finalize(str(folder / f"{name}.idx"))


def indexed(prefix):
    """What a recipe says of its data to pretrain on what `write_indexed` wrote, in the order of the index."""
    data = dict(dataset_type="pretrain", input_dir=f"1.0 {prefix}", split="100,0,0", dataloader_shuffle=False)
    return data | dict(eval_iters=1, eval_steps=1000)


def _words(generator, shortest, longest):
    return " ".join(f"w{i}" for i in generator.integers(0, 90, generator.integers(shortest, longest)))


def recipe(stage, model, data):
    """Of a stage, "PT" or "SFT", on a CPU, but for output_dir."""
    files = {
        f"{part}_dataset_{name}": value
        for part in ("train", "eval")
        for name, value in (("type", "erniekit"), ("path", str(data / f"{stage}.jsonl")), ("prob", "1.0"))
    }
    return files | dict(
        stage=stage,
        fine_tuning="full",
        model_name_or_path=str(model),
        _attn_implementation="eager",
        max_seq_len=32,
        packing=True,
        do_train=True,
        device="cpu",
        amp_master_grad=False,
        max_steps=STEPS,
        save_steps=STEPS // 2,
        lr_scheduler_type="constant",
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=0.001,
        disable_tqdm=True,
    )


def losses_in(log):
    """The loss of each step."""
    return [float(loss) for loss in re.findall(r"loss: ([\d.]+), learning_rate", log)]


def evaluated_in(log):
    """The loss of each evaluation."""
    return [float(loss) for loss in re.findall(r"eval_loss: ([\d.]+)", log)]
