"""PaddleFormers' Llama as the reference, and ours with the same weights."""

import paddle
from paddleformers.transformers import LlamaConfig

from paddle_te.hosts.paddleformers import model_class
from tests.te_weights import SIZES, copy_layer, randomise


def tiny_config(backend="paddle", **kwargs):
    own = dict(
        transformer_engine_backend=backend,
        tie_word_embeddings=False,
        fuse_rms_norm=backend != "none",  # whose kernel is for GPUs only
        _attn_implementation="eager",  # with sdpa PaddleFormers' own layers do not keep packed documents apart on a CPU
    )
    return LlamaConfig(**(SIZES | own | kwargs))


def two_models(generator, **kwargs):
    """PaddleFormers' model and ours, in evaluation mode, with the same random weights."""
    host, ours = (model_class(config)(config) for config in (tiny_config(b, **kwargs) for b in ("none", "paddle")))
    randomise(host, generator)
    for source, target in zip(host.model.layers, ours.model.layers, strict=True):
        copy_layer(source, target)
    theirs = dict(host.named_parameters())
    for name, parameter in ours.named_parameters():
        if ".layers." not in name:
            parameter.set_value(theirs[name])
    host.eval(), ours.eval()
    return host, ours


def tokens(generator, *shape):
    return paddle.to_tensor(generator.integers(0, SIZES["vocab_size"], shape))
