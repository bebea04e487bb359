"""Make docs/get-started/tutorial.ipynb of tutorial.md, its commands as cells.

    python tools/notebook.py          write it
    python tools/notebook.py --run    run its cells as Jupyter does, without Jupyter

A block of commands becomes a cell of %%commands, which the first cell defines. A block that the page marks as not
tested stays text. A comment `<!-- notebook: CODE -->` becomes a cell of Python.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/get-started/tutorial.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")
MAGIC = "%%commands\n"
STEPS = 20  # instead of the page's 200: three minutes instead of 20
INTRODUCTION = f"""This notebook is [the tutorial](tutorial.md) with {STEPS} steps a training instead of 200. It runs on
a CPU in about three minutes. Start Jupyter in the environment that the tutorial installs: `pip install jupyterlab`,
then `jupyter lab docs/get-started/tutorial.ipynb`."""
SETUP = f'''import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.chdir(next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "llm/llama").is_dir()))
os.environ["PATH"] = f"{{Path(sys.executable).parent}}{{os.pathsep}}{{os.environ['PATH']}}"
os.environ.setdefault("STEPS", "{STEPS}")


def commands(line, cell):
    """Run a cell in bash; the next cell has what it exports."""
    with tempfile.NamedTemporaryFile("r") as variables:
        script = f"set -euo pipefail\\n{{cell}}\\nenv -0 >{{variables.name}}\\n"
        said = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        process = subprocess.Popen(["bash", "-c", script], **said)
        for text in process.stdout:
            print(text, end="")
        if process.wait():
            raise RuntimeError(f"exit status {{process.returncode}}")
        os.environ.update(pair.split("=", 1) for pair in variables.read().split("\\0") if pair)


def show(picture):
    """Show a picture of the run's folder."""
    from IPython.display import Image

    return Image(Path(os.environ["OUT"], picture))


if "get_ipython" in globals():
    get_ipython().register_magic_function(commands, "cell")'''
BLOCK = re.compile(r"(?:(<!-- not tested here: [^\n]* -->\n)?```bash\n(.*?)```|<!-- notebook: (.*?) -->)\n", re.DOTALL)


def cells(page: str) -> list[tuple[str, str]]:
    """Return (kind, text) of each cell, in the page's order; kind: markdown or code."""
    title, _, body = page.partition("\n")
    found, start = [("markdown", f"{title}\n\n{INTRODUCTION}"), ("code", SETUP)], 0
    for match in BLOCK.finditer(body):
        untested, block, code = match.groups()
        if untested:
            continue
        found.append(("markdown", body[start : match.start()]))
        found.append(("code", code or MAGIC + block))
        start = match.end()
    found.append(("markdown", body[start:]))
    return [(kind, text.strip()) for kind, text in found if text.strip()]


def notebook(page: str) -> dict[str, Any]:
    """Return the notebook of a page, in Jupyter's format 4.4."""
    made = []
    for kind, text in cells(page):
        cell: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}
        made.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}


def written() -> str:
    """Return the text of the notebook's file."""
    return json.dumps(notebook(PAGE.read_text(encoding="utf-8")), indent=1, ensure_ascii=False) + "\n"


def run(path: Path) -> None:
    """Run a notebook's cells one after another in one namespace; a cell's exception ends the run."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown" or source.startswith("show("):  # a picture, which only Jupyter shows
            continue
        if source.startswith(MAGIC):
            namespace["commands"]("", source.removeprefix(MAGIC))
        else:
            exec(compile(source, str(path), "exec"), namespace)


def main(argv: list[str] | None = None) -> None:
    """Run the command line that the docstring of this file shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run its cells, as Jupyter does")
    if parser.parse_args(argv).run:
        run(NOTEBOOK)
    else:
        NOTEBOOK.write_text(written(), encoding="utf-8")


if __name__ == "__main__":
    main()
