"""Frozen dataclasses of many fields, which share the methods that dataclasses would generate for each.

To generate and compile these for the forty classes of settings and configurations takes each command some 15 ms at its
start.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, FrozenInstanceError, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

_Class = TypeVar("_Class")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[_Class]) -> type[_Class]:
    """Class decorator: a dataclass without methods of its own, for a `Record` or for what one inherits from."""
    return dataclass(init=False, repr=False, eq=False)(cls)


class Record:
    """What a `record` can do: keyword arguments, frozen fields, == and repr(), which leaves defaults out."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    if not TYPE_CHECKING:  # mypy knows a record's fields, and checks their types

        def __init__(self, **values: Any) -> None:
            said = {name: each.default for name, each in self.__dataclass_fields__.items()} | values
            unknown = sorted(values.keys() - self.__dataclass_fields__.keys())
            missing = [name for name, value in said.items() if value is MISSING]
            if unknown or missing:
                raise TypeError(f"{type(self).__name__}: unknown {unknown}, missing {missing}")
            self.__dict__.update(said)
            self.__post_init__()

    def __post_init__(self) -> None:
        """Check or complete the values, as in any dataclass."""

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __repr__(self) -> str:
        values = ((name, getattr(self, name), each.default) for name, each in self.__dataclass_fields__.items())
        said = ", ".join(f"{name}={value!r}" for name, value, default in values if value != default)
        return f"{type(self).__name__}({said})"
