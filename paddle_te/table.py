"""Tables for a terminal."""

from collections.abc import Sequence


def in_columns(rows: Sequence[Sequence[str]], rule: bool = False) -> list[str]:
    """Return the lines of a table: cells left-aligned, columns two spaces apart.

    rows: of strings, equally many each; the header is the first. rule: a line of dashes stands below the header.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    header, *rest = rows
    dashes = [["-" * width for width in widths]] if rule else []
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (header, *dashes, *rest)]
