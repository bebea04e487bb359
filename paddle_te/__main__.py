"""paddle-te COMMAND [argument ...]: all programs of this package under one name. `python -m paddle_te` is the same.

A command's module is imported when the command is called, so that --help does not wait for Paddle and PaddleNLP.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
from dataclasses import dataclass

from paddle_te import __version__
from paddle_te.host import PADDLENLP


@dataclass(frozen=True)
class Command:
    """A program of paddle-te. `module`.main() reads sys.argv and ends with an exit status, None meaning 0.

    `module`.make_parser(*words) is its parser, for `paddle-te completion`.
    words: stand before the user's. needs: packages that are not required by this one, since there are several of them.
    host: which one it needs, where one alone will do.
    """

    module: str
    help: str
    words: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    host: str | None = None

    def missing(self) -> bool:
        """Return whether one of the packages that it needs is not installed."""
        return any(importlib.util.find_spec(package) is None for package in self.needs)


COMMANDS = {
    "pretrain": Command("paddle_te.launch.__main__", "pretrain a model on this machine's devices", ("pretrain",)),
    "finetune": Command("paddle_te.launch.__main__", "fine-tune a model, whole or with LoRA", ("finetune",)),
    "dpo": Command("paddle_te.launch.__main__", "tune a model on pairs of a better and a worse answer", ("dpo",)),
    "kto": Command("paddle_te.launch.__main__", "tune a model on answers that are wanted or not", ("kto",)),
    "evaluate": Command(
        "paddle_te.hosts.paddlenlp.evaluation.evaluate",
        "perplexity, BoolQ, LAMBADA, multiple choice, generation",
        needs=("paddle",),
        host=PADDLENLP,
    ),
    "lm_eval": Command(
        "paddle_te.hosts.paddlenlp.evaluation.harness",
        "EleutherAI's command of that name, with --model paddle_te",
        needs=("paddle",),
        host=PADDLENLP,
    ),
    "convert": Command(
        "paddle_te.weights.command", "convert a checkpoint to another layout, format or parallel degree"
    ),
    "plan": Command("paddle_te.planner.command", "find the layouts in which a model fits and trains fastest"),
    "recipes": Command("paddle_te.recipes.command", "list the run files that come with the package"),
    "prepare-data": Command("paddle_te.data.prepare", "turn texts into the files that pretraining reads"),
    "compare": Command("paddle_te.runs.compare", "compare runs: speed, memory, loss"),
    "inspect": Command("paddle_te.runs.inspect", "say how healthy a run's fp8 is: worst tensors, picture"),
    "verify": Command("paddle_te.runs.verify", "say which checkpoints are complete and undamaged"),
    "selftest": Command("paddle_te.selftest", "check this machine's numbers in a minute", needs=("paddle",)),
    "env": Command("paddle_te.env", "say what this machine can run, and what the rest needs"),
    "completion": Command("paddle_te.completion", "write the script with which bash, zsh or fish completes arguments"),
}
PADDLE = "pip install 'paddle_te[cpu,paddlenlp]', or paddlepaddle-gpu for an NVIDIA GPU"


def usage() -> str:
    """Return the text of --help."""
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: paddle-te COMMAND [argument ...]",
            "",
            "Transformer Engine for PaddlePaddle and PaddleNLP. `paddle-te COMMAND --help` lists its arguments.",
            "",
            *(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()),
            "",
            f"  {'--version':<{width}}  print the version",
        ]
    )


def main(argv: list[str] | None = None) -> int | None:
    """Run a command. Return, or end the process with, its exit status; 2 where there is no such command."""
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name == "--version":
        print(__version__)
        return 0
    if name not in COMMANDS:
        print(f"error: there is no command {name!r}; it may be {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    if command.missing():
        print(f"error: paddle-te {name} needs Paddle: {PADDLE}", file=sys.stderr)
        return 2
    sys.argv = [f"paddle-te {name}", *command.words, *words]
    try:
        status = _run(command)
        sys.stdout.flush()
    except BrokenPipeError:  # of `paddle-te recipes | head`, say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python says so once more at its end
        return 128 + signal.SIGPIPE
    return status


def _run(command: Command) -> int | None:
    if command.needs:
        from paddle_te import scripts  # here, since --help needs none of what it imports

        return scripts.run(command.module, command.host)
    return importlib.import_module(command.module).main()


if __name__ == "__main__":
    sys.exit(main())
