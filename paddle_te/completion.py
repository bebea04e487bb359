"""Write the script with which a shell completes the arguments of paddle-te: paddle-te completion SHELL.

    paddle-te completion bash > ~/.local/share/bash-completion/completions/paddle-te
    paddle-te completion zsh > ~/.zfunc/_paddle-te         # a folder of $fpath
    paddle-te completion fish > ~/.config/fish/completions/paddle-te.fish

shtab makes it from the commands' own parsers, so make it anew after an update. Without Paddle, commands that need it
are completed by their names alone.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

import shtab

from paddle_te.__main__ import COMMANDS
from paddle_te.runs import screen

SHELLS = ("bash", "zsh", "fish")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paddle-te completion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    return parser


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser of all commands, each with its own parser's arguments."""
    parser = argparse.ArgumentParser(prog="paddle-te")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers()
    for name, command in COMMANDS.items():
        parents = [] if command.missing() else [importlib.import_module(command.module).make_parser(*command.words)]
        commands.add_parser(name, help=command.help, parents=parents, add_help=not parents)
    return parser


def script(shell: str) -> str:
    """Return what completes paddle-te's arguments in one of SHELLS."""
    return shtab.complete(whole_parser(), shell)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = make_parser().parse_args(argv)
    screen.before_imports()  # of the commands' modules, whose warnings nobody asked for here
    print(script(args.shell))
