"""Which flags of a Trainer go together: rules for the launcher, the training scripts and PaddleFormers' recipes alike.

The hosts' Trainers take what is refused here. They then do something else in silence, or fail after hours of work.
Each rule raises ValueError with one line. docs/trainer.md lists them all.
"""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace

from paddle_te.options.option import FLAG, TEXT, TEXTS, Kind, Option, whole
from paddle_te.options.scripts import PADDLENLPS, PRETRAINING

PRETRAIN, FINETUNE = "pretrain", "finetune"
# What the evaluations of each script measure, and which of two values is the better one
METRICS = {PRETRAIN: {"loss": "less"}, FINETUNE: {"loss": "less", "accuracy": "greater"}}
# The schedules of each script; with fine-tuning they are PaddleNLP's, which has flags for some
SCHEDULES = {
    PRETRAIN: ("linear", "cosine"),
    FINETUNE: ("linear", "cosine", "constant", "constant_with_warmup", "polynomial"),
}
_OF_A_SCHEDULE = {"num_cycles": ("cosine", 0.5), "lr_end": ("polynomial", 1e-7), "power": ("polynomial", 1.0)}
# Flags of PaddleNLP's that do not do what they say: why, and what to do instead
REFUSED = {
    "minimum_eval_times": "PaddleNLP would change --eval_steps by it; give --eval_steps",
    "count_trained_tokens": "PaddleNLP's count fails in the first step; trainer_state.json has consumed_samples",
    "bf16_full_eval": "PaddleNLP reads it nowhere; evaluation has the precision of training",
    "fp16_full_eval": "PaddleNLP reads it nowhere; evaluation has the precision of training",
    "do_export": "PaddleNLP reads it nowhere; te_llama_ckpt_converter.py converts checkpoints",
}
REFUSED_IN = {
    PRETRAIN: REFUSED,
    FINETUNE: REFUSED | {"do_predict": "fine-tuning has no test set; run_eval.py measures a model"},
}
# What --report_to may name, and the package that each one needs
REPORTS = {"visualdl": "visualdl", "wandb": "wandb", "tensorboard": "tensorboardX"}
# PaddleNLP's defaults of flags whose values are checked elsewhere
_DEFAULTS = {"learning_rate": 5e-5, "lr_scheduler_type": "linear", "warmup_steps": 0, "warmup_ratio": 0.0}
_DEFAULTS |= {name: default for name, (_, default) in _OF_A_SCHEDULE.items()}
# The flags that the rules read, with PaddleNLP's defaults
READ = {
    **{option.name: option.but(default=_DEFAULTS[option.name]) for option in PADDLENLPS if option.name in _DEFAULTS},
    **{option.name: option for option in PRETRAINING},
    **{name: Option(name, FLAG, False) for name in ("do_eval", "load_best_model_at_end", "early_stopping")},
    **{name: Option(name, FLAG, False) for name in REFUSED_IN[FINETUNE]},
    "minimum_eval_times": Option("minimum_eval_times", whole(0)),
    "evaluation_strategy": Option("evaluation_strategy", TEXT, "no"),
    "save_strategy": Option("save_strategy", TEXT, "steps"),
    "eval_steps": Option("eval_steps", whole(0)),
    "metric_for_best_model": Option("metric_for_best_model", TEXT),
    "greater_is_better": Option("greater_is_better", FLAG),
    "report_to": Option("report_to", Kind(TEXTS.type, TEXTS.words, read=str.split)),
}


def check_trainer(flags, script):
    """Raises ValueError for flags of run_pretrain.py or run_finetune.py that do not go together.

    flags: has an attribute for each name of READ, as a command line says it. script: PRETRAIN or FINETUNE.
    """
    for name, why in REFUSED_IN[script].items():
        if getattr(flags, name):
            raise ValueError(f"--{name} {str(getattr(flags, name)).lower()}: {why}")
    check_reports(flags.report_to)
    _check_metric(flags, METRICS[script])
    _check_best(flags, script)
    _check_schedule(flags, script)
    if script == PRETRAIN:
        check_rates(flags.learning_rate, flags.min_learning_rate)


def check_recipe(recipe):
    """Raises ValueError for lines of a recipe of PaddleFormers, {name: value}, that do not go together."""
    flags = SimpleNamespace(**{name: option.default for name, option in READ.items()} | recipe)
    check_reports(flags.report_to, mark="")
    _check_metric(flags, {"loss": "less"}, mark="")
    for name in {"min_learning_rate", "min_lr"} & recipe.keys():
        check_rates(flags.learning_rate, recipe[name], mark="", least=name)


