"""The command paddle-te: what it offers, quickly, and how it refuses."""

import os
import resource
import subprocess
import sys

import pytest

from paddle_te import __main__ as command
from paddle_te import __version__

RUN = [sys.executable, "-m", "paddle_te"]


def test_help_names_every_command_and_imports_nothing_that_takes_seconds():
    start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    code = "import sys; from paddle_te.__main__ import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start < 0.5
    for name in ["pretrain", "finetune", "evaluate", "convert", "prepare-data", "env", "compare", "verify"]:
        assert f"\n  {name} " in done.stdout
    assert not {"paddle", "paddlenlp", "numpy", "argparse"} & set(done.stderr.split())


@pytest.mark.parametrize("name", ["pretrain", "finetune", "convert", "prepare-data", "compare", "verify", "env"])
def test_each_command_has_a_help_under_its_name(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["paddle-te"])
    with pytest.raises(SystemExit) as end:
        command.main([name, "--help"])
    assert end.value.code == 0 and f"usage: paddle-te {name} " in capsys.readouterr().out


def test_wrong_commands_are_refused_in_one_line(capsys, monkeypatch):
    assert command.main(["pretain"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: there is no command 'pretain'; it may be {', '.join(command.COMMANDS)}"
    ]
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert command.main(["evaluate", "--help"]) == 2
    assert capsys.readouterr().err == f"error: paddle-te evaluate needs Paddle: {command.PADDLE}\n"


def test_version_and_no_argument(capsys):
    assert command.main(["--version"]) == 0 and capsys.readouterr().out == f"{__version__}\n"
    assert command.main([]) == 0 and capsys.readouterr().out == f"{command.usage()}\n"


def test_a_commands_status_is_the_commands(tmp_path):
    """Through the process: `verify` of a folder that is not there."""
    done = subprocess.run([*RUN, "verify", tmp_path / "none"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["evaluate", "selftest"])
def test_what_paddle_reports_while_it_is_imported_stays_off_the_screen(name, nvgpu_host):
    """Its C++ code names each plug-in that it loads, and its Python code warns of what is not installed."""
    done = subprocess.run([*RUN, name, "--help"], capture_output=True, text=True, env=os.environ | nvgpu_host)
    assert done.returncode == 0 and f"paddle-te {name}" in done.stdout and done.stderr == ""


def test_a_reader_that_ends_early_is_no_error():
    """Of `paddle-te recipes | head`: the shell's status for it, and not a word."""
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-m", "paddle_te", "recipes"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")
