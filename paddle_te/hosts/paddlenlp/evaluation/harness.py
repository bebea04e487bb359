"""Tasks of EleutherAI's lm-evaluation-harness (the package lm_eval), asked of our models.

    paddle-te evaluate --model_name_or_path CKPT --lm_eval hellaswag my_task.yaml
    paddle-te lm_eval --model paddle_te --model_args pretrained=CKPT,dtype=bfloat16 --tasks hellaswag

The first is run_eval.py with the harness's tasks among its own. The second is the harness's command, `lm_eval`, with
all its arguments, and with paddle_te among its models (`evaluation.registered`). The command that the harness
installs knows its own models only: it does not look for those of other packages.

The harness is an extra, since it brings many packages along: pip install 'paddle_te[harness]'.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paddle_te.data.chat_template import ChatTemplate
from paddle_te.data.tokenizer import AnyTokenizer
from paddle_te.hosts.paddlenlp.evaluation.tasks import Scorer
from paddle_te.hosts.paddlenlp.training.ending import refusing_wrong_input
from paddle_te.outputs import check_folder
from paddle_te.upstream import deferred_imports


def check_installed() -> None:
    """Raise ValueError, with the command that installs it, where there is no harness."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("EleutherAI's harness is not installed: pip install 'paddle_te[harness]'")


def check_tasks(names: list[str]) -> None:
    """Raise ValueError for a task that there is not: neither a name, or a pattern of names, nor a .yaml file."""
    deferred_imports.undo()  # the harness uses Hugging Face's datasets, and scikit-learn
    from lm_eval.tasks import TaskManager

    known = TaskManager()
    for name in names:
        is_file = name.endswith((".yaml", ".yml"))
        if is_file and not Path(name).is_file():
            raise ValueError(f"--lm_eval {name}: no such file")
        if not is_file and not Path(name).is_dir() and not known.match_tasks([name]):
            raise ValueError(f"--lm_eval {name}: the harness has no such task; paddle-te lm_eval ls tasks lists them")


def evaluate_tasks(
    args: Any, scorer: Scorer, tokenizer: AnyTokenizer, template: ChatTemplate | None
) -> dict[str, dict[str, Any]]:
    """Return {task: metrics} of tasks of the harness, by their names or by paths to their .yaml files.

    args: of run_eval.py. template: of its chats. Raises ValueError for a task that there is not.
    """
    from lm_eval import simple_evaluate

    from paddle_te.hosts.paddlenlp.evaluation.registered import PaddleTE

    names = ("limit", "apply_chat_template", "system_instruction")
    settings = {name: getattr(args, name) for name in names}
    settings["fewshot_as_multiturn"] = args.apply_chat_template
    model = PaddleTE(scorer, tokenizer, template, args.tokenizer_name_or_path)
    try:
        found = simple_evaluate(model, tasks=list(args.lm_eval), log_samples=False, **settings)
    except KeyError as error:
        raise ValueError(f"--lm_eval: {error.args[0]}") from None
    return {task: _metrics(values) for task, values in found["results"].items()}


def _metrics(values: Mapping[str, Any]) -> dict[str, Any]:
    """The harness names a metric "acc,none": by the filter of the answers as well, which mostly is none."""
    return {name.removesuffix(",none"): value for name, value in values.items() if isinstance(value, (int, float))}


def _check_output(arguments: Sequence[str]) -> None:
    """Raise ValueError where the harness could not write its results, which it would only say after the work."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output_path", "-o")
    path = parser.parse_known_args(arguments)[0].output_path
    if path is not None:
        check_folder("--output_path", Path(path).parent if path.endswith(".json") else path)


def make_parser() -> argparse.ArgumentParser:
    """Return a parser for `paddle-te completion`, which completes none of the harness's own arguments."""
    return argparse.ArgumentParser(add_help=False)


def main() -> None:
    """Run the harness's own command, which knows our models. End the process with 2 for wrong arguments or data."""
    with refusing_wrong_input():
        check_installed()
        _check_output(sys.argv[1:])
        deferred_imports.undo()
        # of ranks that share a model, the harness has only the one with this number show results
        os.environ.setdefault("LOCAL_RANK", os.environ.get("PADDLE_TRAINER_ID", "0"))
        from lm_eval.__main__ import cli_evaluate

        from paddle_te.hosts.paddlenlp.evaluation import registered  # noqa: F401

        cli_evaluate()
