"""A recorded program as text, for people: docs/background/recorded-programs.md reads one line by line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paddle_te.native import DType
from paddle_te.ops.te.program import Program
from paddle_te.ops.te.recording import OFFSET_BITS, Placeholder
from paddle_te.ops.te.runtime import Runtime
from paddle_te.ops.te.steps import Steps

OFFSET_MASK = (1 << OFFSET_BITS) - 1


def listing(program: Program, rt: Runtime) -> list[str]:
    """Return the lines of a Program's forward and backward."""
    lines = ["forward takes " + ", ".join(_memory(place) for place in program.inputs.tensors if place)]
    for quantizers in filter(None, program.inputs.quantizers):
        factors = quantizers.factors
        if factors:
            lines.append(f"  and scale, amax, scale_inv of input, weight, gradient: m{factors[0]} to m{factors[-1]}")
    lines += _steps(program.steps)
    lines.append("forward returns " + ", ".join(_memory(place) for place in program.outputs))
    if program.train:
        steps, gradients = program.recorded_backward(rt)
        lines += ["backward", *_steps(steps)]
        lines.append("backward returns " + ", ".join(_memory(place) if place else "None" for place in gradients))
    return lines


def _memory(place: Placeholder) -> str:
    return f"m{place.index} {place.shape} {str(place.dtype).removeprefix('paddle.')}"


def _steps(steps: Steps) -> Iterator[str]:
    for what, packing in ("kept for the backward", steps.kept), ("temporary", steps.temporary):
        if packing.size:
            places = ", ".join(f"m{index} at {offset}" for index, offset in sorted(packing.offsets))
            verb = "use scratch memory of" if steps.in_scratch and packing is steps.temporary else "allocate"
            yield f"  {verb} {packing.size} bytes, {what}: {places}"
    for group in steps.groups:
        for index, shape, dtype in group.new:
            yield f"  allocate m{index} {shape} {str(dtype).removeprefix('paddle.')}"
        for call in group.calls:
            if call.arguments is None:
                yield f"  a Python function on {', '.join(f'm{index}' for index in sorted(call.indices))}"
            else:
                yield f"  {call.function}({', '.join(_argument(argument) for argument in call.arguments)})"
        if group.ends:
            yield f"  let go of {', '.join(f'm{index}' for index in sorted(group.ends))}"


def _argument(value: Any) -> str:
    if hasattr(value, "columnwise"):  # a native tensor
        return f"{_address(value.data_ptr, value.columnwise)} {list(value.shape)} {DType(value.dtype).name.lower()}"
    if hasattr(value, "sm_count"):
        return "stream"
    if type(value) is int and value >> OFFSET_BITS:
        return _address(value)
    return repr(value)


def _address(data: int, transpose: int = 0) -> str:
    """Return m3, m3+256 for an offset in it, and where the transposed copy of an fp8 tensor lies."""
    names = []
    for address in filter(None, (data, transpose)):
        offset = address & OFFSET_MASK
        names.append(f"m{address >> OFFSET_BITS}" + (f"+{offset}" if offset else ""))
    return "/".join(names) or "nothing"
