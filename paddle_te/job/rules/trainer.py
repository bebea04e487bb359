"""Rules for the Trainer's flags: evaluation, schedules, reports, checkpoints."""

from __future__ import annotations

import os

from paddle_te.host import PADDLENLP
from paddle_te.job.record import DPO, FINETUNE, KTO, PRETRAIN, Job
from paddle_te.job.rules.rule import TUNED, Rule, installed


def _needs_evaluation(flag: str, example: str) -> Rule:
    return Rule(
        lambda job: getattr(job, flag) and not job.evaluates,
        f"{{{flag}}} needs {{do_eval:true}}: nothing is evaluated without it",
        "",
        f"--{flag} {example}",
        f"--{flag} {example} --do_eval true",
    )


def _has_no_warm_up(flag: str, example: float) -> Rule:
    return Rule(
        lambda job: job.lr_scheduler_type == "constant" and getattr(job, flag),
        f"{{{flag}}} with {{lr_scheduler_type}}, which has no warm-up",
        "take constant_with_warmup",
        f"{TUNED} --lr_scheduler_type constant --{flag} {example}",
        f"{TUNED} --lr_scheduler_type constant_with_warmup --{flag} {example}",
        host=PADDLENLP,
    )


# What the evaluations of each script measure, and which of two values is the better one
_OF_REWARDS = {"loss": "less", "rewards/accuracies": "greater", "rewards/margins": "greater"}
METRICS = {
    PRETRAIN: {"loss": "less"},
    FINETUNE: {"loss": "less", "accuracy": "greater"},
    DPO: _OF_REWARDS,
    KTO: _OF_REWARDS,
}
# The schedules of each script; with fine-tuning they are PaddleNLP's, which has flags for some
_PADDLENLPS = ("linear", "cosine", "constant", "constant_with_warmup", "polynomial")
SCHEDULES = {PRETRAIN: ("linear", "cosine"), FINETUNE: _PADDLENLPS, DPO: _PADDLENLPS, KTO: _PADDLENLPS}
_OF_A_SCHEDULE = {"num_cycles": ("cosine", 0.5), "lr_end": ("polynomial", 1e-7), "power": ("polynomial", 1.0)}
# Flags of PaddleNLP's that do not do what they say: why, and what to do instead
_WITHOUT_EFFECT = {
    "minimum_eval_times": "PaddleNLP would change --eval_steps by it; give --eval_steps",
    "count_trained_tokens": "PaddleNLP's count fails in the first step; trainer_state.json has consumed_samples",
    "bf16_full_eval": "PaddleNLP reads it nowhere; evaluation has the precision of training",
    "fp16_full_eval": "PaddleNLP reads it nowhere; evaluation has the precision of training",
    "do_export": "PaddleNLP reads it nowhere; te_llama_ckpt_converter.py converts checkpoints",
}
# What --report_to may name, and the package that each one needs
REPORTS = {
    "visualdl": "visualdl",
    "wandb": "wandb",
    "tensorboard": "tensorboardX",
    "swanlab": "swanlab",
    "mlflow": "mlflow",
}
_BEST = "--do_eval true --metric_for_best_model"
_POLYNOMIAL = f"{TUNED} --lr_scheduler_type polynomial"


def _without_effect(flag: str, why: str) -> Rule:
    value = "3" if flag == "minimum_eval_times" else "true"
    return Rule(lambda job: getattr(job, flag), f"{{{flag}}}: {why}", "", f"--{flag} {value}", "--do_eval true")


def _metric(job: Job) -> str:
    return (job.metric_for_best_model or "").removeprefix("eval_")


def _evaluated_by(job: Job) -> str:
    """Return whether evaluations come by steps or epochs."""
    if job.evaluation_strategy != "no":
        return job.evaluation_strategy
    return "steps" if job.script == PRETRAIN or job.eval_steps else "epoch"  # --do_eval true


def _unread(job: Job) -> str:
    """Return a flag of another schedule, and of which; "" without one."""
    for name, (owner, default) in _OF_A_SCHEDULE.items():
        if getattr(job, name) != default and (job.script == PRETRAIN or job.lr_scheduler_type != owner):
            return f"{{{name}}}: only fine-tuning with {{lr_scheduler_type:{owner}}} reads it"
    return ""


def _cannot_report(job: Job) -> str:
    """Return the tracker that a run cannot report to, and why; "" without one."""
    named = job.report_to or ()
    for name in named:
        if name in ("all", "none"):
            if len(named) > 1:
                return f"{{report_to}}: nothing else goes with {name}; leave {name} or the others out"
            continue
        if name not in REPORTS:
            return f"{{report_to:{name}}}: it must be one of {', '.join(REPORTS)}, all, none"
        if not installed(job, REPORTS[name]):
            return f"{{report_to:{name}}}: the package {REPORTS[name]} is not installed; install it, or leave it out"
        if name == "wandb" and os.environ.get("WANDB_DISABLED", "").upper() in ("1", "ON", "YES", "TRUE"):
            return "{report_to:wandb}: WANDB_DISABLED is set; unset it, or leave {report_to:name} out"
        stored = os.environ.get("MLFLOW_TRACKING_URI") or installed(job, "sqlalchemy")
        if name == "mlflow" and not stored:
            return (
                "{report_to:mlflow}: MLFLOW_TRACKING_URI is not set, and mlflow-skinny has no database of its own; "
                "name a server, or a folder as file:///DIR with MLFLOW_ALLOW_FILE_STORE=true"
            )
    return ""


