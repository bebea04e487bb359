"""List keys of config.json beyond a family's own (`configs.schema`).

Some say nothing about training a model, others change what a model computes, in ways that no layer here does.

The first come from transformers 4.51.3's and PaddleNLP 3.0.0b4's PretrainedConfig and their four families' classes.
"""

from __future__ import annotations

# Each kind of value: the keys that may have it, or null.
_FLAGS = """
return_dict output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss is_decoder
tie_encoder_decoder do_sample early_stopping output_scores return_dict_in_generate remove_invalid_values use_cache
_attn_implementation_autoset summary_use_proj summary_proj_to_labels reorder_and_upcast_attn
use_flash_attention_for_generation use_last_token_for_generation immediate_clear_past_key_value
use_fast_layer_norm fused_softmax_with_triangular use_dualpipev gradient_checkpointing
use_flash_attention use_fused_rms_norm use_fused_rope use_fused_linear use_fused_dropout_add
use_fused_linear_cross_entropy tensor_parallel_output sequence_parallel fuse_sequence_parallel_allreduce recompute
recompute_use_reentrant offload_recompute_inputs fuse_attention_qkv fuse_attention_ffn use_recompute fuse_rms_norm
unsloth_fixed keys_to_ignore_at_inference
"""
_NUMBERS = """
chunk_size_feed_forward max_length min_length num_beams num_beam_groups diversity_penalty temperature top_k top_p
typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
num_labels num_choices classifier_dropout max_window_layers pretraining_tp forced_bos_token_id forced_eos_token_id
sep_token_id decoder_start_token_id cross_attention_hidden_size n_ctx type_vocab_size eol_token_id num_partitions
unk_token_id tensor_parallel_degree tensor_parallel_rank pipeline_parallel_degree virtual_pp_degree
pp_recompute_interval sep_parallel_degree context_parallel_degree summary_first_dropout _sliding_window_pattern
"""
_TEXTS = """
finetuning_task tokenizer_class prefix problem_type _name_or_path name_or_path transformers_version paddlenlp_version
paddleformers_version summary_type summary_activation recompute_granularity refined_recompute _commit_hash
attn_implementation _attn_implementation long_sequence_strategy_type long_sequence_strategy_name unsloth_version
bos_token eos_token pad_token unk_token torch_version cache_implementation
"""
_OBJECTS = "auto_map id2label label2id task_specific_params long_sequence_init_args dpo_config paddle_te_native_layout"
_LISTS = """
bad_words_ids suppress_tokens begin_suppress_tokens exponential_decay_length_penalty no_recompute_layers
"""
_KINDS = (
    (_FLAGS, (bool,), "true or false"),
    (_NUMBERS, (int, float), "a number"),
    (_TEXTS, (str,), "a text"),
    (_OBJECTS, (dict,), "an object, {…}"),
    (_LISTS, (list,), "a list, […]"),
)
# key: (types of its values, what these are called)
WITHOUT_MEANING = {name: (types, words) for names, types, words in _KINDS for name in names.split()}

# What a run says, not a model: PaddleNLP writes none of it
_OF_A_RUN = """
use_flash_attention use_fused_rms_norm use_fused_rope use_fused_linear use_fused_dropout_add
use_fused_linear_cross_entropy tensor_parallel_degree tensor_parallel_rank tensor_parallel_output
pipeline_parallel_degree virtual_pp_degree no_recompute_layers pp_recompute_interval sep_parallel_degree
context_parallel_degree sequence_parallel fuse_sequence_parallel_allreduce recompute recompute_granularity
recompute_use_reentrant refined_recompute offload_recompute_inputs
"""
# What PaddleNLP's configuration takes apart before it looks at a language model
_TAKEN_APART = "id2label label2id num_labels problem_type pruned_heads quantization_config"
NOT_FOR_PADDLENLP = {*_OF_A_RUN.split(), *_TAKEN_APART.split()}

# key: the values with which it changes nothing, beside null. Other families' words; and a family's of another language.
CHANGING: dict[str, tuple[object, ...]] = {
    "alibi": (False,),
    "use_alibi": (False,),
    "use_long_sequence_strategies": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "use_bias": (False,),
    "no_bias": (True,),
    "use_qkv_bias": (False,),
    "lm_head_bias": (False,),
    "sliding_window": (),
    "sliding_window_pattern": (),
    "use_bidirectional_attention": (False,),
    "interpolate_factor": (1,),
    "full_attn_mod": (1,),
    "use_sliding_window": (False,),
    "attention_chunk_size": (),
    "partial_rotary_factor": (1.0,),
    "rotary_pct": (1.0,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "rope_local_base_freq": (),
    "no_rope_layers": ([],),
    "rope_scaling_type": (),
    "use_mrope": (False,),
    "qk_layernorm": (False,),
    "use_qk_norm": (False,),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "attention_multiplier": (),
    "scale_emb": (1.0,),
    "scale_depth": (),
    "dim_model_base": (),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "clip_qkv": (),
    "parallel_attn": (False,),
    "use_parallel_residual": (False,),
    "multi_query": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "dropout": (0.0,),
    "attention_dropout": (0.0,),
    "attention_probs_dropout_prob": (0.0,),
    "hidden_dropout": (0.0,),
    "hidden_dropout_prob": (0.0,),
    "residual_dropout": (0.0,),
    "embedding_dropout": (0.0,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0,),
    "num_experts_per_tok": (0,),
    "moe_intermediate_size": (),
    "kv_lora_rank": (),
    "q_lora_rank": (),
    "num_nextn_predict_layers": (0,),
    "vision_config": (),
    "text_config": (),
    "quantization_config": (),
    "init_args": (),
    "init_class": (),
    "configuration_files": (),
}
# A word that names a size in another family's or library's files: those that name it here
OTHER_WORDS = {
    "n_embd": ("hidden_size",),
    "n_inner": ("intermediate_size",),
    "n_layer": ("num_hidden_layers",),
    "n_head": ("num_attention_heads",),
    "n_positions": ("max_position_embeddings",),
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_head"),
    "d_model": ("hidden_size", "n_embd"),
    "ffn_hidden_size": ("intermediate_size", "n_inner"),
    "hidden_size": ("n_embd",),
    "intermediate_size": ("n_inner",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions",),
    "activation_function": ("hidden_act", "hidden_activation"),
    "hidden_act": ("hidden_activation", "activation_function"),
    "hidden_activation": ("hidden_act", "activation_function"),
    "layer_norm_eps": ("rms_norm_eps", "layer_norm_epsilon"),
    "layer_norm_epsilon": ("rms_norm_eps", "layer_norm_eps"),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon"),
    "resid_pdrop": ("hidden_dropout_prob",),
    "embd_pdrop": ("hidden_dropout_prob",),
    "attn_pdrop": ("attention_probs_dropout_prob",),
}


def changes_nothing(name: str, value: object) -> bool:
    """Return whether a key of CHANGING has a value with which a model computes the same as without the key."""
    if value is None or any(type(value) is type(each) and value == each for each in CHANGING[name]):
        return True
    if name == "quantization_config" and isinstance(value, dict):
        if value.get("quant_method") == "fp8" and value.get("weight_block_size") == [128, 128]:
            return True  # how the weights are stored: `weights.float8` reads them
        # PaddleNLP writes one that asks for nothing
        return all(value.get(word) is None for word in ("quant_method", "weight_quantize_algo", "quant_type"))
    return type(value) is int and float(value) in CHANGING[name] and not isinstance(value, bool)
