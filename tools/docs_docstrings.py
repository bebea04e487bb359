"""An extension of griffe (mkdocs.yml). Docstrings name arguments in lines such as `eps: of the norm`; it lists them.

hidden_size: of the whole layer, not of one rank.
parameter, other: what both are,
    continued in an indented line.
Raises ValueError where they do not fit.
"""

import re

import griffe

NAMED = r"[a-z_]\w*(?:(?:, | and )[a-z_]\w*)*: "


def as_list(text):
    """The text with a Markdown list in the place of lines that name arguments."""
    lines, in_list = [], False
    for line in text.splitlines():
        named = re.match(NAMED, line)
        if named:
            names = named[0][:-2]
            line = f"- `{names}`: {line[named.end() :]}"
        if bool(named) != in_list and line[:1] not in ("", " "):  # indented lines and empty ones end no list
            lines.append("")
            in_list = bool(named)
        lines.append(line)
    return "\n".join(lines)


class NamedArguments(griffe.Extension):
    """Rewrites every docstring that it is shown."""

    def on_instance(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = as_list(obj.docstring.value)
