"""The names of the scripts' flags."""

import importlib.util
from types import SimpleNamespace

import pytest

from paddle_te.hosts.paddlenlp.training.arguments import ArgumentParser
from paddle_te.launch import dpo, finetune, kto, names, pretrain
from paddle_te.launch.arguments import parse
from paddle_te.launch.errors import LaunchError
from tests.unit.job.test_rules import PARSED


@pytest.mark.parametrize("job", [pretrain, finetune, dpo, kto], ids=names.name_of)
def test_they_are_those_of_the_scripts_own_parser(job):
    """Which has an opposite, no_NAME, for flags that are on by themselves."""
    parser = ArgumentParser(PARSED[names.name_of(job)])
    taken = {word.removeprefix("--") for word in parser._option_string_actions} - {"-h", "help"}
    opposites = {name for name in taken if name.removeprefix("no_") in taken - {name}}
    assert names.script_flags(job) == taken - opposites


@pytest.mark.parametrize("source", [None, "class Other: ..."])
def test_a_paddlenlp_without_them_is_none(monkeypatch, tmp_path, source):
    """Then the script alone refuses what it does not know."""
    (tmp_path / "trainer").mkdir()
    if source:
        (tmp_path / "trainer/training_args.py").write_text(source)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert names.paddlenlps_flags.__wrapped__() == frozenset()


@pytest.mark.parametrize(
    "name, meant",
    [("MAX_STEP", "MAX_STEPS"), ("MOCK_DATAS", "MOCK_DATA"), ("SAVE_STEPZ", "SAVE_STEPS"), ("MXA_STEPS", "MAX_STEPS")],
)
def test_a_slip_in_a_variables_name(name, meant):
    told = names.misspelt(pretrain, ["PATH", name, meant])
    assert told == f"{name}: there is no such variable; did you mean {meant}? If it is not for this job, unset it"
    with pytest.raises(LaunchError, match=told.partition("?")[0]):
        parse(pretrain, [], {name: "2"})


def test_the_environment_belongs_to_others_too():
    """Other jobs' variables, words that are near by chance, and what is not quite one of ours."""
    others = ["SAVE_STEPS", "LEARNING_RATE", "GPUS", "HOSTS", "NODES", "MASTER_ADDR", "XDG_DATA_DIRS", "OUTPUTDIR"]
    assert names.misspelt(finetune, others) == ""
    assert names.misspelt(pretrain, [*others, "MAX_STEPPERS"]) == ""
