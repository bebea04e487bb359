"""Rules for fine-tuning, LoRA and packed documents."""

from __future__ import annotations

from paddle_te.host import PADDLENLP
from paddle_te.job.record import FINETUNE, Job
from paddle_te.job.rules.rule import FP8, LORA, ONE, PD, TE, TUNED, Rule
from paddle_te.options.pretraining import PRETRAINING


def _of_pretraining(job: Job) -> str:
    """Return a flag that only pretraining has; "" without one."""
    given = (each.name for each in PRETRAINING if getattr(job, each.name) != each.default)
    return job.tunes and next((f"{{{name}}}" for name in given), "") or ""


def _packs(job: Job) -> str:
    """Return the flag that keeps a sequence's documents apart; "" without one."""
    if job.prefers:
        return "packed rows"
    return next((f"{{{flag}:name}}" for flag in ("zero_padding", "reset_attention_mask") if getattr(job, flag)), "")


def _keeps_apart(job: Job) -> str:
    """Return the same, or the one with which positions begin anew in each document."""
    return _packs(job) or ("{reset_position_ids:name}" if job.reset_position_ids else "")


def _padding_out_of_steps(job: Job) -> str:
    """Return the flag for the length of a batch, by what it must be divisible, and why; "" where it is."""
    least, why = job.fp8_multiple * job.sharing, f"for GEMMs with {{fp8_recipe}} and {job.sharing} ranks a sequence"
    if not job.use_fp8:
        least, why = job.sharing * (2 if job.cp > 1 else 1), f"with {{{job.shared_by}}}, which splits sequences"
    flag = job.length_flag if job.prefers else "pad_to_multiple_of"
    wrong = job.tunes and getattr(job, flag) % least
    return f"{{{flag}}}: it must be a multiple of {least}, {why}" if wrong else ""


def _before_dropout(job: Job) -> str:
    """Return the flag that keeps less of norm or activation, which are single operations before lora_dropout."""
    if {*(job.recompute_modules or ())} - {"core_attn"}:
        return "{recompute_modules}"
    return "{activation_func_fp8_input_store}" if job.activation_func_fp8_input_store else ""


