"""Replace attributes of somebody else's module or class, and put them back."""

from typing import Any, TypeAlias

Theirs: TypeAlias = Any  # an object of Paddle's or a host's, with attributes that no stub declares


class Replacement:
    """Replaces `owner`'s attribute by `new`, until it is undone.

    Args:
        owner: the module or class.
        name: of the attribute, which must exist.
        new: takes its place. It may call `original`.
    """

    def __init__(self, owner: Any, name: str, new: Any) -> None:
        self._owner, self._name, self._new = owner, name, new
        self.original = getattr(owner, name)

    def apply(self) -> None:
        setattr(self._owner, self._name, self._new)

    def undo(self) -> None:
        setattr(self._owner, self._name, self.original)


class Replacements:
    """Several that make one repair: applied, and undone, together."""

    def __init__(self, *replacements: Replacement) -> None:
        self._replacements = replacements

    def apply(self) -> None:
        for replacement in self._replacements:
            replacement.apply()

    def undo(self) -> None:
        for replacement in self._replacements:
            replacement.undo()
