"""The names of a job's arguments and of its script's flags, and which of them a wrong name may mean.

PaddleNLP's flags are read from its source: importing it takes seconds.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterable
from functools import cache
from os.path import commonprefix
from pathlib import Path

from paddle_te.host import PADDLENLP
from paddle_te.job import DPO, FINETUNE, KTO, PRETRAIN, words
from paddle_te.launch import JobModule
from paddle_te.options import Option, launcher
from paddle_te.options.launcher import COMBINED, VARIABLES

LIKE = 0.75  # difflib's ratio from which a name is offered for another
LONG = 8  # letters of a variable's name from which one with another letter is taken for a slip


def name_of(job: JobModule) -> str:
    """Return pretrain, finetune, dpo or kto."""
    return job.__name__.rpartition(".")[2]


def script_of(job: JobModule) -> str:
    """Return the name of the file that each process runs, with PaddleNLP."""
    return f"run_{name_of(job)}.py"


def arguments_of(job: JobModule) -> tuple[Option, ...]:
    """Return a job's arguments, and the variables of all jobs and its own."""
    return *job.ARGUMENTS, *VARIABLES, *job.VARIABLES


def script_flags(job: JobModule) -> set[str]:
    """Return the names of the flags of a job's script; only ours where PaddleNLP is not installed."""
    return {*words.options(name_of(job))} | paddlenlps_flags()


def remedy(job: JobModule, name: str) -> str:
    """Return what to write in place of a name that is wrong where it stands; "" where no name is like it."""
    asked = name.replace("-", "_")
    if here := _argument(job, asked):
        return f"paddle-te {name_of(job)} has --{here}"
    flags = script_flags(job)
    if asked in flags:
        return f"give it in EXTRA_ARGS, as it is a flag of {script_of(job)}"
    if owner := next((owner for owner, names in _owned().items() if asked in names), ""):
        return f"it belongs to paddle-te {owner}"
    spelled = {each.lower(): each for each in (*sorted(flags), *(option.name for option in arguments_of(job)))}
    for each in difflib.get_close_matches(asked.lower(), spelled, 1, LIKE):
        here = _argument(job, spelled[each])
        return f"did you mean paddle-te {name_of(job)}'s --{here}?" if here else f"did you mean --{spelled[each]}?"
    return ""


def misspelt(job: JobModule, environ: Iterable[str]) -> str:
    """Return what is wrong with a name in the environment that may be meant for one of the job's variables, or "".

    The environment belongs to other programs, too. So a name counts only if it has several words, and one letter more,
    less or other than the variable.
    """
    known = {option.name for option in (*VARIABLES, *job.VARIABLES)}
    for name in sorted({*environ} - known):
        meant = next((each for each in known if _one_letter_apart(name, each)), "")
        if meant and len(name) >= LONG and "_" in name:
            return f"{name}: there is no such variable; did you mean {meant}? If it is not for this job, unset it"
    return ""


def _one_letter_apart(a: str, b: str) -> bool:
    """Return whether a word is another one with a letter more, less or other, or with two that changed places."""
    same = len(commonprefix([a, b]))
    a, b = a[same:], b[same:]
    return a[1:] in (b, b[1:]) or a == b[1:] or (a[:2] == b[1::-1] and a[2:] == b[2:])


@cache
def _owned() -> dict[str, set[str]]:
    """Return {job: the names of its arguments and of its script's flags}."""
    arguments = {
        PRETRAIN: (*launcher.PRETRAIN, *launcher.PRETRAIN_VARIABLES),
        FINETUNE: (*launcher.FINETUNE, *launcher.FINETUNE_VARIABLES),
        DPO: launcher.PREFERENCE,
        KTO: launcher.PREFERENCE,
    }
    return {job: {option.name for option in own} | {*words.options(job)} for job, own in arguments.items()}


def _argument(job: JobModule, name: str) -> str:
    """Return the job's argument for a script's flag, or of a name in other letters; "" where it has none."""
    names = [each.name for each in arguments_of(job) if name == each.flag or name.lower() == each.name.lower()]
    return next(iter(names + [argument for argument, flags in COMBINED.items() if name in flags]), "")


@cache
def paddlenlps_flags() -> frozenset[str]:
    """Return the names of TrainingArguments' flags, as PaddleNLP's `llmmetaclass` completes them.

    There are none where PaddleNLP is not installed, or has its source elsewhere.
    """
    spec = importlib.util.find_spec(PADDLENLP)
    if spec is None or spec.origin is None:
        return frozenset()
    folder = Path(spec.origin).parent
    try:
        arguments = _class(folder / "trainer/training_args.py", "TrainingArguments")
        others = _class(folder / "transformers/configuration_utils.py", "LlmMetaConfig")
    except (OSError, StopIteration):
        return frozenset()
    fields = {ast.unparse(node.target) for node in arguments if isinstance(node, ast.AnnAssign)}
    methods = {node.name for node in arguments if isinstance(node, ast.FunctionDef)}  # which llmmetaclass leaves alone
    # lists of (name, type, default, comment)
    tables = [node.value.elts for node in others if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)]
    names = {ast.literal_eval(row.elts[0]) for table in tables for row in table if isinstance(row, ast.Tuple)}
    return frozenset(fields | names - methods)


def _class(path: Path, name: str) -> list[ast.stmt]:
    """Return the body of a class in a file of Python."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
