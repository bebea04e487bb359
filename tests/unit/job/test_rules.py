"""Refusals, made from the table of rules: each rule's example is refused by the rule itself, and its near one is not,
by the record, the training scripts' parser and the launcher."""

import importlib.util
import re
import shlex
from dataclasses import replace

import pytest

from paddle_te import configs
from paddle_te.configs.spec import spec_of
from paddle_te.hosts.paddlenlp.training.arguments import ArgumentParser, ModelArguments, PreTrainingArguments
from paddle_te.hosts.paddlenlp.training.datasets import DataArguments
from paddle_te.hosts.paddlenlp.training.finetune_datasets import FinetuneDataArguments
from paddle_te.hosts.paddlenlp.training.finetune_trainer import FinetuneModelArguments, FinetuningArguments
from paddle_te.hosts.paddlenlp.training.preference import KTOTuning, PreferenceTuning
from paddle_te.job import DPO, FINETUNE, KTO, LAUNCHER, PRETRAIN, RULES, SCRIPT, Job, JobError, check, fault
from paddle_te.job.paddleformers import RECIPE, job_of_recipe
from paddle_te.job.words import example
from paddle_te.launch import dpo, finetune, kto, pretrain
from paddle_te.launch.arguments import parse
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.flags import check_asked
from paddle_te.options import tuning
from paddle_te.options.layers import LAYERS
from paddle_te.options.option import word
from paddle_te.options.training import TRAINING

EXAMPLES = [rule for rule in RULES if rule.breaks]
PARSED = {
    PRETRAIN: (ModelArguments, DataArguments, PreTrainingArguments),
    FINETUNE: (FinetuneModelArguments, FinetuneDataArguments, FinetuningArguments),
    DPO: PreferenceTuning.CLASSES,
    KTO: KTOTuning.CLASSES,
}


def named(rule):
    return re.sub(r"[^a-z_0-9]+", "-", rule.says.lower())[:60]


def words_of(text, **others):
    """The flags of an example, with others before them."""
    flags = text[text.index("--") :].split() if "--" in text else []
    return [word for name, value in others.items() for word in (f"--{name}", value)] + flags


@pytest.mark.parametrize("rule", EXAMPLES, ids=named)
def test_each_rule_has_an_example_and_one_that_is_near(rule):
    job = example(rule.breaks)
    assert fault(job) is rule
    for door in (SCRIPT, LAUNCHER, RECIPE):
        with pytest.raises(JobError) as error:
            check(job, door)
        assert "\n" not in str(error.value) and "{" not in str(error.value)
    assert fault(example(rule.near)) is None


@pytest.mark.parametrize("rule", [rule for rule in EXAMPLES if rule.host != "paddleformers"], ids=named)
def test_the_scripts_refuse_the_same(rule, monkeypatch):
    for text in (rule.breaks, rule.near):
        job = example(text)
        monkeypatch.setenv("PADDLE_TRAINERS_NUM", str(job.world))
        parser = ArgumentParser(PARSED[job.script])
        words = words_of(text, model_name_or_path="tiny-llama-demo", output_dir="unused")
        if text is rule.near:
            parser.parse_known_args(words)
            continue
        with pytest.raises(JobError) as error:
            parser.parse_known_args(words)
        assert str(error.value) == rule.told(job, SCRIPT, rule.against(job))


# The launcher's arguments that say nothing of their own beside an example
PLAIN = dict(TP=1, FSDP=1, GA=1, SP="false", backend="none", precision="fp32", batch_size_per_device=8)
JOBS = {
    PRETRAIN: (pretrain, PLAIN | dict(PP=1, VP=1, OVERLAP=0, max_seqlen=1024, LEARNING_RATE=5e-5)),
    FINETUNE: (finetune, PLAIN | dict(method="full")),
    DPO: (dpo, PLAIN | dict(method="full")),
    KTO: (kto, PLAIN | dict(method="full")),
}


def launched(text):
    """What the launcher says of an example, whose flags all stand in EXTRA_ARGS; None where it starts it."""
    asked = example(text)
    job, arguments = JOBS[asked.script]
    return said_of(job, arguments | dict(EXTRA_ARGS=shlex.join(words_of(text))), asked)


def said_of(job, arguments, asked):
    words = [
        f"--{name}={value}" for name, value in (arguments | dict(HOST=asked.host, model_name="tiny-llama-demo")).items()
    ]
    config = configs.read(asked.model_name_or_path or "tiny-llama-demo")
    try:
        check_asked(job, parse(job, words, {}), asked.place, asked.world, config)
    except LaunchError as error:
        return str(error)


