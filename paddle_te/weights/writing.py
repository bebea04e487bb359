"""Write a conversion's tensors, several files at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from paddle_te.weights import flex, optimizer, pdparams, safetensors
from paddle_te.weights.folder import Checkpoint
from paddle_te.weights.output_files import OutputFile, Target
from paddle_te.weights.reader import Reader
from paddle_te.weights.tensors import TensorSpec, all_finite, cast


class Bar(tqdm):
    """A bar that calls `alive` with each step, shown or not."""

    alive: Callable[[], None]

    def update(self, n: float | None = 1) -> bool | None:
        self.alive()
        return super().update(n)


@dataclass(frozen=True)
class Writing:
    """Write the tensors of a conversion.

    sources: {kind: Checkpoint}. broken: the names of tensors that are not finite, to which threads append.
    """

    sources: Mapping[str, Checkpoint]
    target: Target
    folder: Path
    bar: Bar
    broken: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)  # once it is set, nothing more is written

    def write(self, groups: Iterable[Sequence[OutputFile]], workers: int) -> None:
        """Write groups of files, so many at a time."""
        # threads: numpy copies and file reads run without the interpreter's lock
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(self._write_files, files) for files in groups]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self._stop.set()  # a file may take minutes
                pool.shutdown(cancel_futures=True)
                raise

    def _write_files(self, files: Sequence[OutputFile]) -> None:
        """Write files that hold different ranks' shares of the same tensors, or one file."""
        readers = {kind: Reader(checkpoint, self.target.tp) for kind, checkpoint in self.sources.items()}
        for file in files:
            (self.folder / file.name).parent.mkdir(exist_ok=True)
        writers = [self._writer(self.folder / file.name, [entry.spec for entry in file.entries]) for file in files]
        for shares in zip(*(file.entries for file in files), strict=True):
            if self._stop.is_set():
                return
            for file, writer, entry in zip(files, writers, shares, strict=True):
                read = readers[entry.kind].number if entry.kind in optimizer.POWERS else readers[entry.kind].blocks
                arrays = [cast(array, entry.spec) for array in read(file.tp, entry.place)]
                if not all(all_finite(array, entry.spec.dtype) for array in arrays):
                    self.broken.append(entry.spec.name)
                writer.add(arrays)
                self.bar.update(entry.spec.nbytes)
        for writer in writers:
            writer.close()

    def _writer(self, path: Path, specs: Sequence[TensorSpec]) -> pdparams.Writer | safetensors.Writer:
        if self.target.suffix == pdparams.SUFFIX or path.suffix == flex.SUFFIX:
            return pdparams.Writer(path, specs)
        return safetensors.Writer(path, specs, "pt" if self.target.layout.kind == "hf" else "np")
