"""The first records of what a model is tuned on, read before a job starts, which refuses what training would refuse."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle_te.data.records import DEV, TRAIN, find_files, is_array, read_records
from paddle_te.job import LAUNCHER, Door, words
from paddle_te.launch.checks import read_tokenizer_folder
from paddle_te.launch.errors import LaunchError

if TYPE_CHECKING:
    from paddle_te.data.samples import SampleMaker
    from paddle_te.data.tokenizer import Tokenizer

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


@dataclass(frozen=True)
class _Asked:
    """What a training script is told of its data: {flag: value}, and which of these flags EXTRA_ARGS has.

    tokenizer: None for one that only a host reads.
    """

    told: Mapping[str, Any]
    extra: Collection[str]
    tokenizer: Tokenizer | None

    @classmethod
    def of(cls, flags: Mapping[str, object], extra: list[str], names: Collection[str]) -> _Asked:
        """Return it of the script's flags and the words behind them. names: the flags that are read."""
        given = words.read(extra, names)[0]
        told = {name: flags.get(name) for name in names} | given
        folder = Path(str(told["tokenizer_name_or_path"]))
        return cls(told, given.keys(), read_tokenizer_folder(folder) if folder.is_dir() else None)

    def refusing(self) -> AbstractContextManager[None]:
        """Return `_refusing` in the words of a user who has given the flags in EXTRA_ARGS."""
        return _refusing(LAUNCHER.with_others(self.extra))

    def files(self) -> Iterator[list[Path]]:
        """Yield the files of each split that is read."""
        for split in (TRAIN, DEV) if self.told["do_eval"] else (TRAIN,):
            file = self.told.get(f"{split}_dataset_path")
            yield [Path(str(file))] if file else find_files(self.told["dataset_name_or_path"], split)

    def maker(self, src_length: int, max_length: int) -> SampleMaker | None:
        """Return what makes samples of at most so many tokens; None without the tokenizer."""
        from paddle_te.data.chat_template import ChatTemplate  # here, as it imports Jinja
        from paddle_te.data.samples import SampleMaker  # and NumPy

        if self.tokenizer is None:
            return None
        name, chosen = str(self.told["tokenizer_name_or_path"]), self.told["chat_template"]
        template = ChatTemplate.of(self.tokenizer, name, None if chosen is None else str(chosen))
        return SampleMaker(self.tokenizer, template, src_length, max_length)


def check_data(flags: Mapping[str, object], extra: list[str]) -> None:
    """Make samples of the first records, as training will.

    flags: the training script's; extra: words of its command line that come after them. A tokenizer that only a host
    reads is left to training, with all that depends on it. Raises LaunchError for what training would refuse.
    """
    from paddle_te.data import samples  # here, as it imports NumPy

    asked = _Asked.of(flags, extra, FLAGS)
    with asked.refusing():
        for paths in asked.files():
            if maker := asked.maker(asked.told["src_length"], asked.told["max_length"]):
                samples.samples_of(paths, maker, samples.FIRST)
            else:
                list(samples.read_conversations(paths, samples.FIRST))


def check_preferences(flags: Mapping[str, object], extra: list[str], labelled: bool) -> None:
    """Make pairs of the first records, as training will; arguments as `check_data`'s. labelled: for KTO.

    Raises LaunchError for what training would refuse.
    """
    from paddle_te.data import preference_samples, preferences, samples  # here, as they import NumPy

    asked = _Asked.of(flags, extra, _PREFERENCE)
    length = asked.told["max_seq_len"]
    with asked.refusing():
        for paths in asked.files():
            if maker := asked.maker(length, length):
                pairs = preference_samples.PairMaker(maker, length, asked.told["max_prompt_len"])
                preference_samples.pairs_of(paths, pairs, labelled, samples.FIRST)
            else:
                list(preferences.read_judged(paths, labelled, samples.FIRST))


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