LAUNCHED = [
    rule for rule in EXAMPLES if example(rule.breaks).do_train or "do_train:name" not in rule.says + rule.remedy
]


@pytest.mark.parametrize("rule", LAUNCHED, ids=named)
def test_the_launcher_refuses_the_same(rule):
    said = launched(rule.breaks)
    for part in re.split(r"\{.*?\}", rule.says):
        assert part in said
    assert said.startswith("EXTRA_ARGS: ") and "\n" not in said
    assert launched(rule.near) is None


@pytest.mark.parametrize("words, said", [
    (dict(TP=4), "TP=4 x PP=1 x FSDP=1 = 4 must divide the number of devices, 2; DP is what remains"),
    (dict(TP=2, SP="true", max_seqlen=63), "max_seqlen=63 must be a multiple of TP=2"),
    (dict(backend="te"), "backend=te with precision=fp32: its attention kernels take 16 bits; use precision=bf16"),
    (dict(FSDP=2, sharding_stage="stage2", CP=2, backend="pd"), "TP=1 x PP=1 x CP=2 x FSDP=2 = 4 must divide"),
])  # fmt: skip
def test_the_launchers_own_arguments_have_their_names(words, said):
    job, arguments = JOBS[PRETRAIN]
    assert said_of(job, arguments | words, Job(world=2, device="nvgpu")).startswith(said)


def test_options_that_mean_nothing_alone():
    """`Option.needs` makes a rule for each other flag."""
    for option in (*LAYERS, *TRAINING, *tuning.FINETUNE_MODEL, *tuning.FINETUNE_DATA, *tuning.DPO):
        for other, wanted in option.needs.items():
            others = {name: value for name, value in option.needs.items() if name != other}
            asked = replace(Job(), **others, **{option.name: "given", other: "else"})
            met = [rule for rule in RULES if not rule.breaks and rule.against(asked)]
            says = [rule.told(asked, SCRIPT, True) for rule in met if rule.says.startswith(f"{{{option.name}}} ")]
            assert says == [f"--{option.name} given needs --{other} {word(wanted)}; alone it means nothing"]


def test_a_recipes_lines_have_their_names():
    """As PaddleFormers calls them; its own defaults say nothing of ours."""
    check(job_of_recipe(dict(learning_rate=1e-3, min_learning_rate=1e-5, report_to=["none"])), RECIPE)
    te, none = dict(transformer_engine_backend="transformer_engine", compute_type="bf16"), dict(amp_master_grad=False)
    for recipe, said in (
        (dict(learning_rate=1e-6, min_learning_rate=1e-5), "learning_rate: 1e-06 is below min_learning_rate: 1e-05"),
        (dict(report_to="wandbee"), "report_to: wandbee: it must be one of"),
        (
            dict(do_eval=True, metric_for_best_model="accuracy"),
            "metric_for_best_model: accuracy: evaluation gives loss",
        ),
        (te | dict(fine_tuning="lora", mlp_chunk_tokens=64), "mlp_chunk_tokens: 64 with fine_tuning=lora: layers with"),
        (te | dict(sep_parallel_size=2, max_seq_len=64), "sep_parallel_size=2: PaddleFormers' Llama has no attention"),
        (none, "sharding: stage1: PaddleFormers shards the optimizer with float32 main gradients only"),
        (none | dict(sharding="", tensor_model_parallel_size=2), "max_grad_norm: 1: PaddleFormers clips gradients"),
        (dict(tensor_model_parallel_size=4), "tensor_model_parallel_size=4 x pipeline_model_parallel_size=1 x"),
    ):
        with pytest.raises(JobError, match=f"^{re.escape(said)}"):
            check(job_of_recipe(recipe, world=2), RECIPE)


def test_where_a_recipes_gradients_are_added_up():
    """In main gradients unless the recipe has none; PaddleFormers has them by default."""
    te, two = dict(transformer_engine_backend="transformer_engine"), dict(gradient_accumulation_steps=2)
    none = dict(amp_master_grad=False)
    for recipe, world, where in (
        (te, 2, True),
        (two, 1, False),
        (te | none, 1, False),
        (te | two | none, 1, "grad"),
        (te | two | none, 2, False),
    ):
        assert job_of_recipe(recipe, world).fuses_wgrad == where


def test_a_recipe_shards_over_all_ranks_unless_told_not_to():
    degrees = [
        (1, dict(sharding="stage2"), (1, 1)),
        (8, dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), (2, 1)),
        (8, dict(tensor_model_parallel_size=2, sharding=""), (1, 4)),
        (8, dict(sharding_parallel_size=2), (2, 4)),
    ]
    for world, recipe, expected in degrees:
        job = job_of_recipe(recipe, world)
        assert (job.sharding_ranks, job.replicas) == expected
    with pytest.raises(ValueError, match="^sharding: 'stage4': it must be"):
        job_of_recipe(dict(sharding="stage4"))


