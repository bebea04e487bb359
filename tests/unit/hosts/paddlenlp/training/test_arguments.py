"""Arguments that contradict each other are refused when they are parsed."""

import json
import sys
from types import SimpleNamespace

import pytest
from paddlenlp.trainer import PdArgumentParser
from paddlenlp.transformers import LlamaConfig

from paddle_te.hosts.paddlenlp.lora import lora_config
from paddle_te.hosts.paddlenlp.training.arguments import (
    ArgumentParser,
    ModelArguments,
    PreTrainingArguments,
    ScriptParser,
)
from paddle_te.hosts.paddlenlp.training.beginning import set_run
from paddle_te.hosts.paddlenlp.training.finetune_trainer import FinetuneModelArguments
from paddle_te.job import Job
from paddle_te.options.lora import Adapter
from paddle_te.options.removed import REMOVED
from tests.tracker_files import without_logins

TE = ["--transformer_engine_backend", "transformer_engine"]
MAIN_GRADS = ["--amp_master_grad", "true", "--bf16", "true", "--fp16_opt_level", "O2"]
PD_FP8 = ["--transformer_engine_backend", "paddle", "--use_fp8", "true"]


def parse(tmp_path, *words):
    parser = PdArgumentParser((ModelArguments, PreTrainingArguments))
    return parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--device", "cpu", *words])


def test_defaults_are_native_layers(tmp_path):
    model_args, training_args = parse(tmp_path)
    assert training_args.transformer_engine_backend == "none" and not training_args.use_fp8
    assert training_args.fp8_amax_history_len == 1024
    assert model_args.tokenizer == model_args.model_name_or_path


@pytest.mark.parametrize("words, refused", [
    ("--report_to all", "wandb"),  # PaddleNLP knows no SwanLab
    ("--report_to wandb swanlab --wandb_api_key key", "swanlab"),
])  # fmt: skip
def test_trackers_without_a_login(tmp_path, monkeypatch, words, refused):
    parser = ArgumentParser((ModelArguments, PreTrainingArguments))
    refusal = pytest.raises(ValueError, match=f"^--report_to {refused}: .* API key")
    with without_logins(tmp_path, monkeypatch), refusal:
        parser.parse_known_args(["--model_name_or_path", "tiny-llama-demo", "--output_dir", "unused", *words.split()])


@pytest.mark.parametrize(
    "words, fused",
    [
        ([*MAIN_GRADS, *TE], True),
        ([*MAIN_GRADS, "--transformer_engine_backend", "paddle"], False),  # a default is nothing to refuse
        (TE, False),
        ([*TE, "--gradient_accumulation_steps", "2"], "grad"),
        (["--gradient_accumulation_steps", "2", "--transformer_engine_backend", "paddle"], False),
        ([*MAIN_GRADS[:2], *TE], False),  # PaddleNLP has no main gradients of float32 weights
    ],
)
def test_gemms_add_up_gradients_by_themselves(tmp_path, words, fused):
    _, training_args = parse(tmp_path, *words)
    assert Job.of(training_args).fuses_wgrad == fused
    assert Job.of(training_args, world=2).fuses_wgrad == (fused is True)  # Paddle may send the others
    set_run(config := LlamaConfig(), 64, training_args)
    assert config.fuse_wgrad_accumulation == fused
    assert "fuse_wgrad_accumulation" not in config.to_dict(saving_file=True)


def test_folders_that_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match="--staging_dir /no/folder: .*can be written"):
        parse(tmp_path, "--staging_dir", "/no/folder")


def test_pd_emulates_fp8(tmp_path):
    _, training_args = parse(tmp_path, *PD_FP8, "--fp8_dpa", "true", "--fp8_dpa_bwd", "false", "--fp8_lm_head", "true")
    assert training_args.use_fp8 and training_args.fp8_dpa and not training_args.fp8_dpa_bwd
    assert training_args.fp8_lm_head


@pytest.mark.parametrize(
    "level, half, dtype",
    [("O2", "bf16", "bfloat16"), ("O2", "fp16", "float16"), ("O1", "bf16", "float32"), ("O2", "", "float32")],
)
def test_the_models_dtype(level, half, dtype):
    arguments = SimpleNamespace(fp16_opt_level=level, bf16=half == "bf16", fp16=half == "fp16")
    assert PreTrainingArguments.model_dtype.fget(arguments) == dtype


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_option_is_told_with_the_version_that_it_went_with(name):
    with pytest.raises(ValueError, match=f"^--{name}: this option went with version 0.2.0; delete it"):
        ScriptParser((PreTrainingArguments,)).parse_args_into_dataclasses([f"--{name}=0", "--output_dir", "out"])


def test_paddlenlps_files_may_name_what_is_not_here_unless_they_ask_for_it(tmp_path, monkeypatch):
    """The keys of its sft_argument.json and lora_argument.json that run_finetune.py has no flag for."""
    file = tmp_path / "sft_argument.json"
    monkeypatch.setattr(sys, "argv", ["run_finetune.py", str(file)])
    values = {
        "eval_with_do_generation": False,
        "lora_rank": 7,
        "pissa": False,
        "data_impl": "mmap",
        "model_name_or_path": str(tmp_path),
    }
    file.write_text(json.dumps(values))
    (arguments,) = ScriptParser((FinetuneModelArguments,)).parse()
    assert (arguments.lora_rank, arguments.model_name_or_path) == (7, str(tmp_path))
    file.write_text(json.dumps({**values, "data_impl": "lazy"}))
    with pytest.raises(ValueError, match="^data_impl: this option went with version 0.2.0; delete it$"):
        ScriptParser((FinetuneModelArguments,)).parse()
    file.write_text(json.dumps({**values, "eval_with_do_generation": True}))
    with pytest.raises(ValueError, match="^eval_with_do_generation true: is not supported; .*--prompts"):
        ScriptParser((FinetuneModelArguments,)).parse()


def test_paddlenlps_rslora_plus_is_three_flags(tmp_path, monkeypatch):
    """What run_finetune.py and run_dpo.py of PaddleNLP make of it, whatever the file's lora_alpha is."""
    file = tmp_path / "dpo_lora_argument.json"
    monkeypatch.setattr(sys, "argv", ["run_dpo.py", str(file)])
    values = {"model_name_or_path": str(tmp_path), "lora": True, "lora_rank": 64, "lora_alpha": 7}
    values |= {"lazy": True, "use_quick_lora": True, "weight_quantize_algo": None}  # which change no number
    for plus, want in ((True, (True, 4, 4.0)), (False, (False, 7, 1.0))):
        file.write_text(json.dumps(values | {"rslora_plus": plus}))
        (arguments,) = ScriptParser((FinetuneModelArguments,)).parse()
        assert (arguments.rslora, arguments.lora_alpha, arguments.lora_plus_scale) == want
    assert lora_config(Adapter(rank=64)).scaling == 2 and lora_config(Adapter(rank=64, rslora=True)).scaling == 4 / 8
    file.write_text(json.dumps(values | {"weight_quantize_algo": "nf4"}))
    with pytest.raises(ValueError, match="^weight_quantize_algo nf4: is not supported; --quantize_base fp8 keeps"):
        ScriptParser((FinetuneModelArguments,)).parse()
