"""manifest.json: what a checkpoint consists of and which run saved it, so that it is believed only when it agrees.

    {"version": 1,
     "files": {"model_state.pdparams": {"size": bytes, "xxh3_128": checksum}, …},
     "run": {"model": …, "layout": …, "step": …, "data": …}}

The manifest is written when all files of all ranks are on the disk, and before the checkpoint's mark. The mark holds
the manifest's own checksum, so that neither can be damaged or lost unseen; an empty mark is that of a version without
manifests. The checksums are XXH3's of 128 bits: they find damage, at the speed of memory (13 GB/s a core here, where
zlib's CRC-32 makes 1.5), and do not protect from somebody who forges a whole checkpoint. Knows no Paddle.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from paddle_te.configs import MODEL_VALUES

MANIFEST = "manifest.json"
VERSION = 1
# PaddleNLP's name for the mark of a complete checkpoint
COMPLETE_MARK = ".checkpoint_done"
# A run may load any file with such an ending, so one that the manifest does not name makes a checkpoint a bad one.
STATE_SUFFIXES = (".pdparams", ".pdopt", ".safetensors", ".pth")
BLOCK = 2**20  # bytes that are read at a time; they stay in the processor's cache
THREADS = min(8, os.cpu_count() or 1)

LAYOUT_VALUES = (
    "tensor_parallel_degree pipeline_parallel_degree virtual_pp_degree sharding_parallel_degree data_parallel_degree"
).split()


class CheckpointDamaged(ValueError):
    """A checkpoint that does not agree with its manifest; the message says in what."""


@dataclass(frozen=True)
class FileRecord:
    """One file: its size in bytes and its checksum, 32 hexadecimal digits."""

    size: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """files: {name relative to the folder: FileRecord}; run: what `model_values` and the like say, by their topic."""

    files: dict
    run: dict

    def text(self):
        """The content of manifest.json, as bytes."""
        files = {name: asdict(record) for name, record in sorted(self.files.items())}
        return (json.dumps({"version": VERSION, "files": files, "run": self.run}, indent=1) + "\n").encode()


def seal(text):
    """What the mark of a complete checkpoint says of its manifest's bytes."""
    return xxhash.xxh3_128(text).hexdigest()


def record(path, copy=None):
    """The FileRecord of a file, read once; copy: an open binary file that gets what is read."""
    digest, size, block = xxhash.xxh3_128(), 0, memoryview(bytearray(BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
            if copy is not None:
                copy.write(block[:count])
    return FileRecord(size, digest.hexdigest())


def file_names(folder):
    """The names of a checkpoint's files relative to its folder, in order; not the manifest and no mark."""
    folder = Path(folder)
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != MANIFEST and not name.startswith("."))


def records(folder, names, threads=THREADS):
    """{name: FileRecord} of some of a folder's files."""
    names = list(names)
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(names, pool.map(lambda name: record(Path(folder) / name), names), strict=True))


def read(folder):
    """The folder's Manifest; None for a checkpoint of a version that wrote none.

    Raises CheckpointDamaged where the manifest is not the one that the mark names.
    """
    path, mark = Path(folder) / MANIFEST, Path(folder) / COMPLETE_MARK
    named = mark.read_text(errors="replace").strip()
    if not path.is_file():
        if named:
            raise CheckpointDamaged(f"{MANIFEST} is missing")
        return None
    text = path.read_bytes()
    if seal(text) != named:
        raise CheckpointDamaged(f"{MANIFEST} is not the one that {COMPLETE_MARK} names: one of them is damaged")
    content = json.loads(text)
    if content["version"] != VERSION:
        raise CheckpointDamaged(
            f"{MANIFEST} is of version {content['version']}, this paddle_te reads {VERSION}: use a newer paddle_te"
        )
    return Manifest({name: FileRecord(**entry) for name, entry in content["files"].items()}, content["run"])


