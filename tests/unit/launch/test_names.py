"""The names of the scripts' flags."""

import pytest

from paddle_te.hosts.paddlenlp.training.arguments import ArgumentParser
from paddle_te.launch import dpo, finetune, kto, names, pretrain
from tests.unit.job.test_rules import PARSED


@pytest.mark.parametrize("job", [pretrain, finetune, dpo, kto], ids=names.name_of)
def test_they_are_those_of_the_scripts_own_parser(job):
    """Which has an opposite, no_NAME, for flags that are on by themselves."""
    parser = ArgumentParser(PARSED[names.name_of(job)])
    taken = {word.removeprefix("--") for word in parser._option_string_actions} - {"-h", "help"}
    opposites = {name for name in taken if name.removeprefix("no_") in taken - {name}}
    assert names.script_flags(job) == taken - opposites
