"""Arguments that contradict each other are refused when they are parsed."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
from paddlenlp.trainer import PdArgumentParser
from paddlenlp.trainer.trainer_utils import OptimizerNames, ShardingOption

from paddle_te.hosts.paddlenlp.training.arguments import ModelArguments, PreTrainingArguments, ScriptParser
from paddle_te.hosts.paddlenlp.training.finetune_trainer import FinetuneModelArguments
from paddle_te.options.removed import REMOVED
from paddle_te.runs.main_gradients import adds_in_gemms

TE = ["--transformer_engine_backend", "transformer_engine"]
COMPACT = ["--bf16", "true", "--fp16_opt_level", "O2", "--optim_moments", "bfloat16"]
COMPACT += ["--master_weights", "bf16_remainder"]
MAIN_GRADS = ["--amp_master_grad", "true", "--bf16", "true", "--fp16_opt_level", "O2"]
BLOCKS = ["--optim_moments", "int8", "--unified_checkpoint", "true"]
UNCLIPPED = ["--optimizer_in_backward", "unclipped", "--max_grad_norm", "0"]
TP2_SP = ["--tensor_parallel_degree", "2", "--sequence_parallel", "true"]
BLOCK = ["--use_fp8", "true", "--fp8_recipe", "block"]
STORED = ["--activation_func_fp8_input_store", "true"]
PD_FP8 = ["--transformer_engine_backend", "paddle", "--use_fp8", "true"]


def parse(tmp_path, *words):
    parser = PdArgumentParser((ModelArguments, PreTrainingArguments))
    return parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--device", "cpu", *words])


def test_defaults_are_native_layers(tmp_path):
    model_args, training_args = parse(tmp_path)
    assert training_args.transformer_engine_backend == "none" and not training_args.use_fp8
    assert (training_args.fp8_amax_history_len, training_args.fp8_amax_compute_algo) == (1024, "max")
    assert model_args.tokenizer_name_or_path == model_args.model_name_or_path


@pytest.mark.parametrize(
    "words, fused",
    [
        ([*MAIN_GRADS, *TE], True),
        ([*MAIN_GRADS, "--transformer_engine_backend", "paddle"], False),  # a default is nothing to refuse
        (TE, False),
        ([*MAIN_GRADS[:2], *TE], False),  # PaddleNLP has no main gradients of float32 weights
    ],
)
def test_gemms_add_to_main_gradients_by_themselves(tmp_path, words, fused):
    _, training_args = parse(tmp_path, *words)
    assert adds_in_gemms(training_args) is fused


@pytest.mark.parametrize(
    "words, message",
    [
        (["--transformer_engine_backend", "te"], "it must be one of none, paddle, transformer_engine"),
        (["--fp8_amax_compute_algo", "min"], "it must be one of max, most_recent"),
        (["--recompute_granularity", "half"], "it must be one of full, core_attn"),
        (["--use_fp8"], "--use_fp8 needs --transformer_engine_backend"),
        (["--fp8_dpa"], "--fp8_dpa true needs --use_fp8 true"),
        ([*PD_FP8, "--fp8_dpa", "--fp8_recipe", "current"], "--fp8_dpa true needs --fp8_recipe delayed"),
        ([*PD_FP8, "--fp8_dpa_bwd", "false"], "--fp8_dpa_bwd false needs --fp8_dpa true; alone"),
        ([*PD_FP8, "--fp8_amax_history_len", "0"], "--fp8_amax_history_len 0: it must be a whole number of at least 1"),
        ([*PD_FP8, "--fp8_margin", "19"], "--fp8_margin 19: it must be a whole number from 0 to 18"),
        ([*PD_FP8, "--fp8_margin", "-1"], "--fp8_margin -1: it must be a whole number from 0 to 18"),
        ([*PD_FP8, "--fp8_recipe", "current", "--fp8_margin", "1"], "--fp8_margin 1 needs --fp8_recipe delayed"),
        ([*PD_FP8, "--fp8_recipe", "current", "--fp8_amax_history_len", "8"], "--fp8_amax_history_len 8 needs"),
        ([*PD_FP8, "--fp8_recipe", "mxfp8"], r"one of delayed, current, block \(mxfp8 and nvfp4 need .* Blackwell's\)"),
        ([*PD_FP8, "--fp8_recipe", "block", "--fp8_dpa"], "--fp8_dpa true needs --fp8_recipe delayed"),
        ([*PD_FP8, "--fp8_recipe", "block", "--fp8_margin", "1"], "--fp8_margin 1 needs --fp8_recipe delayed"),
        ([*PD_FP8, "--fp8_power_2_scale", "false"], "--fp8_power_2_scale false needs --fp8_recipe block"),
        ([*PD_FP8, "--fp8_amax_epsilon", "1e-3"], "--fp8_amax_epsilon 0.001 needs --fp8_recipe block"),
        ([*PD_FP8, "--fp8_recipe", "block", "--fp8_amax_epsilon", "-1"], "-1.0: it must be a number of at least 0"),
        (["--fp8_lm_head"], "fp8_lm_head needs use_fp8"),
        (["--unified_checkpoint", "true", "--sharding", "stage3"], "--unified_checkpoint true with --sharding stage3"),
        (["--transformer_engine_backend", "paddle", "--fp8_lm_head"], "fp8_lm_head needs use_fp8"),
        ([*PD_FP8, "--fp8_lm_head", "--use_fused_linear_cross_entropy"], "fp8_lm_head with use_fused"),
        (["--context_parallel_degree", "2"], "--context_parallel_degree 2 with .* none is PaddleNLP's own: it needs"),
        ([*PD_FP8, "--fp8_dpa", "--context_parallel_degree", "2"], "--fp8_dpa with --context_parallel_degree 2: ring"),
        (["--master_weights", "bf16_remainder"], "--master_weights bf16_remainder needs bfloat16 weights: --bf16 true"),
        ([*COMPACT, "--optim", "adamw_mini"], "bf16_remainder with --optim adamw_mini: it needs --optim adamw"),
        ([*COMPACT, "--sharding", "stage2 offload"], "--optim_moments bfloat16 .* with offload of --sharding"),
        ([*COMPACT, "--sharding_parallel_config", "enable_fuse_optimizer_states"], "enable_fuse_optimizer_states of"),
        ([*COMPACT, "--offload_optim", "true"], "bf16_remainder with --offload_optim"),
        (
            [*COMPACT, "--unified_checkpoint", "1", "--unified_checkpoint_config", "skip_save_model_weight"],
            "with --unified_checkpoint_config skip_save_model_weight",
        ),
        (
            [*BLOCKS, "--tensor_parallel_degree", "2"],
            "int8 with --unified_checkpoint true and --tensor_parallel_degree",
        ),
        ([*BLOCKS, "--sharding_parallel_config", "split_param"], "and split_param of .*; save rank by rank with"),
        (UNCLIPPED[:2], "unclipped with --max_grad_norm 1: .*give --max_grad_norm 0, or .*: last_norm"),
        (["--optimizer_in_backward", "last_norm", "--max_grad_norm", "0"], "it needs --max_grad_norm above 0"),
        ([*UNCLIPPED, "--optim", "adamw_mini"], "unclipped with --optim adamw_mini: it needs --optim adamw"),
        ([*UNCLIPPED, "--gradient_accumulation_steps", "4"], "_steps 4: gradients that are .* it must be 1"),
        ([*UNCLIPPED, "--amp_master_grad"], "with --amp_master_grad: .*nothing to add up in float32; leave one"),
        ([*UNCLIPPED, "--on_nan", "skip"], "with --on_nan skip: a bad step has updated weights already"),
        ([*UNCLIPPED, "--sharding_parallel_degree", "2"], "with --sharding_parallel_degree 2: .*complete only after"),
        (
            ["--offload_activations", "2"],
            "--offload_activations 2 needs --transformer_engine_backend tr",
        ),
        (
            [*TE, "--offload_activations", "2", "--recompute"],
            "2 with --recompute_granularity full: whole layers",
        ),
        ([*TE, "--offload_activations", "2", "--pipeline_parallel_degree", "2"], "2 with --pipeline_parallel_degree 2"),
        (["--offload_optimizer", "1.5"], "--offload_optimizer 1.5: it must be a number from 0 to 1"),
        (["--offload_optimizer", "1"], "--offload_optimizer 1 needs --transformer_engine_backend transformer_engine"),
        ([*TE, "--offload_optimizer", ".5", "--optim", "adamw_mini"], "0.5 with --optim adamw_mini: it needs"),
        ([*TE, "--offload_optimizer", ".5", "--offload_optim", "true"], "with --offload_optim: that is PaddleNLP's"),
        ([*TE, "--offload_optimizer", ".5", "--sharding", "stage2 offload"], "0.5 with offload of --sharding"),
        (
            [*TE, "--offload_optimizer", ".5", "--unified_checkpoint", "true", "--tensor_parallel_degree", "2"],
            "0.5 with --unified_checkpoint true and --tensor_parallel_degree 2: .*joins them on the device",
        ),
        (["--recompute_modules", "layernorm", "mpl"], "must be one or more of layernorm, mlp_act, mlp, core_attn"),
        (["--recompute_modules", "layernorm"], "--recompute_modules layernorm needs --transformer_engine_backend"),
        ([*TE, "--recompute_modules", "mlp", "--recompute"], "mlp with --recompute_granularity full: whole layers"),
        ([*TE, "--recompute_modules", "mlp_act", "mlp"], "--recompute_modules mlp_act mlp: .*leave out mlp_act"),
        (STORED, "--activation_func_fp8_input_store true needs --transformer_engine_backend tr"),
        ([*TE, *STORED, "--recompute"], "store true with --recompute_granularity full, .* nothing of it"),
        ([*TE, *STORED, "--recompute_modules", "mlp"], "store true with --recompute_modules mlp, .* nothing of it"),
        ([*TE, *STORED, "--mlp_chunk_tokens", "64"], "store true with --mlp_chunk_tokens 64, .* nothing of it"),
        (["--mlp_chunk_tokens", "16384"], "--mlp_chunk_tokens 16384 needs --transformer_engine_backend tr"),
        ([*PD_FP8, "--mlp_chunk_tokens", "1000"], "--mlp_chunk_tokens 1000: it must be a multiple of 16"),
        (["--use_async_save"], "use --save_in_background"),
        (["--staging_dir", "/tmp"], "--staging_dir .*alone"),
        (["--save_in_background", "--staging_dir", "/no/folder"], "--staging_dir /no/folder: .*can be written"),
        (["--use_fused_linear_cross_entropy"], "paddlenlp_kernel.*the other backends need nothing"),
    ],
)
def test_contradictions(tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        parse(tmp_path, *words)


def test_the_update_in_backward_takes_no_data_parallelism(tmp_path, monkeypatch):
    monkeypatch.setattr(PreTrainingArguments, "world_size", 4)
    with pytest.raises(ValueError, match="with data parallelism or sharding over 2 ranks: their gradients must be"):
        parse(tmp_path, *UNCLIPPED, "--tensor_parallel_degree", "2")


def test_paddlenlps_fused_loss_where_it_can_run(tmp_path, monkeypatch):
    """none has PaddleNLP's own, with its package, in one process of model parallelism."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "paddlenlp_kernel" or find_spec(name))
    words = ["--use_fused_linear_cross_entropy", "true"]
    assert parse(tmp_path, *words)[1].use_fused_linear_cross_entropy
    for degree in ("--tensor_parallel_degree", "--pipeline_parallel_degree"):
        with pytest.raises(ValueError, match="no tensor or pipeline parallelism"):
            parse(tmp_path, *words, degree, "2")
    assert parse(tmp_path, *words, "--transformer_engine_backend", "paddle")[1].use_fused_linear_cross_entropy


