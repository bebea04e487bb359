"""Compute from a batch's tensor once, for all layers that get the tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from paddle import Tensor

T = TypeVar("T")


def kept_on(tensor: Tensor, make: Callable[..., T], *arguments: Any) -> T:
    """Return make(tensor, *arguments); from the second time on what it gave before, which is kept on the tensor.

    It is made again where the tensor has changed in place, by an operation that Paddle counts (`inplace_version`).
    """
    kept, call = _kept(tensor), (make, *arguments)
    found = kept.get(call)
    if found is None or found[0] != tensor.inplace_version:
        found = kept[call] = tensor.inplace_version, make(tensor, *arguments)
    return found[1]


def copy_with_kept(tensor: Tensor) -> Tensor:
    """Copy a tensor with what it keeps."""
    copy = tensor.clone()
    _kept(copy).update({call: (copy.inplace_version, made) for call, (_, made) in _kept(tensor).items()})
    return copy


def _kept(tensor: Tensor) -> dict[tuple[Any, ...], tuple[int, Any]]:
    """Return {(make, *arguments): (the version that it was made of, what it gave)}."""
    if not hasattr(tensor, "_paddle_te_kept"):
        tensor._paddle_te_kept = {}
    return tensor._paddle_te_kept
