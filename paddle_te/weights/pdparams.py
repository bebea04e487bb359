"""Read and write .pdparams, what paddle.save makes: a pickled dict of numpy arrays. Nothing in it is run.

A pickle is a program. This reader knows the few instructions that describe tensors in plain containers and refuses
every other one, so a malicious file is an error. It does not load the tensors either: it notes where they are.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal

import numpy as np

from paddle_te.weights.tensors import (
    STORAGE,
    CheckpointError,
    Shape,
    TensorRef,
    TensorSpec,
    opened,
    sync_file,
    write_array,
)
from paddle_te.weights.tensors import (
    Array as NumpyArray,
)

SUFFIX = ".pdparams"
NAME_TABLE = "StructuredToParameterName@@"  # paddle.save's {key: the parameter's name in the program}
# paddle.save stores bfloat16 as uint16
_DTYPES = {"f4": "float32", "f2": "float16", "u2": "bfloat16", "i2": "int16", "i1": "int8"}


class _Bytes:
    """Bytes of the pickle that were skipped, not read."""

    def __init__(self, offset: int, length: int) -> None:
        self.offset, self.length = offset, length


class _Dtype:
    """Stands in for numpy.dtype(code, align, copy)."""

    def __init__(self, code: object, *_: object) -> None:
        if not isinstance(code, str) or not re.fullmatch(r"[a-zA-Z]\d{1,2}", code):
            raise CheckpointError(f"a tensor of dtype {code!r}")
        self.code = code

    def __setstate__(self, state: tuple[object, ...]) -> None:
        if state[1] not in ("<", "|", "=") or state[2:5] != (None, None, None):
            raise CheckpointError(f"a tensor of dtype {self.code!r} with state {state!r}")


class Scalar:
    """Stands in for a numpy number, whose value nobody here asks for."""

    def __init__(self, *_: object) -> None:
        pass


class GeneratorState(Scalar):
    """Stands in for the state of one of Paddle's random number generators."""

    def __setstate__(self, state: object) -> None:
        pass


class Array:
    """Stands in for the numpy.ndarray that is being described."""

    def __init__(self, *_: object) -> None:
        self.shape: Shape | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.fortran, self.data = state
        if not (isinstance(self.dtype, _Dtype) and isinstance(self.data, _Bytes)):
            raise CheckpointError("an array of objects")
        if not (isinstance(self.fortran, bool) and isinstance(self.shape, tuple)):
            raise CheckpointError("an array that numpy did not describe")
        if not all(isinstance(n, int) and n >= 0 for n in self.shape):
            raise CheckpointError(f"an array of shape {self.shape!r}")
        if np.dtype(self.dtype.code).itemsize * math.prod(self.shape) != self.data.length:
            raise CheckpointError(f"an array of shape {self.shape} with {self.data.length} bytes")

    @property
    def order(self) -> Literal["C", "F"]:
        """The order in which its elements lie."""
        return "F" if self.fortran else "C"


_GLOBALS = {
    ("numpy.core.multiarray", "_reconstruct"): Array,
    ("numpy._core.multiarray", "_reconstruct"): Array,  # numpy 2
    ("numpy.core.multiarray", "scalar"): Scalar,
    ("numpy._core.multiarray", "scalar"): Scalar,
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): _Dtype,
    ("collections", "OrderedDict"): OrderedDict,
    ("paddle.base.libpaddle", "GeneratorState"): GeneratorState,  # in rng_state.pth
    ("builtins", "tuple"): tuple,  # paddle.save writes a Tensor in a nested container as tuple((name, array))
}

_OPCODES = (
    "PROTO STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
    "BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS "
    "EMPTY_DICT SETITEM SETITEMS BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL"
)


