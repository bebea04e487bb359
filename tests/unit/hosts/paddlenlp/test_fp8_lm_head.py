"""config.fp8_lm_head: the head computes in fp8 as the decoder layers do, and only where it is asked for."""

import numpy as np
import paddle
import pytest
from paddlenlp.transformers.llama import modeling

from paddle_te import fp8
from paddle_te.hosts.paddlenlp.llama import LlamaForCausalLM
from paddle_te.hosts.paddlenlp.lora import TELoRAModel, lora_config
from paddle_te.models.decoder import recipe_of
from paddle_te.ops.te.counting import count_entry_points
from paddle_te.options.lora import Adapter
from tests import emulated_te
from tests.bfloat16 import truncated
from tests.te_weights import relative
from tests.unit.hosts.paddlenlp.native import draw_adapters, tiny_config
from tests.unit.ops.test_te_linear import array, close, reference, tensors

FP8 = dict(use_fp8=True, fp8_amax_history_len=4)
both_layouts = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
recipes = pytest.mark.parametrize("recipe", ["delayed", "current"])
SIZES = dict(
    hidden_size=128, intermediate_size=128, vocab_size=384
)  # the fewest that block scaling has; logits in 3 blocks


def make(seed, head=True, **config):
    paddle.seed(seed)
    model = LlamaForCausalLM(tiny_config(**(FP8 | dict(initializer_range=0.1, fp8_lm_head=head) | config)))
    model.train()
    return model


def batch(seed):
    paddle.seed(seed)
    ids = paddle.randint(0, 96, [2, 24])
    return dict(input_ids=ids, labels=ids)


def step(model, inputs):
    """(loss, {name: gradient})."""
    model.clear_gradients()
    loss = model(**inputs)[0]
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def head_alone(seed, backend, tied, **config):
    """(head, its inputs and its output's gradient as arrays, the same as tensors) on a CPU: te's kernels emulated."""
    model = make(seed, transformer_engine_backend=backend, tie_word_embeddings=tied, **SIZES, **config)
    head, generator = model.lm_head, np.random.default_rng(seed)
    dtype = {"paddle": "float32", "transformer_engine": "bfloat16"}[backend]
    numbers = [generator.standard_normal(s).astype("float32") for s in ([2, 64, 128], head.weight.shape, [2, 64, 384])]
    arrays = [truncated(n) for n in numbers]
    x, weight, dy = tensors(arrays, dtype)
    head.to(dtype=dtype)
    head.weight.set_value(weight)
    return head, arrays, x, dy


@pytest.mark.parametrize("backend", ["paddle", "transformer_engine"])
@both_layouts
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_logits_and_gradients_are_those_of_rounded_operands(seed, monkeypatch, recipe, tied, backend):
    emulated_te.install(monkeypatch.setattr)
    head, arrays, x, dy = head_alone(seed, backend, tied, fp8_recipe=recipe)
    logits = head(x)
    logits.backward(dy)
    assert head.weight.shape == ([384, 128] if tied else [128, 384])
    want = reference(arrays, recipe_of(head.config), tied)
    for got, expected in zip((logits, x.grad, head.weight.grad), want, strict=True):
        close(array(got), expected)


def test_main_gradients_and_the_kept_weight(seed, monkeypatch):
    """Two micro-batches: the head's weight is quantized once, its gradient is in main_grad."""
    emulated_te.install(monkeypatch.setattr)
    head, arrays, x, dy = head_alone(
        seed, "transformer_engine", False, fp8_recipe="current", fuse_wgrad_accumulation=True
    )
    quantized = []
    for first in (True, False):
        with count_entry_points() as counts, fp8.microbatch(first):
            head(x).backward(dy)
        # by our kernel for casts, the only one that is launched here
        quantized.append(sum(count for (name, _), count in counts.items() if name == "launch"))
    assert quantized == [3, 2] and head.weight.grad is None
    want = 2 * reference(arrays, recipe_of(head.config), False)[2]
    np.testing.assert_allclose(head.weight.main_grad.numpy(), want, rtol=1e-5, atol=1e-4)


@both_layouts
@recipes
def test_near_a_head_in_the_activations_precision(seed, recipe, tied):
    config, inputs = dict(fp8_recipe=recipe, tie_word_embeddings=tied), batch(seed)
    plain, head = (make(seed, on, **config) for on in (False, True))
    for _ in range(2):  # the first step is no exception
        (loss, grads), (fp8_loss, fp8_grads) = (step(model, inputs) for model in (plain, head))
        assert fp8_loss == pytest.approx(loss, rel=1e-2) and fp8_loss != loss
        assert fp8_grads.keys() == grads.keys()
        for name, grad in grads.items():
            assert 1e-3 < relative(fp8_grads[name], grad) < 0.4, name


