"""What PaddleFormers is about to load, looked at first: its own readers believe what they find."""

from pathlib import Path

from paddle_te.configs.families import FAMILIES
from paddle_te.weights import CheckpointError
from paddle_te.weights.files import read_json
from paddle_te.weights.folder import open_checkpoint
from paddle_te.weights.verification import FULL, Verification

_KNOWN = {*FAMILIES, *(family.hf_model_type for family in FAMILIES.values())}


def check_weights(folder: str | Path, verify: str = FULL, tell=print) -> None:
    """Refuses weights that contradict their config.json, or differ from their folder's manifest.

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
    config = read_json(folder / "config.json")
    if isinstance(config, dict) and config.get("model_type") in _KNOWN:
        Verification(verify, tell=tell).check(folder)
        if (kind := open_checkpoint(folder).layout.kind) != "hf":
            raise CheckpointError(f"{folder}: PaddleFormers reads Hugging Face's names, and these are of {kind} layout")


def check_adapter(folder: str | Path, verify: str = FULL, tell=print) -> None:
    """Refuses an adapter that differs from its folder's manifest. Raises CheckpointError, a ValueError."""
    if Path(folder).is_dir():
        Verification(verify, tell=tell).check(folder)
