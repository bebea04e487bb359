"""Completion of paddle-te's arguments, as a shell asks for it."""

import subprocess

import pytest

from paddle_te import completion
from paddle_te.__main__ import COMMANDS

# Calls a completion function as bash does: with the command, the word to complete and the word before it.
ASK = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
$(complete -p paddle-te | grep -o '_[a-z_]*') paddle-te "${@: -1}" "${@: -2:1}"
echo "${COMPREPLY[@]}"
"""


@pytest.fixture
def bash(tmp_path, capsys, monkeypatch):
    """What the command writes for bash."""
    monkeypatch.setattr(completion.screen, "before_imports", lambda: None)  # it is for a process of its own
    completion.main(["bash"])
    path = tmp_path / "paddle-te"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.parametrize(
    "words, answers",
    [
        ([""], {*COMMANDS}),
        (["pretrain", "--backend", ""], {"none", "pd", "te"}),
        (["pretrain", "--max_"], {"--max_seqlen"}),
        (["finetune", "--meth"], {"--method"}),
        (["evaluate", "--perp"], {"--perplexity"}),
        (["convert", "--mode", "hf2"], {"hf2te", "hf2pd"}),
        (["completion", ""], {*completion.SHELLS}),
    ],
)
def test_bash_completes(bash, words, answers):
    done = subprocess.run(["bash", "-c", ASK, "ask", bash, "paddle-te", *words], capture_output=True, text=True)
    assert done.returncode == 0 and set(done.stdout.split()) == answers, done.stderr


@pytest.mark.parametrize("shell, begins", [("zsh", "#compdef paddle-te"), ("fish", "# AUTOMATICALLY GENERATED")])
def test_other_shells_know_every_command_and_argument(shell, begins):
    text = completion.script(shell)
    assert text.startswith(begins)
    for word in [*COMMANDS, "max_seqlen", "input_ckpt_path", "perplexity", "json_key", "level", "report"]:
        assert word in text, word


def test_without_paddle_a_commands_name_remains(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = completion.script("bash")
    assert "evaluate" in text and "--perplexity" not in text and "--max_seqlen" in text
