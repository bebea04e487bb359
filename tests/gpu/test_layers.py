"""Every te layer against pd: float32 on the CPU as the truth, and pd in the same precision as the yardstick."""

import paddle
import pytest

from paddle_te import fp8
from paddle_te.layers import Linear
from paddle_te.ops.te.counting import count_entry_points
from tests import kernel_cases, layer_cases
from tests.layer_cases import ATTENTION, BLOCKS, KINDS, RECIPES, WITHOUT_HEADS, case, make, run, te
from tests.mlp_chunk_cases import CHUNK, GPT, LLAMA, check, train
from tests.mlp_chunk_cases import RECIPES as MLP_RECIPES
from tests.te_weights import relative


@pytest.mark.parametrize("batch, sequence", [(2, 64), (3, 37)])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_bf16(gpu, poisoned, seed, kind, heads, kv_heads, batch, sequence):
    if kind in WITHOUT_HEADS and kv_heads != heads:
        pytest.skip("this layer has no heads")
    values, inputs, grads, truth = case(kind, heads, kv_heads, batch, sequence, seed)
    # the yardstick: the same operations, plainly in bf16
    paddle.set_device(gpu)
    plain_layer, _ = make(kind, heads, kv_heads, backend="paddle", params_dtype="bfloat16")
    plain = run(plain_layer, values, inputs, grads, "bfloat16")
    got = run(te(kind, heads, kv_heads), values, inputs, grads, "bfloat16")
    assert got.keys() == truth.keys()
    most, times = layer_cases.bf16_bounds(kind)
    for name, want in truth.items():
        error, bound = relative(got[name], want), relative(plain[name], want)
        assert error < most and error <= times * bound + 1e-4, (name, error, bound)


@pytest.mark.parametrize(
    "recipe",
    [None, RECIPES["delayed"], RECIPES["current"], BLOCKS["block"]],
    ids=["bf16", "delayed", "current", "block"],
)
@pytest.mark.parametrize("parts", [("layernorm", "mlp_act", "core_attn"), ("layernorm", "mlp")], ids=" ".join)
@pytest.mark.parametrize("kind", ["transformer", "gpt"])
def test_parts_that_are_computed_again(gpu, poisoned, monkeypatch, seed, kind, parts, recipe):
    """Every bit is the same, where attention's backward adds without atomics."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    values, inputs, grads, _ = case(kind, 4, 2, 2, 64, seed)
    paddle.set_device(gpu)

    def train(parts):
        shared = dict(backend="transformer_engine", params_dtype="bfloat16", recompute_modules=parts)
        return run(make(kind, 4, 2, **shared)[0], values, inputs, grads, "bfloat16", recipe, steps=3)

    got = train(parts)
    for name, want in train(()).items():
        assert (got[name] == want).all(), name


@pytest.mark.parametrize("recipe, bound", [("16bits", 1e-2), ("delayed", 0.1), ("block", 0.1), ("current", 0.2)])
@pytest.mark.parametrize("options, micro_batches", [(LLAMA, 2), (GPT, 1)], ids=["llama", "gpt"])
def test_the_mlp_in_chunks_of_tokens(gpu, poisoned, seed, options, micro_batches, recipe, bound):
    """As tests/unit/layers/test_mlp_chunks.py; cuBLAS adds up in another order for fewer rows, so that more numbers
    round to a neighbour."""
    paddle.set_device(gpu)
    given = seed, "transformer_engine", MLP_RECIPES[recipe], micro_batches
    (want, _), (got, _) = train(*given, **options), train(*given, mlp_chunk_tokens=CHUNK, **options)
    check(want, got, bound)


def test_softmax_scale(gpu, poisoned, seed):
    """Yarn's attention factor is in it."""
    paddle.set_device(gpu)
    layer_cases.check_softmax_scale("transformer_engine", "bfloat16")


