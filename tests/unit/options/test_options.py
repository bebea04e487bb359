"""Options: what may stand in them, and the fields, checks and configurations made from them."""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from paddlenlp.trainer import PdArgumentParser, TrainingArguments
from paddlenlp.transformers.configuration_utils import LlmMetaConfig

from paddle_te.hosts.paddlenlp.evaluation.evaluate import EvalArguments
from paddle_te.hosts.paddlenlp.training.arguments import ModelArguments, PreTrainingArguments
from paddle_te.hosts.paddlenlp.training.datasets import DataArguments
from paddle_te.hosts.paddlenlp.training.finetune_datasets import FinetuneDataArguments
from paddle_te.hosts.paddlenlp.training.finetune_trainer import FinetuneModelArguments, FinetuningArguments
from paddle_te.models.lora import TARGETS
from paddle_te.options import (
    BOUNDS,
    LAYER_OPTIONS,
    LayerOptions,
    check_values,
    configure,
    evaluation,
    launcher,
    layers,
    lora,
    pages,
    pretraining,
    training,
    tuning,
    with_options,
)
from paddle_te.options.option import FLAG, POSITIVE, REQUIRED, TEXT, TEXTS, Option, choice, number, whole

SCRIPTS = (layers, training, pretraining, tuning, evaluation)
CLASSES = (
    PreTrainingArguments,
    FinetuningArguments,
    ModelArguments,
    DataArguments,
    FinetuneModelArguments,
    FinetuneDataArguments,
    EvalArguments,
)
KINDS = {
    "whole": (whole(1), ["1", "007", "12"], ["0", "-1", "1.0", "1e1", "", " 1", "one", "9" * 5000]),
    "bounded": (whole(0, 18), ["0", "18"], ["-1", "19"]),
    "positive": (POSITIVE, ["1e-5", "3"], ["0", "-1", "nan", "inf", "-inf", "x", ""]),
    "choice": (choice("a", "b"), ["a", "b"], ["A", "", "a,b"]),
    "switch": (launcher.SWITCH, ["1", "0", "true", "false"], ["yes", "2", "True", ""]),
    "boolean": (launcher.BOOLEAN, ["true", "false"], ["1", "True"]),
    "step": (launcher.STEP, ["none", "auto", "3", "0"], ["latest", "-1", "1.0"]),
    "devices": (launcher.DEVICE_LIST, ["0", "0,3"], ["", "a", "0,0", "0,"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_text_may_be(kind):
    kind, good, bad = KINDS[kind]
    for text in good:
        assert kind.accepts(kind.parse(text))
    for text in bad:
        with pytest.raises(ValueError) as error:
            kind.parse(text)
        assert str(error.value) == f"{text!r} must be {kind.words}"


def test_what_a_text_stands_for():
    assert [launcher.SWITCH.parse(text) for text in ("1", "0", "true", "false")] == [True, False, True, False]
    assert launcher.STEP.parse("12") == 12 and launcher.STEP.parse("auto") == "auto"
    assert launcher.DEVICE_LIST.parse("0,3") == ["0", "3"] and whole(1).parse("12") == 12


@dataclass
@with_options(
    Option("path", TEXT, REQUIRED, "A path."),
    Option("rate", number("a number below 2", lambda x: x < 2), 0.5, "A rate."),
    Option("limit", whole(1), None, "A limit."),
    Option("words", TEXTS, None, "Words."),
    Option("on", FLAG, False, "On.", config=True),
    Option("depth", whole(0), 3, "Depth.", config=True, needs={"on": True}),
)
class Arguments:
    def __post_init__(self):
        check_values(self, {"other": whole(1)})


def parse(*words):
    return PdArgumentParser((Arguments,)).parse_args_into_dataclasses(list(words), look_for_args_file=False)[0]


def test_fields_are_read_by_paddlenlps_parser():
    defaults = dict(path="p", rate=0.5, limit=None, words=None, on=False, depth=3)
    assert dataclasses.asdict(parse("--path", "p")) == defaults
    read = parse("--path", "p", "--words", "a", "b", "--limit", "2", "--on", "--depth", "4")
    assert (read.words, read.limit, read.on, read.depth) == (["a", "b"], 2, True, 4)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(rate=2.0), "--rate 2.0: it must be a number below 2"),
        (dict(rate=float("nan")), "--rate nan: it must be a number below 2"),
        (dict(limit=0), "--limit 0: it must be a whole number of at least 1"),
        (dict(depth=4), "--depth 4 needs --on true; alone it means nothing"),
    ],
)
def test_wrong_values_are_refused_by_name(settings, message):
    with pytest.raises(ValueError) as error:
        Arguments("p", **settings)
    assert str(error.value) == message