RULES = (
    *(_without_effect(flag, why) for flag, why in _WITHOUT_EFFECT.items()),
    Rule(
        lambda job: job.tunes and job.do_predict,
        "{do_predict}: fine-tuning has no test set",
        "run_eval.py measures a model",
        "finetune --do_predict true",
        "finetune --do_eval true",
        host=PADDLENLP,
    ),
    Rule(_cannot_report, "{found}", "", "--report_to visualdl wandbee", "--report_to none"),
    _needs_evaluation("load_best_model_at_end", "true"),
    _needs_evaluation("early_stopping_patience", "2"),
    Rule(
        lambda job: _metric(job) and _metric(job) not in METRICS[job.script] and " and ".join(METRICS[job.script]),
        "{metric_for_best_model}: evaluation gives {found}",
        "take one of them",
        f"{_BEST} accuracy",
        f"finetune {_BEST} accuracy",
    ),
    Rule(
        lambda job: _metric(job) and not job.evaluates,
        "{metric_for_best_model} needs {do_eval:true}: nothing is evaluated without it",
        "",
        "--metric_for_best_model loss",
        f"{_BEST} eval_loss",
    ),
    Rule(
        lambda job: (
            _metric(job)
            and job.greater_is_better not in (None, METRICS[job.script][_metric(job)] == "greater")
            and f"the {METRICS[job.script][_metric(job)]} {_metric(job)}"
        ),
        "{greater_is_better} with {metric_for_best_model}: {found} is the better one",
        "leave {greater_is_better:name} out",
        f"{_BEST} loss --greater_is_better true",
        f"{_BEST} loss --greater_is_better false",
    ),
    Rule(
        lambda job: job.load_best_model_at_end and job.save_strategy != _evaluated_by(job) and _evaluated_by(job),
        "{load_best_model_at_end} with {save_strategy}: evaluation is by {found}, and each checkpoint is compared by "
        "the evaluation before it",
        "give {save_strategy:name} {found}",
        "finetune --do_eval true --load_best_model_at_end true",
        "finetune --do_eval true --eval_steps 5 --load_best_model_at_end true",
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.lr_scheduler_type not in SCHEDULES[job.script] and ", ".join(SCHEDULES[job.script]),
        "{lr_scheduler_type}: it must be one of {found}",
        "",
        "--lr_scheduler_type polynomial",
        "--lr_scheduler_type cosine",
        host=PADDLENLP,
    ),
    Rule(_unread, "{found}", "leave it out", "finetune --power 2", f"{_POLYNOMIAL} --power 2", PADDLENLP),
    Rule(
        lambda job: job.lr_scheduler_type == "polynomial" and job.lr_end > job.learning_rate,
        "{lr_end} is above {learning_rate}: the rate would rise",
        "",
        f"{_POLYNOMIAL} --lr_end 1",
        f"{_POLYNOMIAL} --lr_end 1e-6",
        host=PADDLENLP,
    ),
    _has_no_warm_up("warmup_steps", 3),
    _has_no_warm_up("warmup_ratio", 0.3),
    Rule(
        lambda job: job.decay_steps and job.decay_steps <= job.warmup_steps,
        "{decay_steps} with {warmup_steps}: steps of the decay count from the first step on, and it would end before "
        "it begins",
        "give more",
        "--warmup_steps 30 --decay_steps 30",
        "--warmup_steps 30 --decay_steps 31",
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.script == PRETRAIN and job.learning_rate < job.min_learning_rate,
        "{learning_rate} is below {min_learning_rate}: the rate would rise where it should fall",
        "give {min_learning_rate:name} of at most a tenth",
        "--learning_rate 1e-6",
        "--learning_rate 1e-6 --min_learning_rate 0",
    ),
    Rule(
        lambda job: job.use_async_save or "async_save" in job.unified_checkpoint_config,
        "{use_async_save} {unified_checkpoint_config}: a checkpoint that is saved so could not be told from an "
        "incomplete one",
        "use {staging_dir:name} /dev/shm",
        "--use_async_save true",
        "--staging_dir /dev/shm",
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.unified_checkpoint and job.stage == 3,
        "{unified_checkpoint} with {sharding}: PaddleNLP has no such checkpoints, and would save others",
        "leave {unified_checkpoint:name} out",
        "x2 --unified_checkpoint true --sharding stage3",
        "x2 --unified_checkpoint true --sharding stage2",
        host=PADDLENLP,
    ),
)