@pytest.mark.parametrize("kind, recipe", layer_cases.STORED)
def test_weights_in_fp8_only(gpu, poisoned, seed, kind, recipe):
    """Not of whole layers, as attention's backward on the GPU adds in no fixed order."""
    layer_cases.check_stored_weights(gpu, kind, "transformer_engine", "bfloat16", recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind, heads, kv_heads, batch, sequence", [
    ("linear", 4, 4, 2, 64),
    ("linear_in_out", 4, 4, 2, 64),
    ("layernorm_linear", 4, 4, 3, 48),
    ("layernorm_linear_bias", 4, 4, 3, 48),
    ("layernorm_mlp", 4, 4, 1, 80),
    ("linear_bias", 4, 4, 2, 64),
    ("layernorm_linear_zero_centered", 4, 4, 3, 48),
    ("mlp_geglu", 4, 4, 1, 80),
    ("mlp_geglu_bias", 4, 4, 3, 48),
    ("mlp_gelu", 4, 4, 1, 80),
    ("mlp_relu_bias", 4, 4, 3, 48),
    ("gpt", 4, 2, 2, 64),
    ("multi_head_attention", 4, 2, 2, 64),
    ("transformer", 4, 4, 3, 48),
    ("transformer", 4, 1, 2, 64),
    ("kv_channels", 4, 2, 2, 64),
    ("qkv_bias", 4, 2, 2, 64),
    ("qk_norm", 4, 2, 2, 64),
    ("rotation_interleaved_of_a_part", 4, 2, 2, 64),
    ("norms_after", 4, 2, 2, 64),
    ("norms_before_and_after", 4, 2, 2, 64),
    ("qk_norm_over_all", 4, 2, 2, 64),
    ("latent", 4, 4, 2, 64),
    ("latent_direct", 4, 4, 2, 64),
])  # fmt: skip
def test_fp8(gpu, poisoned, seed, kind, heads, kv_heads, batch, sequence, recipe):
    layer_cases.check_fp8(gpu, kind, heads, kv_heads, batch, sequence, seed, RECIPES[recipe])


@pytest.mark.parametrize("options", kernel_cases.OPTIONS)
@pytest.mark.parametrize("recipe", kernel_cases.RECIPES)
def test_our_kernels_have_the_bits_of_te_s_functions(gpu, poisoned, seed, monkeypatch, recipe, options):
    recipe, options = kernel_cases.RECIPES[recipe], kernel_cases.OPTIONS[options]
    kernel_cases.check_the_librarys_bits(seed, monkeypatch, recipe, options)


@pytest.mark.parametrize("options", kernel_cases.OF_TRANSFORMER)
@pytest.mark.parametrize("recipe", kernel_cases.RECIPES)
def test_our_kernels_have_the_bits_of_te_s_functions_in_a_layer(gpu, poisoned, seed, monkeypatch, recipe, options):
    """Where attention's backward adds without atomics."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    recipe, options = kernel_cases.RECIPES[recipe], kernel_cases.OF_TRANSFORMER[options]
    kernel_cases.check_the_librarys_bits(seed, monkeypatch, recipe, options, kernel_cases.transformer)


@pytest.mark.parametrize("kind", layer_cases.FIRST_STEP)
def test_the_first_step_of_delayed_scaling(gpu, poisoned, seed, kind):
    layer_cases.check_first_step(gpu, kind, seed)


@pytest.mark.parametrize("recipe", BLOCKS)
@pytest.mark.parametrize("kind, kv_heads", [
    ("layernorm_linear_bias", 4), ("layernorm_mlp", 4), ("mlp_geglu_bias", 4), ("mlp_gelu", 4), ("mlp_relu_bias", 4),
    ("transformer", 4), ("qkv_bias", 2), ("gpt", 2), ("latent", 4),
])  # fmt: skip
def test_block_scaling(gpu, poisoned, seed, kind, kv_heads, recipe):
    layer_cases.check_fp8(gpu, kind, 4, kv_heads, 2, 64, seed, BLOCKS[recipe])


@pytest.mark.parametrize("recipe", BLOCKS)
@pytest.mark.parametrize("kind", ["linear", "linear_bias", "linear_in_out"])
def test_block_scaling_rounds_as_pd_does(gpu, poisoned, seed, kind, recipe):
    """Operands have the same bits, so that only the results' rounding to bf16 is left."""
    values, inputs, grads, _ = case(kind, 4, 4, 2, 64, seed)
    plain, _ = make(kind, 4, 4, backend="paddle", params_dtype="float32")
    want = run(plain, values, inputs, grads, "float32", BLOCKS[recipe])
    paddle.set_device(gpu)
    got = run(te(kind, 4, 4), values, inputs, grads, "bfloat16", BLOCKS[recipe])
    for name, value in want.items():
        assert relative(got[name], value) < 5e-3, name


