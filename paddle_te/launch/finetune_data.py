"""The first records of what a model is tuned on, read before a job starts, which refuses what training would refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paddle_te.data.records import DEV, TRAIN, find_files, is_array, read_records
from paddle_te.job import LAUNCHER, Door, words
from paddle_te.launch.checks import read_tokenizer_folder
from paddle_te.launch.machines import LaunchError

_READ = ("dataset_name_or_path", "tokenizer_name_or_path", "chat_template", "do_eval")
FLAGS = (*_READ, "src_length", "max_length")
_PREFERENCE = (*_READ, "train_dataset_path", "dev_dataset_path", "max_seq_len", "max_prompt_len")


@contextmanager
def _refusing(door: Door = LAUNCHER) -> Iterator[None]:
    """Raise LaunchError, in the door's words, for a ValueError or OSError in the block."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise LaunchError(f"dataset: {door.rename(str(error))}") from error


def check_data(flags: Mapping[str, object], extra: list[str]) -> None:
    """Make samples of the first records, as training will.

    flags: the training script's; extra: words of its command line that come after them. A tokenizer that only a host
    reads is left to training, with all that depends on it. Raises LaunchError for what training would refuse.
    """
    from paddle_te.data import samples  # here, as it imports NumPy
    from paddle_te.data.chat_template import ChatTemplate  # and Jinja

    given = words.read(extra, FLAGS)[0]
    told: dict[str, Any] = {name: flags.get(name) for name in FLAGS} | given
    name, chosen = str(told["tokenizer_name_or_path"]), told["chat_template"]
    tokenizer = read_tokenizer_folder(Path(name)) if Path(name).is_dir() else None
    with _refusing(LAUNCHER.with_others(given)):
        for split in (TRAIN, DEV) if told["do_eval"] else (TRAIN,):
            paths = find_files(told["dataset_name_or_path"], split)
            if tokenizer is None:
                list(samples.read_conversations(paths, samples.FIRST))
            else:
                template = ChatTemplate.of(tokenizer, name, None if chosen is None else str(chosen))
                maker = samples.SampleMaker(tokenizer, template, told["src_length"], told["max_length"])
                samples.samples_of(paths, maker, samples.FIRST)


def check_preferences(flags: Mapping[str, object], extra: list[str], labelled: bool) -> None:
    """Make pairs of the first records, as training will; arguments as `check_data`'s. labelled: for KTO.

    Raises LaunchError for what training would refuse.
    """
    from paddle_te.data import preference_samples, preferences, samples  # here, as they import NumPy
    from paddle_te.data.chat_template import ChatTemplate  # and Jinja

    given = words.read(extra, _PREFERENCE)[0]
    told: dict[str, Any] = {name: flags.get(name) for name in _PREFERENCE} | given
    name, chosen = str(told["tokenizer_name_or_path"]), told["chat_template"]
    tokenizer = read_tokenizer_folder(Path(name)) if Path(name).is_dir() else None
    with _refusing(LAUNCHER.with_others(given)):
        for split in (TRAIN, DEV) if told["do_eval"] else (TRAIN,):
            file = told[f"{split}_dataset_path"]
            paths = [Path(str(file))] if file else find_files(told["dataset_name_or_path"], split)
            if tokenizer is None:
                list(preferences.read_judged(paths, labelled, samples.FIRST))
            else:
                template = ChatTemplate.of(tokenizer, name, None if chosen is None else str(chosen))
                maker = samples.SampleMaker(tokenizer, template, told["max_seq_len"], told["max_seq_len"])
                pairs = preference_samples.PairMaker(maker, told["max_seq_len"], told["max_prompt_len"])
                preference_samples.pairs_of(paths, pairs, labelled, samples.FIRST)


def questions(folder: Path, split: str) -> Path:
    """The only file of a split, whose first records are questions and answers: all that PaddleFormers reads here.

    Raises LaunchError for other data.
    """
    from paddle_te.data import samples

    with _refusing():
        path, *others = find_files(folder, split)
        if others or path.suffix not in (".json", ".jsonl") or is_array(path):
            raise ValueError(f"{path}: with HOST=paddleformers a split is one file of JSON lines")
        for where, record in read_records([path], samples.FIRST):
            samples.parse(where, record)
            if "src" not in record:
                raise ValueError(f'{where}: HOST=paddleformers reads "src" and "tgt"; conversations go with paddlenlp')
    return path
