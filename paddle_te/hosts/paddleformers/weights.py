"""What PaddleFormers is about to load, looked at first: its own readers believe what they find."""

from collections.abc import Callable
from pathlib import Path

from paddle_te.configs import ModelConfig, model_config
from paddle_te.configs.families import FAMILIES
from paddle_te.configs.reading import read_content
from paddle_te.weights import CheckpointError
from paddle_te.weights.folder import open_checkpoint
from paddle_te.weights.verification import FULL, Verification

_KNOWN = {*FAMILIES, *(family.hf_model_type for family in FAMILIES.values())}


def read_config(folder: str | Path) -> ModelConfig | None:
    """Return the config.json in the folder of a recipe's model_name_or_path.

    None where there is none, and for another family, which PaddleFormers reads itself.

    Raises ConfigError, a ValueError.
    """
    path = Path(folder) / "config.json"
    if not path.exists():
        return None
    content = read_content(path)
    known = not isinstance(content, dict) or content.get("model_type") in _KNOWN
    return model_config(content, str(path)) if known else None


def vocabulary_of(folder: str | Path) -> int | None:
    """vocab_size in the config.json of a recipe's model; None where there is none. Raises ConfigError."""
    path = Path(folder) / "config.json"
    if config := read_config(folder):
        return config.record.vocab_size
    content = read_content(path) if path.is_file() else None
    return content.get("vocab_size") if isinstance(content, dict) else None


def check_weights(folder: str | Path, verify: str = FULL, tell: Callable[[str], None] = print) -> None:
    """Refuse weights that contradict their config.json, or differ from their folder's manifest.

    folder: what a recipe's model_name_or_path names; its files may be links, as the launcher makes them. Of a folder
    without weights, or with a model of another family, nothing is looked at. tell: as `Verification`'s.
    Raises CheckpointError, a ValueError.
    """
    folder = Path(folder)
    files = sorted(folder.glob("model*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        return
    own = files[0].resolve().parent  # of the weights, with the config.json that was saved with them
    if (own / "config.json").is_file():
        folder = own
    if read_config(folder) is not None:
        Verification(verify, tell=tell).check(folder)
        if (kind := open_checkpoint(folder).layout.kind) != "hf":
            raise CheckpointError(f"{folder}: PaddleFormers reads Hugging Face's names, and these are of {kind} layout")


def check_adapter(folder: str | Path, verify: str = FULL, tell: Callable[[str], None] = print) -> None:
    """Refuse an adapter that differs from its folder's manifest. Raise CheckpointError, a ValueError."""
    if Path(folder).is_dir():
        Verification(verify, tell=tell).check(folder)
