"""The documentation as a site: it builds without a warning, so every link, anchor and documented name is there."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_site_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    front = (tmp_path / "index.html").read_text()
    assert "docs/images/speed.svg" in front and (tmp_path / "docs/images/speed.svg").is_file()
    assert "md-button--primary" in front and "torchtitan</th>" in front
    search = json.loads((tmp_path / "search/search_index.json").read_text())["docs"]
    assert any(page["location"].startswith("docs/reference/status/") for page in search)
    assert (tmp_path / "docs/get-started/tutorial.ipynb").is_file()
    api = (tmp_path / "docs/reference/api/index.html").read_text()
    assert 'id="paddle_te.layers.TransformerLayer"' in api and "Compute a decoder layer" in api
