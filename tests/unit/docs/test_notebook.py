"""docs/get-started/tutorial.ipynb is made of tutorial.md, and its cells share what they export."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tools import notebook

ROOT = Path(__file__).parents[3]


def test_it_is_made_of_the_page():
    assert notebook.NOTEBOOK.read_text(encoding="utf-8") == notebook.written(), "python tools/notebook.py writes it"


def test_every_block_is_a_cell_but_those_not_tested():
    untested = "<!-- not tested here: why -->\n```bash\nrm\n```\nend\n"
    page = "# A\n\none\n\n```bash\nls\n```\n\n<!-- notebook: show('x') -->\n" + untested
    title, setup, *rest = notebook.cells(page)
    assert title[1].startswith("# A\n") and setup == ("code", notebook.SETUP)
    assert rest == [
        ("markdown", "one"),
        ("code", "%%commands\nls"),
        ("code", "show('x')"),
        ("markdown", untested.strip()),
    ]


def test_cells_share_what_they_export(tmp_path):
    blocks = ['export A_B="1  2"; pwd', 'echo "$A_B,$STEPS"', "false | true; echo on"]
    page = "# A\n" + "".join(f"```bash\n{block}\n```\n" for block in blocks)
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(notebook.notebook(page)))
    program = f"from pathlib import Path; from tools import notebook; notebook.run(Path({str(path)!r}))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("STEPS", None)
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, cwd=ROOT / "docs/images", env=environment, capture_output=True, text=True)
    assert found.stdout.splitlines() == [str(ROOT), "1  2,20"]
    assert found.returncode and "exit status 1" in found.stderr
