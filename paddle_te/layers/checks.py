"""What layers check of their arguments."""

from paddle_te.fp8.scaling import MXFP8_BLOCK
from paddle_te.options.scripts import RECOMPUTE_MODULES


def probability(**named):
    """The one value that is given. Raises ValueError with its name for what is no probability below 1."""
    ((name, value),) = named.items()
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value}: it must be at least 0 and below 1")
    return value


def one_of(allowed, **named):
    """The one value that is given. Raises ValueError with its name for one that is not allowed."""
    ((name, value),) = named.items()
    if value not in allowed:
        raise ValueError(f"{name}={value!r}; it may be one of {', '.join(map(repr, allowed))}")
    return value


def recomputed(recompute_modules):
    """The names, a tuple. Raises ValueError for one that is not known, and for two of which one contains the other."""
    for name in recompute_modules:
        one_of(RECOMPUTE_MODULES, recompute_modules=name)
    if {"mlp", "mlp_act"} <= {*recompute_modules}:
        raise ValueError("recompute_modules: 'mlp' computes the activation again, too; leave 'mlp_act' out")
    return tuple(recompute_modules)


def stored_in_fp8(activation_func_fp8_input_store, recompute, chunk_tokens, ffn):
    """Whether the activation's input is kept in fp8. recompute: "mlp", "mlp_act" or None. ffn: columns of the
    activation's output on this rank. Raises ValueError where nothing is kept, or not in whole blocks."""
    if not activation_func_fp8_input_store:
        return False
    for name, contains in (("recompute_modules 'mlp'", recompute == "mlp"), ("mlp_chunk_tokens", chunk_tokens)):
        if contains:
            raise ValueError(
                f"activation_func_fp8_input_store with {name}, with which the activation's input is not kept at all; "
                "leave one of them out"
            )
    if ffn % MXFP8_BLOCK:
        raise ValueError(
            f"activation_func_fp8_input_store keeps blocks of {MXFP8_BLOCK} numbers, into which ffn_hidden_size, {ffn} "
            "on this rank, does not divide; leave it out, or take another size"
        )
    return True


def head_size(hidden_size, num_attention_heads, num_gqa_groups, kv_channels):
    """kv_channels, or where it is None hidden_size / num_attention_heads. Raises ValueError where that is no size."""
    if not kv_channels and hidden_size % num_attention_heads:
        raise ValueError(
            f"hidden_size={hidden_size} must be divisible by num_attention_heads={num_attention_heads}; or give the "
            "size of a head as kv_channels"
        )
    if num_attention_heads % num_gqa_groups:
        raise ValueError(
            f"num_attention_heads={num_attention_heads} must be divisible by num_gqa_groups={num_gqa_groups}"
        )
    return kv_channels or hidden_size // num_attention_heads
