"""The first records of fine-tuning's data, read before a job starts, which refuses what training would refuse."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paddle_te.data.records import DEV, TRAIN, find_files, is_array, read_records
from paddle_te.job import words
from paddle_te.launch.machines import LaunchError

FLAGS = ("dataset_name_or_path", "tokenizer_name_or_path", "chat_template", "src_length", "max_length", "do_eval")


def check_data(flags: Mapping[str, object], extra: list[str]) -> None:
    """Make samples of the first records, as training will.

    flags: the training script's; extra: words of its command line that come after them. A tokenizer that only a host
    reads is left to training, with all that depends on it. Raises LaunchError for what training would refuse.
    """
    from paddle_te.data import samples  # here, as it imports NumPy
    from paddle_te.data.chat_template import ChatTemplate  # and Jinja
    from paddle_te.data.tokenizer import read_tokenizer  # and tokenizers

    try:
        told: dict[str, Any] = {name: flags.get(name) for name in FLAGS} | words.read(extra, FLAGS)[0]
        name, chosen = str(told["tokenizer_name_or_path"]), told["chat_template"]
        tokenizer = read_tokenizer(Path(name)) if Path(name).is_dir() else None
        for split in (TRAIN, DEV) if told["do_eval"] else (TRAIN,):
            paths = find_files(told["dataset_name_or_path"], split)
            if tokenizer is None:
                list(samples.read_conversations(paths, samples.FIRST))
            else:
                template = ChatTemplate.of(tokenizer, name, None if chosen is None else str(chosen))
                maker = samples.SampleMaker(tokenizer, template, told["src_length"], told["max_length"])
                samples.samples_of(paths, maker, samples.FIRST)
    except (ValueError, OSError) as error:
        raise LaunchError(f"dataset: {error}") from error


def questions(folder: Path, split: str) -> Path:
    """The only file of a split, whose first records are questions and answers: all that PaddleFormers reads here.

    Raises LaunchError for other data.
    """
    from paddle_te.data import samples

    try:
        path, *others = find_files(folder, split)
        if others or path.suffix not in (".json", ".jsonl") or is_array(path):
            raise ValueError(f"{path}: with HOST=paddleformers a split is one file of JSON lines")
        for where, record in read_records([path], samples.FIRST):
            samples.parse(where, record)
            if "src" not in record:
                raise ValueError(f'{where}: HOST=paddleformers reads "src" and "tgt"; conversations go with paddlenlp')
    except (ValueError, OSError) as error:
        raise LaunchError(f"dataset: {error}") from error
    return path
