"""The sample orders that PaddleNLP keeps beside a corpus, in index-cache: only those of this very corpus are used.

PaddleNLP names them after the corpus' path and the run's numbers, not after what the corpus holds: another corpus in
the old one's place finds an order that points beyond its end, or to other documents. A damaged one lets it wait for
ever.
"""

import json
import logging
import os
import re
import time
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)

FOLDER = "index-cache"
BEING_WRITTEN = 60  # seconds since the last change within which another job may still write a file


def refresh(prefix, folder=None):
    """Removes the orders of the corpus `prefix` that were made of another state of its files, or are damaged, so that
    they are made anew. One process of those that share the folder calls it.

    folder: None for the one beside the corpus.

    Raises ValueError where it cannot be removed.
    """
    folder = Path(folder or Path(prefix).parent / FOLDER)
    note = _note(folder, prefix)
    orders = _orders(folder, prefix)
    state = _state(prefix)
    same = _noted(note) == state if note.is_file() else _made_since(orders, state)
    for description, arrays in orders.items():
        damaged = [path.name for path in arrays if not _is_array(path)]
        if damaged or not same:
            why = f"{', '.join(damaged)} is damaged" if damaged else f"{prefix}.bin and .idx have changed since"
            _remove([*arrays, description], f"{folder}: the order of samples is made anew: {why}")


def note_corpus(prefix):
    """Notes the state of the files whose orders will be made beside them."""
    folder = Path(prefix).parent / FOLDER
    folder.mkdir(exist_ok=True)
    _note(folder, prefix).write_text(json.dumps(_state(prefix)) + "\n")


def _note(folder, prefix):
    return folder / f"{Path(prefix).name}.corpus.json"


def _orders(folder, prefix):
    """{description: [its arrays]} of the corpus' orders: files that PaddleNLP gives the same beginning of a name."""
    found = {}
    for description in sorted(folder.glob("*.dsc")):
        match = re.search(r"^Data prefix (.*)$", description.read_text(errors="replace"), re.MULTILINE)
        if match and Path(match[1]).name == Path(prefix).name:
            found[description] = sorted(folder.glob(f"{description.stem}*.npy"))
    return found


def _state(prefix):
    """{".bin": [bytes, time of the last change in ns], ".idx": …}"""
    stats = {suffix: os.stat(f"{prefix}{suffix}") for suffix in (".bin", ".idx")}
    return {suffix: [stat.st_size, stat.st_mtime_ns] for suffix, stat in stats.items()}


def _noted(note):
    try:
        return json.loads(note.read_text())
    except ValueError:
        return None


def _made_since(orders, state):
    """Whether all are younger than the corpus: what can be said of those from before there was a note."""
    changed = max(time for _, time in state.values())
    return all(description.stat().st_mtime_ns >= changed for description in orders)


def _is_array(path):
    """Whether the file holds a whole array, or may soon."""
    try:
        np.load(path, mmap_mode="r", allow_pickle=False)
        return True
    except (ValueError, EOFError, OSError):
        return time.time() - path.stat().st_mtime < BEING_WRITTEN


def _remove(paths, message):
    try:
        for path in paths:
            path.unlink(missing_ok=True)  # another node may be faster
    except OSError as error:
        raise ValueError(f"{message}; it cannot be removed ({error}): remove {paths[-1].parent} yourself") from error
    logger.info(message)