@pytest.mark.parametrize("head_dim, sequence", [(64, 48), (96, 64), (256, 128), (128, 37)])
def test_fp8_attention_forward_alone(gpu, poisoned, seed, head_dim, sequence):
    layer_cases.check_fp8(gpu, "dot_product_attention", 2, 1, 1, sequence, seed, ATTENTION["dpa_forward"], head_dim)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("kind", ["qk_norm", "qk_norm_zero_centered", "transformer", "rotation_interleaved_of_a_part"])
def test_rotation_and_cast_in_one_pass(gpu, poisoned, monkeypatch, seed, kind, kv_heads):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    layer_cases.check_rotation_cast(gpu, monkeypatch, kind, kv_heads, seed)


@pytest.mark.parametrize("recipe", ATTENTION)
@pytest.mark.parametrize("kind, heads, kv_heads, batch, sequence", [
    ("dot_product_attention", 4, 4, 2, 256),
    ("dot_product_attention", 4, 2, 2, 128),
    ("multi_head_attention", 2, 2, 2, 256),
    ("multi_head_attention", 4, 1, 1, 128),
    ("transformer", 2, 1, 3, 80),
    ("qk_norm", 2, 1, 3, 80),
    ("rotation_interleaved_of_a_part", 2, 1, 3, 80),
    ("dot_product_attention", 2, 1, 2, 16),
    ("dot_product_attention", 2, 1, 2, 144),
    ("dot_product_attention", 2, 1, 2, 176),
])  # fmt: skip
def test_fp8_attention(gpu, poisoned, seed, kind, heads, kv_heads, batch, sequence, recipe):
    layer_cases.check_fp8(gpu, kind, heads, kv_heads, batch, sequence, seed, ATTENTION[recipe], head_dim=128)


@pytest.mark.parametrize("kind", ["dot_product_attention", "multi_head_attention", "transformer"])
def test_fp8_attention_in_the_first_step(gpu, poisoned, seed, kind):
    layer_cases.check_fp8(gpu, kind, 2, 1, 2, 256, seed, ATTENTION["dpa"], head_dim=128, steps=1)


def test_fp8_attention_is_really_on(gpu, seed):
    """Its kernels have fp8 operands, and its output another rounding than with the GEMMs alone in fp8."""
    values, inputs, grads, _ = case("multi_head_attention", 2, 1, 1, 128, seed, 128)
    paddle.set_device(gpu)
    # with the tensors' own scales the kernels run until their amaxes are known
    for recipe, runs in ((ATTENTION["dpa"], 3), (ATTENTION["dpa_from_one"], 1)):
        with count_entry_points() as counts:
            on = run(te("multi_head_attention", 2, 1, 128), values, inputs, grads, "bfloat16", recipe)
        assert counts["attention_fwd", "fp8"] == counts["attention_bwd", "fp8"] == runs
    off = run(te("multi_head_attention", 2, 1, 128), values, inputs, grads, "bfloat16", RECIPES["delayed"])
    assert not (on["y0"] == off["y0"]).all()


def test_amaxes_of_micro_batches(gpu, monkeypatch, seed):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    layer_cases.check_amaxes_of_micro_batches(gpu, seed)


