"""Experts' activations, times a number for each row, and their gradients: Transformer Engine's, or our kernels."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from paddle_te.native import experts
from paddle_te.ops.activations import CLAMP
from paddle_te.ops.te.recording import Recorder
from paddle_te.ops.te.runtime import FLOAT32, Matrix


class ScaledActivation(Protocol):
    """Compute act(hidden) times a number for each row. Numbers of rows are addresses, of float32 [rows]."""

    def activate(self, rt: Recorder, hidden: Matrix, of_rows: int, act: Matrix, code: int) -> None:
        """Fill act [rows, columns] of fc1's output, hidden. code: the dtype of both for TE."""

    def gradient(
        self, rt: Recorder, dact: Matrix, hidden: Matrix, of_rows: int, dhidden: Matrix, dof_rows: int, code: int
    ) -> None:
        """Fill dhidden and dof_rows, the gradients of hidden and of of_rows, from that of act."""


class _Library(NamedTuple):
    """Transformer Engine's functions, by their names. numbers: what both take besides."""

    forward: str
    backward: str
    numbers: tuple[float, ...] = ()

    def activate(self, rt: Recorder, hidden: Matrix, of_rows: int, act: Matrix, code: int) -> None:
        scales = rt.tensor(of_rows, (hidden.shape[0],), FLOAT32)
        getattr(rt.te, self.forward)(hidden.native, scales, act.native, *self.numbers, rt.stream)

    def gradient(
        self, rt: Recorder, dact: Matrix, hidden: Matrix, of_rows: int, dhidden: Matrix, dof_rows: int, code: int
    ) -> None:
        scales, dscales = (rt.tensor(address, (hidden.shape[0],), FLOAT32) for address in (of_rows, dof_rows))
        given = dact.native, hidden.native, scales, dhidden.native, dscales
        getattr(rt.te, self.backward)(*given, *self.numbers, rt.stream)


class _Gelu:
    """GELU's kernels of experts.cu."""

    def activate(self, rt: Recorder, hidden: Matrix, of_rows: int, act: Matrix, code: int) -> None:
        places = hidden.memory.data_ptr(), of_rows, act.memory.data_ptr()
        experts.scaled_gelu(rt.te, rt.stream, *places, *hidden.shape, code)

    def gradient(
        self, rt: Recorder, dact: Matrix, hidden: Matrix, of_rows: int, dhidden: Matrix, dof_rows: int, code: int
    ) -> None:
        places = dact.memory.data_ptr(), hidden.memory.data_ptr(), of_rows, dhidden.memory.data_ptr(), dof_rows
        experts.scaled_dgelu(rt.te, rt.stream, *places, *hidden.shape, code)


ACTIVATIONS: dict[str, ScaledActivation] = {
    "swiglu": _Library("scaled_swiglu", "scaled_dswiglu"),
    "clamped_swiglu": _Library("scaled_clamped_swiglu", "scaled_clamped_dswiglu", CLAMP),
    "gelu": _Gelu(),
}
