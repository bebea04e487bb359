"""The orders of samples that a host keeps beside a corpus, in index-cache: only whole ones of this corpus are used.

A host names them after the corpus' path and the run's numbers, not after what the corpus holds, writes them in place,
and believes whatever lies there: another corpus in the old one's place, half an order that a death left, a flipped bit.
So each order has a note with the state of the corpus and the checksums of its files. What does not agree with its note
is made anew, in a folder of its own, and moved into place whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

import numpy as np
import xxhash
from numpy.lib import format as npy

from paddle_te import manifest
from paddle_te.data import corpus
from paddle_te.files import read_file

logger = logging.getLogger(__name__)

FOLDER = "index-cache"
SPLITS = ("train", "valid", "test")
FILES = ("_doc_idx.npy", "_sample_idx.npy", "_shuffle_idx.npy", ".dsc")
NONE_YET = "there is none yet"
VISIBLE = 120  # seconds, until a file that another machine has made is there
MOST_DOCUMENTS = 2**31 - 1  # of all passes: the hosts count them with 32 bits


class Unsafe(corpus.CorpusError):
    """An array whose loading could run code."""


@dataclass(frozen=True)
class Order:
    """What a host makes an order of.

    prefix: the corpus'. name: of the split. samples: how many the run wants. length: tokens of each, without the last
    label. seed: of the order. split: the proportions, as the user writes them. documents: the first one of this split,
    and the end.
    """

    prefix: str
    name: str
    samples: int
    length: int
    seed: int
    split: str
    documents: tuple[int, int]

    @property
    def stem(self) -> str:
        """What the names of its files begin with, which is the hosts' choice."""
        said = (
            f"GPT Dataset\n\nData prefix {self.prefix}\nDataset name {self.name}\nNumber of samples {self.samples}\n"
            f"Sequence length {self.length}\nRandom seed {self.seed}\nSplit {self.split}\n"
        )
        return hashlib.md5(said.encode()).hexdigest()

    @property
    def folder(self) -> Path:
        return Path(self.prefix).parent / FOLDER

    def files(self, folder: Path) -> list[Path]:
        """Return the arrays, and last the host's description."""
        return [folder / f"{self.stem}{ending}" for ending in FILES]

    def note(self, folder: Path) -> Path:
        return folder / f"{self.stem}.json"


def orders_of(
    host: ModuleType, data: list[str | float], samples: list[int], length: int, seed: int, split: str
) -> list[Order]:
    """Return the orders that a host reads for a run: of each corpus, and of each split that has documents.

    host: its module data.causal_dataset. data: as `corpus.find_data` returns it. samples: of train, valid and test.
    Raises CorpusError for an order that is longer than a host can count.
    """
    prefixes, each = [str(prefix) for prefix in data], [samples]
    if data[1::2]:
        prefixes, _, each = host.get_datasets_weights_and_num_samples(data, samples)
    orders = []
    for prefix, counts in zip(prefixes, each, strict=True):
        bounds = host.get_train_valid_test_split_(split, len(corpus.read_index(prefix).sizes))
        for name, count, documents in zip(SPLITS, counts, pairwise(bounds), strict=True):
            orders.append(Order(prefix, name, count, length, seed, split, documents))
    orders = [order for order in orders if order.documents[0] < order.documents[1]]
    for order in orders:
        _check_length(order)
    return orders


