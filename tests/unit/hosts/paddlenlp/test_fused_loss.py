"""config.use_fused_linear_cross_entropy: loss and gradients of PaddleNLP's head and criterion, in less memory."""

import numpy as np
import paddle
import pytest

from paddle_te.hosts.paddlenlp.llama import LlamaForCausalLM
from paddle_te.hosts.paddlenlp.lora import TELoRAModel, lora_config
from paddle_te.layers import cross_entropy
from paddle_te.options.lora import Adapter
from tests.te_weights import relative
from tests.unit.hosts.paddlenlp.native import draw_adapters, tiny_config


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_TOKENS", 10)


def make(seed, fused, **config):
    paddle.seed(seed)
    model = LlamaForCausalLM(tiny_config(initializer_range=0.1, **config))
    model.train()
    model.config.use_fused_linear_cross_entropy = fused
    return model


def inputs(**more):
    ids = paddle.randint(0, 96, [2, 24])
    labels = paddle.concat([ids[:, 1:], paddle.full([2, 1], -100, ids.dtype)], -1)
    labels[0, 5:12] = -100
    return dict(input_ids=ids, labels=labels) | more


def packed():
    mask = np.tril(np.ones([2, 1, 24, 24], bool))
    mask[..., 9:, :9] = False
    return dict(attention_mask=paddle.to_tensor(mask))


CASES = {
    "plain": ({}, {}),
    "tied": (dict(tie_word_embeddings=True), {}),
    "recompute": (dict(recompute=True, recompute_granularity="full"), {}),
    "packed": ({}, packed()),
    "return_dict": ({}, dict(return_dict=True)),
    "hidden_states": ({}, dict(output_hidden_states=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_same_loss_and_gradients(seed, case):
    config, more = CASES[case]
    batch, runs = inputs(**more), []
    for fused in (False, True):
        model = make(seed, fused, **config)
        if "recompute" in config:
            model.recompute_enable()
        outputs = model(**batch)
        (outputs[0] / 4).backward()
        runs.append((outputs, {name: p.grad.numpy() for name, p in model.named_parameters()}))
    (plain, grads), (fused, fused_grads) = runs
    assert type(fused) is type(plain)
    assert fused[0].item() == pytest.approx(plain[0].item(), rel=1e-6)
    if case == "return_dict":
        assert fused.logits is None and plain.logits is not None
    else:
        assert fused[1] is None and len(fused) == len(plain)
    assert fused_grads.keys() == grads.keys()
    for name, grad in grads.items():
        assert relative(fused_grads[name], grad) < 1e-5, name


def test_lora(seed):
    """The head is frozen: no gradient of its weight is computed, those of the adapter are the same."""
    batch, runs = inputs(), []
    for fused in (False, True):
        model = TELoRAModel(make(seed, fused), lora_config(Adapter(rank=4)))
        paddle.seed(seed)
        draw_adapters(model)
        loss = model(**batch)[0]
        loss.backward()
        runs.append((loss.item(), {name: p.grad for name, p in model.named_parameters()}))
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-6)
    for name, grad in runs[0][1].items():
        assert (grad is None) == (runs[1][1][name] is None) == ("lora_" not in name)
        assert grad is None or relative(runs[1][1][name], grad) < 1e-5, name


@pytest.mark.parametrize("train", [True, False])
def test_no_product_is_larger_than_a_chunks_logits(seed, train, monkeypatch):
    model, batch = make(seed, True, vocab_size=512), inputs()
    sizes, matmul = [], paddle.matmul

    def watched(*args, **kwargs):
        result = matmul(*args, **kwargs)
        if 512 in result.shape and 64 not in result.shape:  # logits, not the weight's gradient
            sizes.append(result.size)
        return result

    monkeypatch.setattr(paddle, "matmul", watched)
    with paddle.set_grad_enabled(train):
        fused = model(**batch)[0]
    assert len(sizes) == 5 and max(sizes) == 10 * 512  # of 48 tokens, without gradients no more products than with
    model.config.use_fused_linear_cross_entropy, sizes[:] = False, []
    assert model(**batch)[0].item() == pytest.approx(fused.item(), rel=1e-6)
    assert sizes == [48 * 512]


def test_without_labels_there_are_logits(seed):
    model = make(seed, True)
    assert model(**inputs() | dict(labels=None))[0].shape == [2, 24, 96]