def test_pd_emulates_fp8(tmp_path):
    _, training_args = parse(tmp_path, *PD_FP8, "--fp8_dpa", "true", "--fp8_dpa_bwd", "false", "--fp8_lm_head", "true")
    assert training_args.use_fp8 and training_args.fp8_dpa and not training_args.fp8_dpa_bwd
    assert training_args.fp8_lm_head


@pytest.mark.parametrize(
    "settings, refused",
    [
        (dict(), True),
        (dict(device="gpu:0"), False),
        (dict(bf16=False), False),
        (dict(amp_master_grad=True), False),
        (dict(max_grad_norm=0.0), False),
        (dict(world_size=1), False),
        (dict(use_hybrid_parallel=False), False),
        (dict(sharding=[ShardingOption.FULL_SHARD]), False),
        (dict(optim=OptimizerNames.ADAMW), False),
    ],
)
def test_gradients_that_paddle_cannot_clip(settings, refused):
    base = dict(device="nvgpu:1", bf16=True, fp16_opt_level="O2", amp_master_grad=False, max_grad_norm=1.0)
    base |= dict(use_hybrid_parallel=True, world_size=2)
    base |= dict(sharding=[ShardingOption.SHARD_OP], optim=OptimizerNames.ADAMW_MINI)
    arguments = SimpleNamespace(**(base | settings))
    assert PreTrainingArguments._clips_bf16_where_paddle_cannot(arguments) == refused


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
