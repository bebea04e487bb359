"""Count the functions of the package that have types, by room: `python tools/typed_functions.py`.

A function is typed if its return value and each parameter but self and cls have annotations.
"""

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "paddle_te"


def is_typed(function: ast.FunctionDef) -> bool:
    """Return whether the function has all its annotations, as mypy's disallow_untyped_defs counts them."""
    arguments = function.args
    several = [each for each in (arguments.vararg, arguments.kwarg) if each]
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *several]
    own = [each for place, each in enumerate(given) if place or each.arg not in ("self", "cls")]
    returns = function.returns is not None or (function.name == "__init__" and bool(own))
    return returns and all(each.annotation for each in own)


def count(package: Path = PACKAGE) -> tuple[Counter[str], Counter[str]]:
    """Return how many functions of each room are typed, and how many it has. Nested functions count."""
    typed: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                functions[room] += 1
                typed[room] += is_typed(node)
    return typed, functions


def main() -> None:
    """Print a line for each room, and one for all."""
    typed, functions = count()
    for room in sorted(functions):
        print(f"{room:12} {typed[room]:5} of {functions[room]:5}  {typed[room] / functions[room]:4.0%}")
    print(f"{'all':12} {typed.total():5} of {functions.total():5}  {typed.total() / functions.total():4.0%}")


if __name__ == "__main__":
    main()
