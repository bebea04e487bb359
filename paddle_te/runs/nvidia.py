"""List the NVIDIA GPUs of this machine, by the driver's own tool."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence


def listing() -> list[str]:
    """Return a line for each GPU, and for each part of one; [] without the tool."""
    if not shutil.which("nvidia-smi"):
        return []
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []


def names(lines: Sequence[str]) -> list[str]:
    """Return what the driver calls each GPU of a listing."""
    return re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", "\n".join(lines), re.MULTILINE)
