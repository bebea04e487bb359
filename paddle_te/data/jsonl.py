"""Read JSON lines, with errors that name the file and the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json_lines(path: str | Path, limit: int | None = None) -> list[tuple[str, dict[str, Any]]]:
    """Return [(where, record)]: each line's JSON object and "file:line" for messages. Empty lines are skipped.

    limit: read no more records than that. Raises FileNotFoundError, and ValueError for a line that is no JSON object or
    for a file without records.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    records: list[tuple[str, dict[str, Any]]] = []
    with path.open("rb") as lines:  # json.loads decodes, so that a line in another encoding is named, too
        for number, line in enumerate(lines, 1):
            if limit is not None and len(records) == limit:
                break
            if line.strip():
                records.append((f"{path}:{number}", parse_line(f"{path}:{number}", line)))
    if not records:
        raise ValueError(f"{path}: has no records; it needs one JSON object a line")
    return records


def parse_line(where: str, line: str | bytes) -> dict[str, Any]:
    """Return the JSON object of a line. Raises ValueError, with `where`, for anything else."""
    try:
        record = json.loads(line)
        escaped = b"\\u" in line if isinstance(line, bytes) else "\\u" in line
        text = json.dumps(record, ensure_ascii=False) if escaped else ""
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: is not JSON: {reason(error)}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: is not a JSON object")
    check_text(where, text)
    return record


def reason(error: ValueError | RecursionError) -> str:
    """Return why a line is not JSON. Python's words count lines too, from the line itself."""
    return f"{error.msg} (character {error.pos + 1})" if isinstance(error, json.JSONDecodeError) else str(error)


def check_text(where: str, text: str) -> None:
    """Raise ValueError for a text with half of a surrogate pair. JSON can spell one, and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise ValueError(f"{where}: holds {half}, half of a surrogate pair, which is no character") from error


def field(where: str, record: dict[str, Any], name: str, *types: type) -> Any:
    """Return record[name]. Raises ValueError where it is missing or not of one of the types."""
    if not isinstance(record.get(name), types):
        wanted = " or ".join(kind.__name__ for kind in types)
        raise ValueError(f'{where}: needs "{name}", a {wanted}; it has {", ".join(record) or "nothing"}')
    return record[name]