class _TensorUnpickler(pickle._Unpickler):
    """The standard library's unpickler in Python, whose table of instructions can be cut down and changed."""

    # the standard library's has them; its stubs leave them out
    stack: list[Any]
    memo: dict[int, Any]
    read: Callable[[int], bytes]
    append: Callable[[object], None]

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        getattr(pickle, op)[0]: pickle._Unpickler.dispatch[getattr(pickle, op)[0]] for op in _OPCODES.split()
    }

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._file, self._size = file, os.fstat(file.fileno()).st_size
        self._file_read = self._bounded_read

    def _bounded_read(self, n: int) -> bytes:
        if n > self._size - self._file.tell():
            raise EOFError
        return self._file.read(n)

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _GLOBALS[module, name]
        except KeyError:
            raise CheckpointError(
                f"it holds {module}.{name}, which is neither a tensor nor a plain container; it was not run"
            ) from None

    def _frame(self) -> None:
        """Frames only group instructions; without them each offset is one of the file. Other readers allocate one."""
        if struct.unpack("<Q", self.read(8))[0] > self._size - self._file.tell():
            raise EOFError

    def _long_binput(self) -> None:
        """Other readers keep what is remembered in an array that is as long as the largest number."""
        number = struct.unpack("<I", self.read(4))[0]
        if number > self._size:
            raise CheckpointError(f"it remembers a value by the number {number:,}")
        self.memo[number] = self.stack[-1]

    def _skip_bytes(self, length: int) -> None:
        if length > self._size - self._file.tell():
            raise EOFError
        self.append(_Bytes(self._file.tell(), length))
        self._file.seek(length, os.SEEK_CUR)

    def _short_binbytes(self) -> None:
        self._skip_bytes(self.read(1)[0])

    def _binbytes(self) -> None:
        self._skip_bytes(struct.unpack("<I", self.read(4))[0])

    def _binbytes8(self) -> None:
        self._skip_bytes(struct.unpack("<Q", self.read(8))[0])

    def _reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self.stack[-1](*args)  # only _GLOBALS can be called: there is no other way to get a callable

    def _newobj(self) -> None:
        self._reduce()
        if not isinstance(self.stack[-1], GeneratorState):
            raise CheckpointError(f"it makes a {type(self.stack[-1]).__name__} anew")

    def _build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], (Array, _Dtype, GeneratorState)):
            raise CheckpointError(f"it sets the state of a {type(self.stack[-1]).__name__}")
        self.stack[-1].__setstate__(state)

    dispatch |= {
        pickle.FRAME[0]: _frame,
        pickle.LONG_BINPUT[0]: _long_binput,
        pickle.SHORT_BINBYTES[0]: _short_binbytes,
        pickle.BINBYTES[0]: _binbytes,
        pickle.BINBYTES8[0]: _binbytes8,
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _newobj,
        pickle.BUILD[0]: _build,
    }


def read(path: str | Path) -> dict[str, TensorRef]:
    """Return {name: TensorRef} of the tensors in a .pdparams file; nothing of their data is read.

    Raises CheckpointError for a truncated file, one that is not a dict of tensors, and one that holds anything else
    than tensors, names and plain containers.
    """
    path, state = Path(path), read_state(path)
    return {name: _tensor_ref(path, name, value) for name, value in state.items() if name != NAME_TABLE}


def read_name_table(path: str | Path) -> dict[str, str]:
    """Return {name: the parameter's name in the program, as a .pdopt file calls it} of a .pdparams file."""
    return read_state(path).get(NAME_TABLE) or {}


def read_optimizer(path: str | Path) -> tuple[dict[str, TensorRef], dict[str, TensorRef]]:
    """Return {key: TensorRef} and {parameter's name: TensorRef}, the master weights, of a .pdopt file.

    Errors as `read`'s.
    """
    path, state = Path(path), read_state(path)
    state = {key: value for key, value in state.items() if key not in (NAME_TABLE, "LR_Scheduler")}
    master = state.pop("master_weights", {})
    refs, masters = ({key: _tensor_ref(path, key, value) for key, value in part.items()} for part in (state, master))
    return refs, masters


