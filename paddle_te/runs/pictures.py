"""Draw what a run shows with matplotlib, which is imported where a picture is wanted: it takes a second."""

from __future__ import annotations

import importlib.util
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REMEDY = "pip install matplotlib"


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def subplots(rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
    """Return a figure that needs no screen, and its axes; arguments as `pyplot.subplots`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, layout="constrained", **options)


def png(figure: Figure) -> bytes:
    """Return the PNG of a figure of `subplots`, which is closed."""
    import matplotlib.pyplot as plt

    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    plt.close(figure)
    return picture.getvalue()
