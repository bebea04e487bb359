"""Rules for tuning on preferences."""

from __future__ import annotations

from paddle_te.job.record import Job
from paddle_te.job.rules.rule import FP8, ONE, TE, Rule


def _without_reference(job: Job) -> str:
    """Return the flag by which preference tuning has no reference; "" with a reference."""
    if not job.prefers or job.has_reference:
        return ""
    return "{reference_free}" if job.reference_free else "{loss_type}"


_DPO, _KTO = "dpo --do_train true", "kto --do_train true"
_COMPARES = ("dpop", "sppo_hard", "nca_pair", "kto_pair")  # with the reference, answer by answer
RULES = (
    Rule(
        lambda job: job.prefers and job.fp8_dpa,
        "{fp8_dpa}: cuDNN has no attention in fp8 over packed rows",
        "leave it out: then attention is in 16 bits, and the GEMMs stay in fp8",
        f"{_DPO} {FP8} --fp8_dpa true",
        f"{_DPO} {FP8}",
    ),
    Rule(
        lambda job: job.prefers and job.fp8_lm_head,
        "{fp8_lm_head}: the head computes answers' tokens only, some 4 % of an 8B model's products, and rewards are "
        "small differences of its log-probabilities, which fp8 would round",
        "leave it out: the layers stay in fp8",
        f"{_DPO} {FP8} --fp8_lm_head true",
        f"{_DPO} {FP8}",
    ),
    Rule(
        lambda job: job.prefers and job.label_smoothing_factor,
        "{label_smoothing_factor} smooths the labels of tokens, which preference tuning has none of",
        "for pairs that may be the wrong way round take {label_smoothing:name}",
        f"{_DPO} --label_smoothing_factor 0.1",
        f"{_DPO} --label_smoothing 0.1",
    ),
    Rule(
        lambda job: job.label_smoothing and job.loss_type not in ("sigmoid", "simpo"),
        "{label_smoothing} with {loss_type}: only sigmoid and simpo have it",
        "leave it out",
        f"{_DPO} --label_smoothing 0.1 --loss_type ipo",
        f"{_DPO} --label_smoothing 0.1 --loss_type simpo",
    ),
    Rule(
        lambda job: job.loss_type == "orpo" and job.sft_loss_ratio,
        "{sft_loss_ratio} with {loss_type}, whose tokens' loss has the weight 1",
        "take {loss_type:or}, which has none of its own",
        f"{_DPO} --loss_type orpo --sft_loss_ratio 0.5",
        f"{_DPO} --loss_type or --sft_loss_ratio 0.5",
    ),
    Rule(
        lambda job: job.reference_free and job.loss_type in _COMPARES,
        "{reference_free} with {loss_type}, which compares each answer with the reference's",
        "take another loss_type",
        f"{_DPO} --reference_free true --loss_type dpop",
        f"{_DPO} --reference_free true --loss_type ipo",
    ),
    Rule(
        lambda job: job.precompute_ref_log_probs and _without_reference(job),
        "{precompute_ref_log_probs} with {found}: there is no reference",
        ONE,
        f"{_DPO} --precompute_ref_log_probs true --loss_type simpo",
        f"{_DPO} --precompute_ref_log_probs true --loss_type ipo",
    ),
    Rule(
        lambda job: job.ref_model_update_steps > 0 and not job.second_model,
        "{ref_model_update_steps} needs a reference that is a model of its own",
        "leave out what makes it another: {lora:name}, {precompute_ref_log_probs:name}, {reference_free:name}, or a "
        "loss without a reference",
        f"{_DPO} {TE} --ref_model_update_steps 5 --lora true",
        f"{_DPO} {TE} --ref_model_update_steps 5",
    ),
    Rule(
        lambda job: job.ref_model_update_steps > 0 and job.save_steps % job.ref_model_update_steps,
        "{save_steps} with {ref_model_update_steps}: between two updates a checkpoint would not hold the reference, "
        "and the run could not go on from it",
        "save at a multiple",
        f"{_DPO} --ref_model_update_steps 7",
        f"{_DPO} --ref_model_update_steps 5",
    ),
    Rule(
        lambda job: job.ref_model_update_steps > 0 and job.shards_weights,
        "{ref_model_update_steps} with {sharding}: each rank has slices of the trained weights only",
        "use stage1 or stage2",
        f"x2 {_DPO} --ref_model_update_steps 5 --sharding stage3 --sharding_parallel_degree 2",
        f"x2 {_DPO} --ref_model_update_steps 5 --sharding stage2 --sharding_parallel_degree 2",
    ),
    Rule(
        lambda job: job.prefers and job.max_prompt_len >= job.max_seq_len,
        "{max_prompt_len} must be below {max_seq_len}, in which the answers have room, too",
        "",
        f"{_KTO} --max_seq_len 1024",
        f"{_KTO} --max_seq_len 1024 --max_prompt_len 512",
    ),
)