def read_state(path: str | Path) -> dict[str, Any]:
    """Return the dict in a file saved by paddle.save; arrays are only described. Errors as `read`'s."""
    state = check(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a dict of tensors")
    return state


def check(path: str | Path) -> Any:
    """Return the content of a file of paddle.save: tensors, only described, numbers and names in plain containers.

    Call it before Paddle loads a file, which runs whatever code is in it. Raises CheckpointError for a truncated
    file, and for one that holds anything else, of which nothing has been run.
    """
    path = Path(path)
    with opened(path) as file:
        try:
            return _TensorUnpickler(file).load()
        except CheckpointError as error:
            raise CheckpointError(f"{path}: refused: {error}") from None
        except EOFError:
            raise CheckpointError(f"{path}: truncated (or not a file of paddle.save)") from None
        except KeyError as error:
            raise CheckpointError(
                f"{path}: not a file of tensors (pickle instruction {error}); "
                "if you trust it, load it with paddle.load and save it with paddle.save(..., protocol=4)"
            ) from None
        except (pickle.UnpicklingError, ValueError, TypeError, IndexError, AttributeError, UnicodeError) as error:
            raise CheckpointError(f"{path}: not a file of tensors ({error})") from None


def _tensor_ref(path: Path, name: object, value: object) -> TensorRef:
    if isinstance(value, tuple) and len(value) == 2:
        value = value[1]  # (the parameter's name, array)
    if not isinstance(name, str) or not isinstance(value, Array) or value.shape is None:
        raise CheckpointError(f"{path}: {name!r} is not a tensor: this is not a file of model weights")
    if value.dtype.code not in _DTYPES:
        raise CheckpointError(f"{path}: {name!r} has dtype {value.dtype.code}, not float32, float16 or bfloat16")
    return TensorRef(path, value.data.offset, _DTYPES[value.dtype.code], value.shape, value.order)


class Writer:
    """Write a new file tensor by tensor, as paddle.save would: paddle.load reads it.

    Args:
        specs: list of TensorSpec. Then `add` takes their data in the same order and `close` finishes the file.
    """

    def __init__(self, path: str | Path, specs: Sequence[TensorSpec]) -> None:
        self._specs, self._left = specs, iter(specs)
        self._file = open(path, "xb")
        self._file.write(pickle.PROTO + b"\x04" + pickle.EMPTY_DICT + pickle.MARK)

    def add(self, arrays: Iterable[NumpyArray]) -> None:
        """Write the next tensor, given as arrays whose bytes follow one another."""
        spec = next(self._left)
        self._file.write(pickled_text(spec.name) + _array_head(spec))
        for array in arrays:
            write_array(self._file, array)
        self._file.write(pickle.TUPLE + pickle.BUILD)

    def close(self) -> None:
        """Write the table of names, and everything through to the disk."""
        table = b"".join(pickled_text(spec.name) * 2 for spec in self._specs)
        self._file.write(pickled_text(NAME_TABLE) + pickle.EMPTY_DICT + pickle.MARK + table + pickle.SETITEMS)
        self._file.write(pickle.SETITEMS + pickle.STOP)
        sync_file(self._file)
        self._file.close()


def pickled_text(value: str) -> bytes:
    """Return the instruction that makes a string."""
    data = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def _int(value: int) -> bytes:
    return pickle.BININT + struct.pack("<i", value)


def pickled_global(module: str, name: str) -> bytes:
    """Return the instructions that fetch a class or function."""
    return pickled_text(module) + pickled_text(name) + pickle.STACK_GLOBAL


def _array_head(spec: TensorSpec) -> bytes:
    """Return the pickle of a numpy array up to its data (numpy.ndarray.__reduce__, protocol 4)."""
    empty = pickled_global("numpy", "ndarray") + _int(0) + pickle.TUPLE1 + pickle.SHORT_BINBYTES + b"\x01b"
    dtype = (
        pickled_global("numpy", "dtype") + pickled_text(STORAGE[spec.dtype].str[1:]) + pickle.NEWFALSE + pickle.NEWTRUE
    )
    dtype += pickle.TUPLE3 + pickle.REDUCE
    dtype += (
        pickle.MARK
        + _int(3)
        + pickled_text("<")
        + pickle.NONE * 3
        + _int(-1) * 2
        + _int(0)
        + pickle.TUPLE
        + pickle.BUILD
    )
    return (
        # numpy 1's module name, which numpy 2 reads too
        pickled_global("numpy.core.multiarray", "_reconstruct")
        + (empty + pickle.TUPLE3 + pickle.REDUCE)
        + (pickle.MARK + _int(1) + pickle.MARK + b"".join(map(_int, spec.shape)) + pickle.TUPLE)
        + (dtype + pickle.NEWFALSE + pickle.BINBYTES8 + struct.pack("<Q", spec.nbytes))
    )