def test_a_recipe_in_float32_says_that_it_has_no_main_gradients():
    """PaddleFormers refuses it otherwise, in each process after its imports."""
    job_of_recipe(dict(compute_type="float32", amp_master_grad=False))
    with pytest.raises(ValueError, match="^compute_type: float32 needs amp_master_grad: false; PaddleFormers"):
        job_of_recipe(dict(compute_type="float32"))


def refused(text):
    with pytest.raises(JobError) as error:
        check(example(text))
    return str(error.value)


def test_reports_whose_package_is_missing(monkeypatch):
    there = {"wandb", "mlflow"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    monkeypatch.delenv("WANDB_DISABLED", raising=False)
    check(example("--report_to wandb"))
    missing = "--report_to tensorboard: the package tensorboardX is not installed; install"
    assert refused("--report_to wandb tensorboard").startswith(missing)
    assert refused("--report_to all wandb").startswith("--report_to all wandb: nothing else goes with all; leave")
    monkeypatch.setenv("WANDB_DISABLED", "true")
    assert refused("--report_to wandb").startswith("--report_to wandb: WANDB_DISABLED is set; unset it")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert refused("--report_to mlflow").startswith("--report_to mlflow: MLFLOW_TRACKING_URI is not set")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:///runs")
    assert not fault(example("--report_to mlflow"))


def test_paddlenlps_fused_loss_where_it_can_run(monkeypatch):
    """none has PaddleNLP's own, with its package, in one process of model parallelism."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "paddlenlp_kernel" or None)
    fused = "--use_fused_linear_cross_entropy true"
    assert fault(example(fused)) is None
    assert "no tensor or pipeline parallelism" in refused(f"x2 {fused} --tensor_parallel_degree 2")
    assert "it knows no smoothing, --label_smoothing_factor 0.1" in refused(f"{fused} --label_smoothing_factor 0.1")
    best = "finetune --do_eval true --metric_for_best_model accuracy"
    assert "no logits to count --metric_for_best_model accuracy by" in refused(f"{best} {fused}")


def test_fp8_takes_sizes_in_steps_of_the_recipe():
    """Each GEMM's dimensions, one at a time, with the size that is wrong."""
    fine = configs.read("llama-125m")
    fp8 = dict(transformer_engine_backend="transformer_engine", use_fp8=True, bf16=True, do_eval=False)
    fp8 |= dict(per_device_train_batch_size=1, max_seq_length=1024)

    def said(changes, **flags):
        job = Job.of(fp8 | flags, world=4, model=spec_of(fine | changes))
        with pytest.raises(JobError) as error:
            check(job, LAUNCHER)
        return str(error.value)

    narrow = dict(hidden_size=760, num_attention_heads=10, num_key_value_heads=10)
    assert "hidden_size of  is 760" in said(narrow)
    assert "intermediate_size over TP=2 is 1032" in said(dict(intermediate_size=2064), tensor_parallel_degree=2)
    sixteenths = dict(hidden_size=128, num_attention_heads=16, num_key_value_heads=16)
    assert "query size over TP=4 is 32" in said(sixteenths, tensor_parallel_degree=4, fp8_recipe="block")
    assert "key size over TP=4 is 8" in said(sixteenths | dict(num_key_value_heads=4), tensor_parallel_degree=4)
    assert "max_seqlen=1000 is 1000" in said({}, max_seq_length=1000)
    shared = dict(tensor_parallel_degree=4, sequence_parallel=True)
    assert "over TP=4 is 1028" in said({}, max_seq_length=4112, **shared)
    assert "multiples of 128; batch_size_per_device=1 x max_seqlen=256 over SEP=4 is 64" in said(
        {}, max_seq_length=256, sep_parallel_degree=4, fp8_recipe="block"
    )
    evaluated = dict(do_eval=True, per_device_eval_batch_size=1, per_device_train_batch_size=2, max_seq_length=64)
    assert "multiples of 128; --per_device_eval_batch_size 1 x" in said({}, **evaluated, fp8_recipe="block")


def test_a_degree_that_does_not_divide_the_model_is_told_of_before_sizes_in_fp8():
    found = refused(
        "x3 --bf16 true --fp16_opt_level O2 --transformer_engine_backend transformer_engine --use_fp8 true "
        "--model_name_or_path Qwen/Qwen2.5-7B --tensor_parallel_degree 3"
    )
    assert found.startswith("--tensor_parallel_degree 3 must divide num_attention_heads=28")
