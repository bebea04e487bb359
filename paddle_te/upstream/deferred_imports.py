"""Import packages that PaddleNLP imports when it starts, and that no command here uses, only when they are used.

`import paddlenlp` imports its web server, its task pipelines and its data sets too, and with them scikit-learn, SciPy's
statistics, pandas, pyarrow and Hugging Face's datasets. That is about half of the time that a process needs to start.

Here these packages are empty modules at first. A name that is imported from one is a `DeferredName`. It imports the
real package as soon as somebody calls it, looks into it or derives a class from it. This repair must be applied before
PaddleNLP is imported; afterwards it changes nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE, VERSION = "paddlenlp", "3.0.0b4"
SYMPTOM = "Every process imports scikit-learn, pandas and others, which training does not use, before it begins."
PACKAGES = (
    "datasets",
    "seqeval",
    "sklearn",
    *(f"paddlenlp.{part}" for part in "dataaug datasets experimental mergekit prompt server taskflow trl".split()),
)


class DeferredName:
    """Stands for a module's attribute until somebody uses it.

    isinstance and issubclass do not import the package: nothing is of a class that nobody has imported.
    """

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def _imported(self) -> Any:
        _finder.release(self._module)
        return getattr(importlib.import_module(self._module), self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._imported()(*args, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._imported(), attribute)

    def __mro_entries__(self, bases: tuple[type, ...]) -> tuple[Any, ...]:
        return (self._imported(),)

    def __instancecheck__(self, instance: object) -> bool:
        return not _finder.defers(self._module) and isinstance(instance, self._imported())

    def __subclasscheck__(self, subclass: type) -> bool:
        return not _finder.defers(self._module) and issubclass(subclass, self._imported())


class _EmptyModule(Loader):
    """Makes a module whose every attribute is a DeferredName."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # Python's own

    def exec_module(self, module: ModuleType) -> None:
        def attribute(name: str) -> DeferredName:
            if name.startswith("__"):  # what Python itself asks a module for
                raise AttributeError(name)
            return DeferredName(module.__name__, name)

        module.__getattr__ = attribute  # type: ignore[method-assign]  # a module's own, PEP 562


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self._packages: set[str] = set()

    def defer(self, packages: tuple[str, ...]) -> None:
        self._packages = set(packages)

    def _package_of(self, module: str) -> str | None:
        return next((package for package in self._packages if f"{module}.".startswith(f"{package}.")), None)

    def defers(self, module: str) -> bool:
        return self._package_of(module) is not None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, _EmptyModule(), is_package=True) if self.defers(fullname) else None

    def release(self, module: str) -> None:
        """Import the package of `module` from now on as it is."""
        package = self._package_of(module)
        self._packages.discard(package)
        for name in [name for name in sys.modules if package and f"{name}.".startswith(f"{package}.")]:
            del sys.modules[name]


_finder = _Finder()


def apply() -> None:
    if PACKAGE not in sys.modules and _finder not in sys.meta_path:
        _finder.defer(PACKAGES)
        sys.meta_path.insert(0, _finder)


def undo() -> None:
    """Import at once what is imported from now on; names that were deferred stay so."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for package in PACKAGES:
        _finder.release(package)
