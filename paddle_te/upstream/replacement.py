"""Attributes of somebody else's module or class, replaced and put back."""

from typing import Any


class Replacement:
    """Puts `new` in the place of `owner`'s attribute, until it is undone.

    Args:
        owner: the module or class.
        name: of the attribute, which must exist.
        new: takes its place. It may call `original`.
    """

    def __init__(self, owner: Any, name: str, new: Any):
        self._owner, self._name, self._new = owner, name, new
        self.original = getattr(owner, name)

    def apply(self) -> None:
        setattr(self._owner, self._name, self._new)

    def undo(self) -> None:
        setattr(self._owner, self._name, self.original)


class Replacements:
    """Several that make one repair: applied, and undone, together."""

    def __init__(self, *replacements: Replacement):
        self._replacements = replacements

    def apply(self) -> None:
        for replacement in self._replacements:
            replacement.apply()

    def undo(self) -> None:
        for replacement in self._replacements:
            replacement.undo()
