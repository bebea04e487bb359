"""devices: what the launcher sees of a machine, without Paddle."""

import sys

from paddle_te.launch.devices import has_nvgpu


def test_a_folder_called_paddle_is_no_paddle(tmp_path, monkeypatch):
    """A folder of that name in the working folder, without __init__.py, has no file that Python could tell."""
    (tmp_path / "paddle").mkdir()
    monkeypatch.delitem(sys.modules, "paddle", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not has_nvgpu({})