def test_a_script_without_the_needed_flag_does_what_it_asks_for():
    depth = Arguments.__options__["depth"]
    check_values(SimpleNamespace(depth=4), options={"depth": depth})
    with pytest.raises(ValueError, match="--depth 4 needs --on true"):
        check_values(SimpleNamespace(depth=4, on=False), options={"depth": depth})


def test_bounds_of_others_flags():
    record = SimpleNamespace(__options__={}, other=0)
    with pytest.raises(ValueError, match="--other 0: it must be"):
        check_values(record, {"other": whole(1)})
    fields = {field.name: field.default for field in dataclasses.fields(PreTrainingArguments)}
    assert not BOUNDS.keys() - fields.keys(), "no flags of PaddleNLP's"
    for option in training.PADDLENLPS:
        theirs = getattr(fields[option.name], "value", fields[option.name])
        assert theirs == option.default and (theirs is None or option.kind.accepts(theirs)), option.name


def test_defaults_are_accepted():
    options = [
        option for module in SCRIPTS for table in vars(module).values() if isinstance(table, tuple) for option in table
    ]
    options = [option for option in options if isinstance(option, Option)]
    assert len(options) > 60
    for option in options:
        assert option.default in (None, REQUIRED) or option.kind.accepts(option.default), option.name
        assert option.told or option.source
    for option in (*launcher.PRETRAIN, *launcher.FINETUNE, *launcher.VARIABLES, *launcher.PRETRAIN_VARIABLES):
        if option.default_text():
            option.kind.parse(option.default_text())


def test_a_models_configuration():
    config, arguments = SimpleNamespace(), Arguments("p", on=True, depth=1)
    configure(config, arguments)
    assert vars(config) == dict(on=True, depth=1)
    nothing_said = LayerOptions.of(SimpleNamespace())
    defaults = {name: option.default for name, option in LAYER_OPTIONS.items()}
    assert dataclasses.asdict(nothing_said) == {**defaults, "fuse_wgrad_accumulation": False}
    assert LayerOptions.of(SimpleNamespace(use_fp8=True, fp8_recipe="current")).fp8_recipe == "current"


@pytest.mark.parametrize("cls", CLASSES)
def test_no_flag_is_defined_elsewhere(cls):
    theirs = {field.name for field in dataclasses.fields(TrainingArguments)}
    theirs |= {name for name, *_ in LlmMetaConfig._get_all_meta()}
    ours = {field.name for field in dataclasses.fields(cls)} - theirs
    assert not ours - cls.__options__.keys(), "options of ours stand in paddle_te.options"


def test_lora_has_all_targets():
    assert tuple(TARGETS) == lora.TARGETS
    asked = {name: flags.get("lora_targets") for name, flags in launcher.METHODS.items()}
    assert asked == {"full": None, "lora": "all", "lora-attention": "attention", "lora-mlp": "mlp"}


def settings():
    """{setting: tables that have it}: flags and arguments of one meaning are one, and PaddleNLP's own are none."""
    found = {}
    combined = {"precision", "recompute", "sharding_stage", "method"}  # words for flags that are there anyway
    for name, table in pages.TABLES.items():
        for option in (each for each in table if not each.source and each.name not in combined):
            flag = option.flag or option.name
            found.setdefault(launcher.NAMES.get(flag, flag), set()).add(name)
    return found


def test_settings_stay_few():
    """A new one should take the place of another: raise this number only with a proof of value (CONTRIBUTING.md)."""
    assert len(settings()) <= 148, sorted(settings())


def test_a_setting_has_one_definition():
    """A launcher's argument for a script's flag takes what that flag takes, where it is passed on as it is."""
    theirs = {
        option.name: option for option in (*training.PADDLENLPS, *pretraining.PRETRAIN_DATA, *tuning.FINETUNE_DATA)
    }
    for option in (*launcher.PRETRAIN, *launcher.FINETUNE, *launcher.VARIABLES, *launcher.PRETRAIN_VARIABLES):
        if option.passed and type(option.default) is int:
            assert theirs[option.flag].kind.accepts(option.default), option.name