def damage(folder, level="full", rank=0, ranks=1):
    """In what a complete checkpoint differs from its manifest, a line each; [] for a good one, or one without manifest.

    level: "full" compares sizes and checksums; "size" looks for missing files and other sizes; "none" asks of the
        manifest only that it is whole.
    rank, ranks: of so many processes this one reads its share of the files; all look at the sizes.
    """
    folder = Path(folder)
    try:
        manifest = read(folder)
        if manifest is None or level == "none":
            return []
        wrong = _wrong_sizes(folder, manifest)
        return _wrong_checksums(folder, manifest, rank, ranks) if level == "full" and not wrong else wrong
    except (OSError, CheckpointDamaged) as error:
        return [str(error)]


def _wrong_sizes(folder, manifest):
    there, wrong = set(file_names(folder)), []
    for name, entry in manifest.files.items():
        if name not in there:
            wrong.append(f"{name} is missing")
        elif (size := (folder / name).stat().st_size) != entry.size:
            wrong.append(f"{name} has {size:,} bytes instead of {entry.size:,}")
    foreign = sorted(name for name in there - manifest.files.keys() if name.endswith(STATE_SUFFIXES))
    return wrong + [f"{name} was not saved with it" for name in foreign]


def share(sizes, rank, ranks):
    """Of {name: size} the names that one of several processes reads; each gets about as many bytes."""
    return sorted(sizes, key=lambda name: (-sizes[name], name))[rank::ranks]


def _wrong_checksums(folder, manifest, rank, ranks):
    mine = share({name: entry.size for name, entry in manifest.files.items()}, rank, ranks)
    found = records(folder, mine)
    return [
        f"{name} has another checksum than when it was saved" for name in mine if found[name] != manifest.files[name]
    ]


def model_values(config, lora=None):
    """{name: value} of a model's configuration, an object with PaddleNLP's names: what `MODEL_VALUES` names, the layout
    of its decoder layers' weights, and the adapter that is trained on it (lora: PaddleNLP's LoRAConfig).
    """
    values = {name: getattr(config, name, None) for name in MODEL_VALUES}
    values["num_key_value_heads"] = values["num_key_value_heads"] or values["num_attention_heads"]
    te = getattr(config, "transformer_engine_backend", "none") != "none"
    values["weights"] = "Transformer Engine's" if te else native_weights(config)
    if lora is not None:
        values["adapter"] = f"rank {lora.r}, alpha {lora.lora_alpha}, on {' '.join(lora.target_modules)}"
    return values


def native_weights(flags):
    """What to call PaddleNLP's own layout of weights; flags: an object that may have fuse_attention_qkv and _ffn."""
    fused = [name for name in ("qkv", "ffn") if getattr(flags, f"fuse_attention_{name}", False)]
    return "PaddleNLP's" + (f" with fused {' and '.join(fused)}" if fused else "")


def layout_values(arguments):
    """{name: value} of the degrees of parallelism in PaddleNLP's TrainingArguments, and how the ranks save."""
    values = {name: max(getattr(arguments, name), 1) for name in LAYOUT_VALUES}
    sharding = [str(getattr(option, "value", option)) for option in arguments.sharding or ()]
    return values | {"sharding": " ".join(sharding), "unified_checkpoint": bool(arguments.unified_checkpoint)}


def fingerprint(paths, settings=()):
    """A short text that tells files from others: by their sizes, their first and last MiB, and the settings."""
    digest, total = xxhash.xxh3_64(repr(list(settings)).encode()), 0
    for path in paths:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            digest.update(f"{size} ".encode() + file.read(2**20))
            file.seek(max(size - 2**20, 0))
            digest.update(file.read())
        total += size
    return f"{total:,} bytes, {digest.hexdigest()}"


def differences(there, here):
    """["hidden_size is 256 there and 128 here", …] of two such dicts, for the names that both have."""
    return [
        f"{name} is {there[name]} there and {here[name]} here"
        for name in here
        if there.get(name, here[name]) != here[name]
    ]