def passes(samples: int, length: int, tokens: int) -> int:
    """Return how many times a host reads so many tokens for so many samples."""
    return max(-(-(samples * length + 1) // max(tokens, 1)), 1)


def _check_length(order: Order) -> None:
    begin, end = order.documents
    tokens = int(corpus.read_index(order.prefix).sizes[begin:end].sum(dtype=np.int64))
    count = passes(order.samples, order.length, tokens)
    if count * (end - begin) > MOST_DOCUMENTS:
        raise corpus.CorpusError(
            f"{order.prefix}: {order.samples:,} samples of {order.length} tokens are {count:,} passes over the "
            f"{end - begin:,} documents of {order.name}, and an order lists at most {MOST_DOCUMENTS:,} documents: use "
            "fewer steps, smaller batches, or a larger corpus"
        )


def provide(host: ModuleType, orders: list[Order], share_folder: bool = False) -> None:
    """Let a host find the orders, whole and of this very corpus, beside it.

    One process of those that share the folder calls it, before any of them reads.

    host: as for `orders_of`. share_folder: whether that is the process of rank 0, of several machines.

    Raises CorpusError where an order holds what is no array of numbers, or cannot be made.
    """
    for order in orders:
        if why := _misfit(order):
            _make(host, order, why, share_folder)


def await_orders(orders: list[Order], seconds: float = VISIBLE) -> None:
    """Wait until this process sees the files that another one has made; on a network's file system that takes time.

    Raises CorpusError where it does not see them.
    """
    end = time.monotonic() + seconds
    for order in orders:
        while not all(path.is_file() for path in order.files(order.folder)):
            if time.monotonic() > end:
                raise corpus.CorpusError(
                    f"{order.folder}: there is no order of samples {order.stem}, which another process has made: where "
                    "nodes share no folder, keep the data on each of them, and leave out --share_folder"
                )
            time.sleep(0.1)


def linked(prefix: str, cache: str | os.PathLike[str]) -> str:
    """A prefix in the folder `cache` that stands for the corpus, so that its orders lie there: links to its two files.

    Another state of the files has another one.

    Raises CorpusError where it cannot be made.
    """
    source = os.path.abspath(prefix)
    key = xxhash.xxh3_64_hexdigest(json.dumps([source, _state(prefix)]).encode())
    folder = Path(cache) / key[:12]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix in (".bin", ".idx"):
            _link(folder / f"{Path(prefix).name}{suffix}", f"{source}{suffix}")
    except OSError as error:
        raise corpus.CorpusError(f"the indices of samples cannot be kept in {cache}: {error.strerror}") from error
    return str(folder / Path(prefix).name)


def _link(path: Path, source: str) -> None:
    try:
        path.symlink_to(source)
    except FileExistsError:  # an earlier run's, or another process was faster
        if not os.path.samefile(path, source):
            raise


def _misfit(order: Order) -> str | None:
    """Why the order beside the corpus is not to be used: one line, or None for a good one."""
    files = order.files(order.folder)
    there = [path for path in files if path.is_file()]
    if not there:
        return NONE_YET
    try:
        for path in there:
            if path.suffix == ".npy":
                _check_plain(path)
        noted = json.loads(read_file(order.note(order.folder)))
        if noted["corpus"] != _state(order.prefix):
            return f"{order.prefix}.bin and .idx have changed since"
        if missing := [path.name for path in files if path not in there]:
            return f"{', '.join(missing)} is missing"
        damaged = [path.name for path in files if asdict(manifest.record(path)) != noted["files"][path.name]]
        return f"{', '.join(damaged)} is damaged" if damaged else None
    except OSError as error:  # no note, or another process is just making it
        return f"{Path(error.filename or order.folder).name} cannot be read: {error.strerror}"
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        if isinstance(error, Unsafe):
            raise
        return f"{order.note(order.folder).name} does not say what it was made of"


def _make(host: ModuleType, order: Order, why: str, share_folder: bool) -> None:
    level = logging.DEBUG if why == NONE_YET else logging.INFO
    logger.log(level, f"{order.folder}: the order of samples is made anew: {why}")
    state = _state(order.prefix)
    _remove(order, why)
    try:
        order.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=order.folder, prefix=".making-") as folder:
            _build(host, order, folder, share_folder)
            _move(order, Path(folder), state)
    except OSError as error:
        raise corpus.CorpusError(f"{order.folder}: the order of samples cannot be written: {error}") from error


def _build(host: ModuleType, order: Order, folder: str, share_folder: bool) -> None:
    host._build_index_mappings(
        order.name,
        order.prefix,
        np.arange(*order.documents, 1, np.int32),
        np.asarray(corpus.read_index(order.prefix).sizes),
        order.split,
        order.samples,
        order.length,
        order.seed,
        share_folder,
        data_cache_path=folder,
    )


def _move(order: Order, made: Path, state: dict[str, list[int]]) -> None:
    """Raises OSError also for arrays that the host could not write in full, which it tells nobody."""
    *arrays, description = order.files(made)
    for path in arrays:
        try:
            np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise OSError(f"{path.name} is not whole ({error})") from error
    files = {path.name: asdict(manifest.record(path)) for path in (*arrays, description)}
    order.note(made).write_text(json.dumps({"corpus": state, "files": files}) + "\n")
    for path in (*arrays, description, order.note(made)):
        path.replace(order.folder / path.name)


def _remove(order: Order, why: str) -> None:
    try:
        for path in (order.note(order.folder), *reversed(order.files(order.folder))):
            path.unlink(missing_ok=True)  # another node may be faster
    except OSError as error:
        raise corpus.CorpusError(
            f"{order.folder}: the order of samples is made anew: {why}; it cannot be removed ({error}): remove "
            f"{order.folder} yourself, or give another folder with --data_cache"
        ) from error


def _state(prefix: str) -> dict[str, list[int]]:
    """Return {".bin": [bytes, time of the last change in ns], ".idx": …}."""
    stats = {suffix: os.stat(f"{prefix}{suffix}") for suffix in (".bin", ".idx")}
    return {suffix: [stat.st_size, stat.st_mtime_ns] for suffix, stat in stats.items()}


def _check_plain(path: Path) -> None:
    """Refuses a file that numpy.load would unpickle, as a host lets it: a pickle is a program. Raises CorpusError."""
    with path.open("rb") as file:
        begin = file.read(len(npy.MAGIC_PREFIX))
        file.seek(0)
        plain = npy.MAGIC_PREFIX.startswith(begin) and not _holds_objects(file)
    if not plain:
        raise Unsafe(
            f"{path} is no array of numbers, and was not loaded, for loading it could run code: remove the folder "
            f"{path.parent}; what it holds is made anew"
        )


def _holds_objects(file: BinaryIO) -> bool:
    """Whether an .npy file's array is one of objects, which are pickled; False for a header that is not whole."""
    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        # as numpy.load with allow_pickle; NumPy's stub lacks the argument
        return read(file, max_header_size=2**31)[2].hasobject  # type: ignore[call-arg]  # see above
    except Exception:  # of a parser that meets anything; numpy.load comes no further either
        return False
