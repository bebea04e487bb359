"""Rules for fp8: where it is not there, its scales, and the sizes of its GEMMs."""

from __future__ import annotations

from paddle_te.configs.spec import experts_width
from paddle_te.job.record import PRETRAIN, Job
from paddle_te.job.rules.rule import FP8, LORA, ONE, Rule

RULES = (
    Rule(
        lambda job: job.fp8_dpa and job.cp > 1,
        "{fp8_dpa} with {context_parallel_degree}: ring attention is in 16 bits",
        "{sep_parallel_degree:name} has fp8",
        f"x2 {FP8} --fp8_dpa true --context_parallel_degree 2",
        f"x2 {FP8} --fp8_dpa true --sep_parallel_degree 2",
    ),
    Rule(
        lambda job: job.use_fp8 and not job.fp8_reduce_amax and job.sequence_parallel,
        "{fp8_reduce_amax} with {sequence_parallel}: ranks gather each other's rows in fp8, and need the same scales",
        ONE,
        f"x2 {FP8} --fp8_reduce_amax false --tensor_parallel_degree 2 --sequence_parallel true",
        f"x2 {FP8} --fp8_reduce_amax false --tensor_parallel_degree 2",
    ),
    Rule(
        lambda job: job.use_fp8 and not job.fp8_reduce_amax and job.world > 1 and job.resume_from_checkpoint,
        "{fp8_reduce_amax} with {resume_from_checkpoint}: a checkpoint has the scales of one rank, and each of the "
        "{devices} ranks had its own",
        "start from its weights, or leave {fp8_reduce_amax:name} out",
        f"x2 {FP8} --fp8_reduce_amax false --resume_from_checkpoint auto",
        f"x2 {FP8} --resume_from_checkpoint auto",
    ),
    Rule(
        lambda job: job.fp8_fallback and not job.fp8_statistics,
        "{fp8_fallback} needs {fp8_statistics:name}, whose numbers it judges",
        "set {fp8_statistics:name}, such as to 50",
        f"{FP8} --fp8_fallback bf16:underflows=0.3",
        f"{FP8} --fp8_fallback bf16:underflows=0.3 --fp8_statistics 50",
    ),
    Rule(
        lambda job: job.quantize_base and _leaves_fp8(job),
        "{found} with {quantize_base}: such weights exist in fp8 only",
        ONE,
        f"{LORA} --quantize_base fp8 --use_fp8 true --fp8_skip_layers first:1",
        f"{LORA} --use_fp8 true --fp8_skip_layers first:1",
    ),
    Rule(
        lambda job: job.model and len(job.skipped_layers(job.layers)) == job.layers,
        "{fp8_skip_layers}: {model_name_or_path:value} has {layers} decoder layers, of which none would compute in fp8",
        "leave {use_fp8:name} out, or skip fewer",
        f"{FP8} --model_name_or_path tiny-llama-demo --fp8_skip_layers first:100",
        f"{FP8} --model_name_or_path tiny-llama-demo --fp8_skip_layers first:1",
    ),
    Rule(
        lambda job: job.use_fp8 and _size_out_of_steps(job),
        "{use_fp8} with {fp8_recipe:value} scaling needs multiples of {fp8_multiple}; {found}",
        "take another size, degree or fp8_recipe",
        f"{FP8} --fp8_recipe block --max_seq_length 1040 --per_device_train_batch_size 1",
        f"{FP8} --fp8_recipe current --max_seq_length 1040 --per_device_train_batch_size 1",
    ),
)


def _leaves_fp8(job: Job) -> str:
    """Return the first flag with which layers compute in 16 bits, as a template."""
    return next((f"{{{name}}}" for name in ("fp8_skip_layers", "fp8_fallback") if getattr(job, name)), "")


def _size_out_of_steps(job: Job) -> str:
    """Return the first size of a GEMM, in words, that an fp8 recipe does not take."""
    sizes = _sizes_of_model(job) if job.model else {}
    if job.script == PRETRAIN or job.sequence_parallel:
        sizes |= _tokens(job, "per_device_train_batch_size")
    if job.do_eval and job.script == PRETRAIN:
        sizes |= _tokens(job, "per_device_eval_batch_size")
    return next((f"{name} is {size}" for name, size in sizes.items() if size % job.fp8_multiple), "")


def _sizes_of_model(job: Job) -> dict[str, int]:
    """Return the sizes of a model's GEMMs on a rank, by their names in config.json."""
    assert job.model is not None
    attention, over = job.model.layer.attention, " over {tensor_parallel_degree}"
    sizes = {
        "hidden_size of {model_name_or_path:value}": job.model.hidden,
        f"query size{over}": attention.q_size // job.tp,
        f"key size{over}": attention.kv_size // job.tp,
    }
    if (latent := attention.latent) is not None:
        sizes |= {"kv_lora_rank": latent.kv_lora_rank, "q_lora_rank": latent.q_lora_rank or 0}
        keys_and_values = attention.heads * (attention.head_dim - latent.qk_rope_head_dim + latent.v_head_dim)
        sizes |= {f"size of keys and values{over}": keys_and_values // job.tp}
    dense, experts = job.model.dense, job.model.experts
    if dense is not None:
        sizes[f"intermediate_size{over}"] = dense.ffn // job.tp
    if experts is not None:  # which ranks have whole
        sizes[experts_width(job.model.family)] = experts.ffn
        sizes[f"shared_expert_intermediate_size{over}"] = (experts.shared_ffn or 0) // job.tp
    return sizes


def _tokens(job: Job, batch: str) -> dict[str, int]:
    """Return the tokens of a rank's micro-batch, and under sequence parallelism those between its attention and MLP."""
    shared = f" over {{{job.shared_by}}}" if job.sharing > 1 else ""
    name, tokens = f"{{{batch}}} x {{{job.length_flag}}}{shared}", getattr(job, batch) * job.sequence // job.sharing
    in_all = {f"{name} over {{tensor_parallel_degree}}": tokens // job.tp} if job.sequence_parallel else {}
    return {name: tokens} | in_all