RULES = (
    Rule(
        _of_pretraining,
        "{found} is for pretraining: here PaddleNLP's Trainer makes the schedule",
        "leave it out",
        f"{TUNED} --min_learning_rate 1e-6",
        TUNED,
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.script == FINETUNE and job.pp > 1,
        "{pipeline_parallel_degree}: fine-tuning has tensor, sharding and data parallelism only",
        "it must be 1",
        f"x2 {TUNED} --pipeline_parallel_degree 2 --gradient_accumulation_steps 2",
        f"x2 {TUNED} --tensor_parallel_degree 2",
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.tunes and not (job.do_train or job.do_eval or job.merge_lora),
        "nothing to do",
        "give {do_train:name}, {do_eval:name} or {merge_lora:name}",
        "finetune",
        TUNED,
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.quantize_base and not job.use_fp8,
        "{quantize_base} needs {use_fp8:true}: weights that exist in fp8 only are multiplied in fp8",
        "leave {quantize_base:name} out to compute in the activations' precision",
        f"{LORA} --quantize_base fp8",
        f"{LORA} --quantize_base fp8 --use_fp8 true",
    ),
    Rule(
        lambda job: job.lora and job.freeze,
        "{freeze:name} with {lora}, which trains none of the model's weights",
        ONE,
        f"{LORA} --freeze embed",
        f"{TUNED} --freeze embed",
    ),
    Rule(
        lambda job: job.freeze and job.unified_checkpoint,
        "{freeze:name} with {unified_checkpoint}: PaddleNLP, which loads such checkpoints, asks for the optimizer's "
        "state of all weights",
        "leave {unified_checkpoint:name} out",
        f"{TE} --freeze embed --unified_checkpoint true",
        f"{TE} --freeze embed",
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.freeze and job.stage == 3,
        "{freeze:name} with {sharding}: Paddle fails to save weights without gradients there",
        "take stage1 or stage2",
        f"x2 {TE} --freeze embed --sharding stage3",
        f"x2 {TE} --freeze embed --sharding stage2",
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.lora and job.stage == 3,
        "{sharding} with {lora}: Paddle leaves weights that are not trained whole on every rank after their first "
        "backward",
        "use stage1 or stage2, or divide them with {tensor_parallel_degree:name}",
        f"x2 {LORA} --sharding stage3",
        f"x2 {LORA} --sharding stage2",
    ),
    Rule(
        lambda job: job.merge_lora and not (job.do_train or job.lora_path),
        "{merge_lora:name} without {do_train:name}: there is no adapter",
        "give it with {lora_path:name}",
        "finetune --lora true --merge_lora true",
        "finetune --lora true --merge_lora true --lora_path adapter",
    ),
    Rule(
        lambda job: job.lora and job.lora_dropout and _before_dropout(job),
        "{found} with {lora_dropout}: norm and activation are operations of their own before dropout, and keep what "
        "they give",
        ONE,
        f"{LORA} --lora_dropout 0.1 --recompute_modules layernorm",
        f"{LORA} --lora_dropout 0.1 --recompute_modules core_attn",
    ),
    Rule(
        lambda job: job.fp8_dpa and not job.prefers and _packs(job),
        "{fp8_dpa}: cuDNN has no attention in fp8 over packed documents",
        "leave out {found}, or {fp8_dpa:name}: then attention is in 16 bits, and the GEMMs stay in fp8",
        f"{FP8} --fp8_dpa true --reset_attention_mask true",
        f"{FP8} --reset_attention_mask true",
    ),
    Rule(
        lambda job: job.cp > 1 and _keeps_apart(job),
        "{found} with {context_parallel_degree}: ring attention knows no documents",
        "share sequences with {sep_parallel_degree:name}, which keeps them apart",
        f"x2 {TUNED} {PD} --zero_padding true --context_parallel_degree 2",
        f"x2 {TUNED} {PD} --zero_padding true --sep_parallel_degree 2",
    ),
    Rule(
        lambda job: job.sep > 1 and not job.ours and _keeps_apart(job),
        "{found} with {sep_parallel_degree}: PaddleNLP's own layers take no documents then",
        "use {transformer_engine_backend:paddle} or {transformer_engine_backend:transformer_engine}",
        "x2 --reset_attention_mask true --sep_parallel_degree 2",
        f"x2 {PD} --reset_attention_mask true --sep_parallel_degree 2",
    ),
    Rule(
        _padding_out_of_steps,
        "{found}",
        "",
        f"{TUNED} {FP8} --model_name_or_path llama-125m --fp8_recipe block --pad_to_multiple_of 64",
        f"{TUNED} {FP8} --model_name_or_path llama-125m --fp8_recipe block --pad_to_multiple_of 128",
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.script == FINETUNE and job.sequence_parallel and not job.pad_to_max_length,
        "{sequence_parallel} needs {pad_to_max_length:true}: all batches must be equally long",
        "",
        f"x2 {TUNED} --tensor_parallel_degree 2 --sequence_parallel true",
        f"x2 {TUNED} --tensor_parallel_degree 2 --sequence_parallel true --pad_to_max_length true",
        host=PADDLENLP,
    ),
    Rule(
        lambda job: (
            job.script == FINETUNE
            and job.sharing > 1
            and not (job.ours or job.pad_to_max_length)
            and f"{{{job.shared_by}}}"
        ),
        "{found} with {transformer_engine_backend} needs {pad_to_max_length:true}: PaddleNLP's own "
        "layers take all batches for equally long",
        "",
        f"x2 {TUNED} --sep_parallel_degree 2",
        f"x2 {TUNED} --sep_parallel_degree 2 --pad_to_max_length true",
        host=PADDLENLP,
    ),
)
