"""What of a Trainer's flags does not go together, as the launcher reads them from a command line."""

import importlib.util
from types import SimpleNamespace

import pytest

from paddle_te.options import together
from paddle_te.options.together import FINETUNE, PRETRAIN, READ, check_recipe, check_trainer
from paddle_te.planner.flags import said


def check(script, words):
    given, _ = said(words.split(), READ, READ)
    check_trainer(SimpleNamespace(**{name: option.default for name, option in READ.items()} | given), script)


def pretrains(words):
    check(PRETRAIN, words)


def fine_tunes(words):
    check(FINETUNE, words)


BEST = "--do_eval true --metric_for_best_model"


@pytest.mark.parametrize(
    "function, words, message",
    [
        (
            pretrains,
            "--learning_rate 1e-6",
            "--learning_rate 1e-06 is below --min_learning_rate 1e-05: .*such as 1e-07",
        ),
        (
            pretrains,
            "--learning_rate 1e-3 --min_learning_rate 2e-3",
            "--learning_rate 0.001 is below --min_lea.* 0.002",
        ),
        (pretrains, "--lr_scheduler_type constant", "--lr_scheduler_type constant: it must be one of linear, cosine"),
        (pretrains, "--num_cycles 2", "--num_cycles 2: only fine-tuning with --lr_scheduler_type cosine reads it"),
        (pretrains, "--warmup_steps 5 --decay_steps 5", "--decay_steps 5 with --warmup_steps 5: .* before it begins"),
        (pretrains, f"{BEST} accuracy", "--metric_for_best_model accuracy: evaluation gives loss; take"),
        (fine_tunes, f"{BEST} bleu", "--metric_for_best_model bleu: evaluation gives loss and accuracy; take"),
        (fine_tunes, "--metric_for_best_model accuracy", "accuracy needs --do_eval true: nothing is evaluated"),
        (fine_tunes, f"{BEST} loss --greater_is_better", "--greater_is_better true with .* loss: the less loss is the"),
        (fine_tunes, f"{BEST} eval_accuracy --greater_is_better false", "false with .* eval_accuracy: the greater acc"),
        (
            fine_tunes,
            "--lr_scheduler_type constant --warmup_steps 3",
            "--warmup_steps 3 with .* constant, which has no",
        ),
        (
            fine_tunes,
            "--lr_scheduler_type constant --warmup_ratio .3",
            "--warmup_ratio 0.3 with .* constant, which has",
        ),
        (fine_tunes, "--lr_scheduler_type polynomial --lr_end 1", "--lr_end 1 is above --learning_rate 5e-05: the rat"),
        (fine_tunes, "--power 2", "--power 2: only fine-tuning with --lr_scheduler_type polynomial reads it; leave"),
        (pretrains, "--minimum_eval_times 3", "--minimum_eval_times 3: PaddleNLP would change --eval_steps by it"),
        (pretrains, "--count_trained_tokens", "--count_trained_tokens true: PaddleNLP's count fails in the first step"),
        (fine_tunes, "--bf16_full_eval true", "--bf16_full_eval true: PaddleNLP reads it nowhere; evaluation has"),
        (fine_tunes, "--do_predict", "--do_predict true: fine-tuning has no test set; run_eval.py measures"),
        (fine_tunes, "--do_eval --load_best_model_at_end", "--save_strategy steps: evaluation is by epoch, and"),
        (pretrains, "--do_eval --load_best_model_at_end --save_strategy epoch", "--save_strategy epoch: .* by steps"),
        (pretrains, "--load_best_model_at_end", "--load_best_model_at_end true needs --do_eval true: nothing is eval"),
        (pretrains, "--early_stopping", "--early_stopping true needs --do_eval true: nothing is evaluated without it"),
        (fine_tunes, "--report_to visualdl wandbee", "--report_to wandbee: it must be one of visualdl, wandb, tensor"),
    ],
)
def test_refused(function, words, message):
    with pytest.raises(ValueError, match=message) as error:
        function(words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "function, words",
    [
        (pretrains, ""),
        (fine_tunes, ""),
        (pretrains, "--learning_rate 1e-5"),
        (pretrains, "--learning_rate 1e-6 --min_learning_rate 0"),
        (pretrains, "--warmup_steps 30 --warmup_ratio 0.01 --decay_steps 31"),  # PaddleNLP's own file has the first two
        (fine_tunes, "--learning_rate 1e-6"),
        (fine_tunes, "--do_eval --eval_steps 5 --load_best_model_at_end"),
        (pretrains, "--do_eval --do_predict --load_best_model_at_end"),
        (fine_tunes, "--evaluation_strategy steps --metric_for_best_model accuracy --load_best_model_at_end"),
        (fine_tunes, f"{BEST} eval_loss --greater_is_better false"),
        (fine_tunes, "--lr_scheduler_type polynomial --power 2 --lr_end 1e-6"),
        (fine_tunes, "--report_to none"),
    ],
)
def test_accepted(function, words):
    function(words)


def test_reports_whose_package_is_missing(monkeypatch):
    there = {"wandb"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    monkeypatch.delenv("WANDB_DISABLED", raising=False)
    together.check_reports(["wandb"])
    with pytest.raises(
        ValueError, match="^--report_to tensorboard: the package tensorboardX is not installed; install"
    ):
        together.check_reports(["wandb", "tensorboard"])
    monkeypatch.setenv("WANDB_DISABLED", "true")
    with pytest.raises(ValueError, match="^report_to wandb: WANDB_DISABLED is set; unset it"):
        together.check_reports("wandb", mark="")


@pytest.mark.parametrize(
    "recipe, message",
    [
        (
            dict(learning_rate=1e-6, min_learning_rate=1e-5),
            "^learning_rate 1e-06 is below min_learning_rate 1e-05: the",
        ),
        (dict(min_lr=1e-4), "^learning_rate 5e-05 is below min_lr 0.0001: the rate would rise"),
        (dict(report_to="wandbee"), "^report_to wandbee: it must be one of"),
        (
            dict(do_eval=True, metric_for_best_model="accuracy"),
            "^metric_for_best_model accuracy: evaluation gives loss;",
        ),
    ],
)
def test_recipes(recipe, message):
    check_recipe(dict(learning_rate=1e-3, min_learning_rate=1e-5, report_to=["none"]))
    with pytest.raises(ValueError, match=message):
        check_recipe(recipe)