def check_rates(learning_rate, min_learning_rate, mark="--", least="min_learning_rate"):
    """The rate falls from the greatest to the least one. mark: what the user writes before a name. least: its name."""
    if learning_rate < min_learning_rate:
        raise ValueError(
            f"{mark}learning_rate {learning_rate:g} is below {mark}{least} {min_learning_rate:g}: the rate would rise "
            f"where it should fall; give {mark}{least}, such as {learning_rate / 10:g}"
        )


def check_reports(names, mark="--"):
    """names: a list, a text, or None for the host's default, which it brings with it."""
    for name in names_of(names):
        if name in ("all", "none"):
            continue
        if name not in REPORTS:
            raise ValueError(f"{mark}report_to {name}: it must be one of {', '.join(REPORTS)}, all, none")
        if importlib.util.find_spec(REPORTS[name]) is None:
            raise ValueError(
                f"{mark}report_to {name}: the package {REPORTS[name]} is not installed; install it, or leave "
                f"{mark}report_to out"
            )
        if name == "wandb" and os.environ.get("WANDB_DISABLED", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise ValueError(f"{mark}report_to wandb: WANDB_DISABLED is set; unset it, or leave {mark}report_to out")


def names_of(names):
    """The words of --report_to, which may be a list of them."""
    return names.split() if isinstance(names, str) else names or ()


def _check_metric(flags, metrics, mark="--"):
    metric, evaluates = flags.metric_for_best_model, flags.do_eval or _word(flags.evaluation_strategy) != "no"
    for name in ("load_best_model_at_end", "early_stopping"):
        if getattr(flags, name) and not evaluates:
            raise ValueError(f"{mark}{name} true needs {mark}do_eval true: nothing is evaluated without it")
    if metric is None:
        return
    name, said = metric.removeprefix("eval_"), f"{mark}metric_for_best_model {metric}"
    if name not in metrics:
        raise ValueError(f"{said}: evaluation gives {' and '.join(metrics)}; take one of them")
    if not evaluates:
        raise ValueError(f"{said} needs {mark}do_eval true: nothing is evaluated without it")
    if flags.greater_is_better not in (None, metrics[name] == "greater"):
        raise ValueError(
            f"{mark}greater_is_better {str(flags.greater_is_better).lower()} with {said}: the {metrics[name]} {name} "
            f"is the better one; leave {mark}greater_is_better out"
        )


def _check_best(flags, script):
    """The Trainer compares a checkpoint by the evaluation before it."""
    if not flags.load_best_model_at_end:
        return
    saves, evaluates = _word(flags.save_strategy), _word(flags.evaluation_strategy)
    if evaluates == "no":  # --do_eval true
        evaluates = "steps" if script == PRETRAIN or flags.eval_steps else "epoch"
    if saves != evaluates:
        raise ValueError(
            f"--load_best_model_at_end true with --save_strategy {saves}: evaluation is by {evaluates}, and each "
            f"checkpoint is compared by the evaluation before it; give --save_strategy {evaluates}"
        )


def _check_schedule(flags, script):
    kind, schedules = _word(flags.lr_scheduler_type), SCHEDULES[script]
    if kind not in schedules:
        raise ValueError(f"--lr_scheduler_type {kind}: it must be one of {', '.join(schedules)}")
    for name, (owner, default) in _OF_A_SCHEDULE.items():
        if getattr(flags, name) != default and (script == PRETRAIN or kind != owner):
            raise ValueError(
                f"--{name} {getattr(flags, name):g}: only fine-tuning with --lr_scheduler_type {owner} reads it; leave "
                "it out"
            )
    if kind == "polynomial" and flags.lr_end > flags.learning_rate:
        raise ValueError(
            f"--lr_end {flags.lr_end:g} is above --learning_rate {flags.learning_rate:g}: the rate would rise"
        )
    for name in ("warmup_steps", "warmup_ratio"):
        if kind == "constant" and getattr(flags, name):
            raise ValueError(
                f"--{name} {getattr(flags, name):g} with --lr_scheduler_type constant, which has no warm-up; take "
                "constant_with_warmup"
            )
    if flags.decay_steps and flags.decay_steps <= flags.warmup_steps:
        raise ValueError(
            f"--decay_steps {flags.decay_steps} with --warmup_steps {flags.warmup_steps}: steps of the decay count "
            "from the first step on, and it would end before it begins; give more"
        )


def _word(value):
    """Of an enumeration of PaddleNLP's, what the user writes."""
    return getattr(value, "value", value)