@both_layouts
@pytest.mark.parametrize("use_fp8", [False, True])
def test_without_the_flag_the_head_is_paddlenlps_to_the_bit(seed, use_fp8, tied):
    config, inputs = dict(use_fp8=use_fp8, tie_word_embeddings=tied), batch(seed)
    ours, theirs = (make(seed, False, **config) for _ in range(2))
    theirs.lm_head.__class__ = modeling.LlamaLMHead
    for _ in range(2):
        (loss, grads), (want_loss, want) = (step(model, inputs) for model in (ours, theirs))
        assert loss == want_loss and all((grads[name] == grad).all() for name, grad in want.items())
    assert "lm_head" not in fp8.name_modules(ours)


@pytest.mark.parametrize("granularity", ["full", "core_attn"])
def test_recompute_changes_nothing(seed, granularity):
    config, inputs = dict(recompute=True, recompute_granularity=granularity), batch(seed)
    plain, recomputed = make(seed), make(seed, **config)
    recomputed.recompute_enable()
    for _ in range(3):
        (loss, grads), (other_loss, others) = (step(model, inputs) for model in (plain, recomputed))
        assert loss == other_loss and all((others[name] == grad).all() for name, grad in grads.items())


def test_scales_are_saved_and_restored_to_the_bit(seed, tmp_path):
    inputs, model = batch(seed), make(seed)
    for _ in range(3):
        step(model, inputs)
    recipe = recipe_of(model.config)
    fp8.save(tmp_path / "state", model, recipe)
    saved = fp8.state_dict(model, recipe)["modules"]["lm_head"]
    assert saved["done"] and saved["forward"]["amax_history"].shape == (4, 2)
    assert (saved["forward"]["amax_history"][0] > 0).all() and (saved["backward"]["amax_history"][0] > 0).all()
    again = make(seed)
    fp8.load(tmp_path / "state", again, recipe)
    for _ in range(2):
        (loss, grads), (other_loss, others) = (step(m, inputs) for m in (model, again))
        assert loss == other_loss and all((others[name] == grad).all() for name, grad in grads.items())
    with pytest.raises(ValueError, match="that this model lacks: lm_head; resume with the same flags"):
        fp8.load(tmp_path / "state", make(seed, False), recipe)


def test_evaluation_is_in_fp8_too_and_leaves_no_trace(seed):
    inputs, model = batch(seed), make(seed)
    step(model, inputs)
    recipe = recipe_of(model.config)
    before = fp8.state_dict(model, recipe)["modules"]["lm_head"]
    model.eval()
    with paddle.no_grad():
        logits, plain = model(inputs["input_ids"])[0], modeling.LlamaLMHead.forward
        hidden = model.llama(inputs["input_ids"])[0]
        assert (logits == model.lm_head(hidden)).all() and (logits != plain(model.lm_head, hidden)).any()
    after = fp8.state_dict(model, recipe)["modules"]["lm_head"]
    for direction in ("forward", "backward"):
        for name, value in before[direction].items():
            np.testing.assert_array_equal(after[direction][name], value)


def test_generates(seed):
    model = make(seed, fp8_recipe="current", use_cache=True)
    model.eval()
    tokens, _ = model.generate(paddle.to_tensor([[5, 6, 7]]), max_new_tokens=4, eos_token_id=1000, pad_token_id=0)
    assert tokens.shape == [1, 4]


def test_lora_leaves_the_head_as_it_is(seed):
    inputs, runs = batch(seed), []
    for on in (False, True):
        model = TELoRAModel(make(seed, on), lora_config(Adapter(rank=4)))
        paddle.seed(seed)
        draw_adapters(model)
        for _ in range(2):
            runs.append(step(model, inputs))
    (loss, grads), (fp8_loss, fp8_grads) = runs[1::2]
    assert fp8_loss == pytest.approx(loss, rel=2e-2) and fp8_loss != loss
    assert grads.keys() == fp8_grads.keys() and all("lora_" in name for name in grads)
    for name, grad in grads.items():
        assert relative(fp8_grads[name], grad) < 0.5, name


@pytest.mark.parametrize("config, message", [
    (dict(use_fp8=False), "fp8_lm_head=true needs use_fp8=true; alone"),
    (dict(use_fused_linear_cross_entropy=True), "one is for speed, the other for memory"),
    (dict(vocab_size=100), "each rank has 100 of vocab_size=100; pad the vocabulary"),
    (dict(tensor_parallel_degree=4), "each rank has 24 of vocab_size=96; pad the vocabulary"),
    (dict(fp8_recipe="block"), "block scaling need dimensions divisible by 128, each rank has 96 of vocab_size=96"),
])  # fmt: skip
def test_refused_before_a_weight_is_made(monkeypatch, config, message):
    monkeypatch.setattr(modeling.LlamaForCausalLM, "__init__", lambda *_: pytest.fail("a model was built"))
    with pytest.raises(ValueError, match=message):
        make(1, **config)
