"""typed: JSON as dataclasses, and what each wrong value is called."""

from dataclasses import dataclass

import pytest

from paddle_te.typed import NotAsDeclared, at_least, read


@dataclass(frozen=True)
class Inner:
    size: int = at_least(0)
    note: str | None = None


@dataclass(frozen=True)
class Outer:
    parts: dict[str, Inner]
    rate: float
    steps: list[int]
    on: bool = False


GOOD = {"parts": {"a": {"size": 3}}, "rate": 1, "steps": [1, 2]}


def test_what_is_right_is_read():
    assert read(Outer, GOOD) == Outer({"a": Inner(3)}, 1, [1, 2])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rate": "x"}, "rate is 'x': it must be a number"),
        ({"rate": True}, "rate is True: it must be a number"),
        ({"rate": float("inf")}, "rate is inf: it must be a number"),
        ({"on": 1}, "on is 1: it must be true or false"),
        ({"steps": [1, "2"]}, r"steps\[1\] is '2': it must be a whole number"),
        ({"steps": {}}, r"steps is {}: it must be a list"),
        ({"parts": []}, r"parts is \[\]: it must be an object"),
        ({"parts": {"a": 7}}, "parts.a is 7: it must be an object"),
        ({"parts": {"a": {}}}, "parts.a.size is missing"),
        ({"parts": {"a": {"size": -1}}}, "parts.a.size is -1: it must be a whole number of at least 0"),
        ({"parts": {"a": {"size": 1, "note": 2}}}, "parts.a.note is 2: it must be a text or null"),
        ({"other": 1}, "other is not known"),
    ],
)
def test_what_is_wrong_is_named(changes, message):
    with pytest.raises(NotAsDeclared, match=f"^{message}"):
        read(Outer, GOOD | changes)


def test_a_long_value_is_shown_in_short():
    with pytest.raises(NotAsDeclared) as error:
        read(Outer, "x" * 10**6)
    assert len(str(error.value)) < 100