@pytest.mark.parametrize("recipe", ATTENTION)
def test_two_runs_of_fp8_attention_are_equal_to_the_bit(gpu, monkeypatch, seed, recipe):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    values, inputs, grads, _ = case("transformer", 4, 2, 2, 256, seed, 128)
    paddle.set_device(gpu)
    layers = [te("transformer", 4, 2, 128) for _ in range(2)]
    first, second = (run(layer, values, inputs, grads, "bfloat16", ATTENTION[recipe], steps=2) for layer in layers)
    for name in first:
        assert (first[name] == second[name]).all(), name


def test_fp8_attention_refuses_other_heads(gpu):
    layer = te("multi_head_attention", 4, 4)
    with fp8.fp8_autocast(True, ATTENTION["dpa"]), pytest.raises(ValueError, match="64.*takes"):
        layer(paddle.ones([1, 16, 256]).astype("bfloat16"))


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_two_runs_are_equal_to_the_bit(gpu, monkeypatch, seed, recipe):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    values, inputs, grads, _ = case("transformer", 4, 2, 2, 64, seed)
    paddle.set_device(gpu)
    first, second = (
        run(te("transformer", 4, 2), values, inputs, grads, "bfloat16", RECIPES.get(recipe), steps=2) for _ in range(2)
    )
    for name in first:
        assert (first[name] == second[name]).all(), name


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_a_side_stream_gives_the_same_bits(gpu, monkeypatch, seed, recipe):
    """All on a side stream, busy with something long, and nothing that synchronises before the results are read."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    values, inputs, grads, _ = case("transformer", 4, 2, 2, 64, seed)
    paddle.set_device(gpu)
    want = run(te("transformer", 4, 2), values, inputs, grads, "bfloat16", RECIPES.get(recipe), steps=2)
    layer = te("transformer", 4, 2)
    side = paddle.device.Stream()
    side.wait_stream(paddle.device.current_stream())
    with paddle.device.stream_guard(side):
        got = run(layer, values, inputs, grads, "bfloat16", RECIPES.get(recipe), steps=2)
    for name in want:
        assert (got[name] == want[name]).all(), name


@pytest.mark.parametrize("where", [True, "grad"])
@pytest.mark.parametrize("recipe", [None, "delayed", "current", "block"])
def test_gradients_add_up_inside_the_gemms(gpu, seed, recipe, where):
    layer_cases.check_gradients_add_up(gpu, case("gpt", 4, 2, 2, 64, seed), (RECIPES | BLOCKS).get(recipe), where)


@pytest.mark.parametrize("kind", ["linear", "linear_in_out"])
def test_cached_weights_serve_later_micro_batches(gpu, seed, kind):
    values, inputs, grads, _ = case(kind, 4, 4, 2, 64, seed)
    paddle.set_device(gpu)
    layer = te(kind, 4, 4)
    layer.weight.set_value(paddle.to_tensor(values["weight"]).astype("bfloat16"))
    x = paddle.to_tensor(inputs[0]).astype("bfloat16")

    def y(first):
        with fp8.fp8_autocast(True, RECIPES["current"]):
            return layer(x, is_first_microbatch=first).astype("float32").numpy()

    first = y(True)
    layer.weight.set_value(layer.weight * 2)
    assert (y(False) == first).all(), "the kept fp8 weight was not used"
    assert not (y(None) == first).all()


@pytest.mark.parametrize("tokens, recipe, message", [(37, "current", "tokens 37"), (37, None, None)])
def test_sizes_that_fp8_cannot_have_are_refused(gpu, tokens, recipe, message):
    layer = Linear(layer_cases.HIDDEN, layer_cases.FFN, params_dtype="bfloat16")
    x = paddle.ones([1, tokens, layer_cases.HIDDEN]).astype("bfloat16")
    with fp8.fp8_autocast(recipe is not None, RECIPES.get(recipe)):
        if message is None:
            layer(x)
        else:
            with pytest.raises(ValueError, match=message):
                layer(x)


def test_dtypes_that_te_does_not_have_are_refused(gpu):
    with pytest.raises(TypeError, match="bfloat16 or float16"):
        Linear(layer_cases.HIDDEN, layer_cases.FFN, params_dtype="float32")(paddle.ones([1, 16, layer_cases.HIDDEN]))
