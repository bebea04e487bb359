"""Refuse the attention that cuDNN lacks, as it is called here."""

from __future__ import annotations

from paddle_te.native.library import cudnn_version
from paddle_te.ops.te import runtime
from paddle_te.ops.te.float8_attention import deterministic

# from here on cuDNN has a softmax with an offset (9.13.1 has one, too), and its gradient over packed documents is right
CUDNN_OFFSET, CUDNN_PACKED_OFFSET = (9, 14), (9, 26)


def check_attention(
    head_dim: int,
    window: int,
    masked: bool,
    dropout: float,
    softcap: float = 0.0,
    softmax_type: str = "vanilla",
    value_dim: int | None = None,
) -> None:
    """Raise ValueError where cuDNN has no attention in 16 bits as it is called here.

    window, dropout, softcap, softmax_type, value_dim: as `ops` has them. masked: with an additive mask, as with a
    cache.
    As `nvte_get_fused_attn_backend` in TE's common/fused_attn/fused_attn.cpp, for training.
    """
    if softcap:
        raise ValueError(
            f"backend transformer_engine: attn_logit_softcapping={softcap}: its attention has no soft cap; use "
            "backend paddle"
        )
    if softmax_type != "vanilla":
        _check_softmax(softmax_type, CUDNN_OFFSET, "")
    capability = runtime.current().stream.capability
    after_hopper = capability >= (10, 0)
    _check_widths(head_dim, head_dim if value_dim is None else value_dim, capability)
    lacking = {
        "with a sliding window": window >= 0 and not masked,
        "with a mask on GPUs of compute capability 10 and above": masked and after_hopper,
        "with NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 on GPUs of compute capability 10 and above": after_hopper
        and deterministic(),
    }
    for what, wanted in lacking.items():
        if dropout and wanted:
            raise ValueError(
                f"backend transformer_engine: cuDNN's attention has no dropout {what}; set attention_dropout=0"
            )


def _check_widths(head_dim: int, value_dim: int, capability: tuple[int, int]) -> None:
    """Raise ValueError for heads that cuDNN does not train: head_dim numbers of q and k, value_dim of v."""
    greatest, after_hopper = 256 if capability == (9, 0) else 128, capability >= (10, 0)
    latent = (head_dim, value_dim) == (192, 128) and (after_hopper or greatest == 256)  # DeepSeek's
    wrong = [size for size in (head_dim, value_dim) if size % 8 or size > greatest]
    if wrong and not latent:
        raise ValueError(
            f"backend transformer_engine: heads have {wrong[0]} numbers; on GPUs of compute capability "
            "{}.{} cuDNN's attention takes multiples of 8 up to {}".format(*capability, greatest)
        )
    if head_dim != value_dim and min(head_dim, value_dim) >= 128 and not latent:
        raise ValueError(
            f"backend transformer_engine: heads of queries and keys have {head_dim} numbers, those of values "
            f"{value_dim}; of different widths from 128 on cuDNN's attention trains 192 with 128 only"
        )


def _check_softmax(softmax_type: str, needed: tuple[int, int], what: str) -> None:
    """Raise ValueError where cuDNN has no softmax of a type, by utils.py of TE's PyTorch side and its C++ file."""
    if deterministic():
        raise ValueError(
            f"backend transformer_engine: softmax_type={softmax_type!r} with NVTE_ALLOW_NONDETERMINISTIC_ALGO=0: the "
            "gradient of cuDNN's softmax offset is not deterministic; leave the variable out"
        )
    if (present := cudnn_version()) < needed:
        raise ValueError(
            "backend transformer_engine: softmax_type={!r}{} needs cuDNN {}.{}, not {}.{}; update it".format(
                softmax_type, what, *needed, *present
            )
        )


def check_packed_attention(softmax_type: str = "vanilla") -> None:
    """Raise ValueError where cuDNN has no attention over documents (TE's THD layouts) as it is called here.

    As `nvte_get_fused_attn_backend` in TE's common/fused_attn/fused_attn.cpp; on compute capability 12 TE lays out the
    softmax statistics otherwise (fused_attn_f16_arbitrary_seqlen.cu).
    """
    capability = runtime.current().stream.capability
    if not (9, 0) <= capability < (12, 0):
        raise ValueError(
            "backend transformer_engine: attention over packed documents needs a GPU of compute capability 9.0 to 11, "
            "not {}.{}".format(*capability)
        )
    if softmax_type != "vanilla":
        _check_softmax(softmax_type, CUDNN_PACKED_OFFSET, " over packed documents")
