"""Say where the compiled libraries of the nvgpu plug-in are. Paddle needs no import of this package."""

from pathlib import Path

_HERE = Path(__file__).resolve().parent
_FOLDERS = {"host": _HERE / "host", "cuda": _HERE.parent / "paddle_custom_device"}


def root(runtime: str) -> Path:
    """Return the folder of a runtime, "host" or "cuda", for CUSTOM_DEVICE_ROOT.

    Paddle looks into that of "cuda" by itself.

    Raises ValueError for another name, FileNotFoundError for a runtime that was not compiled when this was installed.
    """
    if runtime not in _FOLDERS:
        raise ValueError(f"nvgpu has no runtime {runtime!r}: it is host or cuda")
    folder = _FOLDERS[runtime]
    if not (folder / "plugin" / f"libnvgpu_{runtime}.so").is_file():
        raise FileNotFoundError(
            f"nvgpu was installed without its {runtime} runtime: NVGPU_RUNTIMES=host,cuda pip install ./nvgpu"
        )
    return folder
