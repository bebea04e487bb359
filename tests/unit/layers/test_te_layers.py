"""te's layers with TE's kernels emulated in NumPy (tests/emulated_te.py): their logic, on any machine.

tests/gpu/test_layers.py asks the same of the real library on a GPU.
"""

from types import SimpleNamespace

import paddle
import pytest

from paddle_te import fp8, native
from paddle_te.distributed import Pending
from paddle_te.layers import DotProductAttention, LayerNormLinear, RotaryPositionEmbedding
from paddle_te.ops import get_ops
from paddle_te.ops.heads import Attention, Heads, Scores
from paddle_te.ops.norms import Norm
from paddle_te.ops.projection import Projection
from paddle_te.ops.te import float8_attention, program
from paddle_te.ops.te.counting import count_entry_points
from tests import emulated_te, layer_cases
from tests.layer_cases import ATTENTION, BLOCKS, KINDS, RECIPES, WITHOUT_HEADS, case, make, run, te
from tests.poison import poison_allocations
from tests.te_weights import relative


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)


@pytest.mark.parametrize(
    "kind, kv_heads", [(kind, kv_heads) for kind in KINDS for kv_heads in ([4] if kind in WITHOUT_HEADS else [4, 2])]
)
def test_16_bits(seed, kind, kv_heads):
    values, inputs, grads, truth = case(kind, 4, kv_heads, 2, 24, seed)
    got = run(te(kind, 4, kv_heads), values, inputs, grads, "bfloat16")
    assert got.keys() == truth.keys()
    for name, want in truth.items():
        assert relative(got[name], want) < layer_cases.bf16_bounds(kind)[0], name


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("kind", ["qk_norm_zero_centered", "rotation_interleaved_of_a_part"])
def test_rotation_and_cast_in_one_pass(seed, monkeypatch, kind, kv_heads):
    layer_cases.check_rotation_cast("cpu", monkeypatch, kind, kv_heads, seed)


@pytest.mark.parametrize("backend, dtype", [("transformer_engine", "bfloat16"), ("paddle", "float32")])
def test_softmax_scale(seed, backend, dtype):
    layer_cases.check_softmax_scale(backend, dtype)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind, kv_heads", [
    ("linear_bias", 4), ("linear_in_out", 4), ("transformer", 4), ("kv_channels", 2), ("qkv_bias", 2), ("gpt", 4),
    ("mlp_geglu", 4), ("mlp_geglu_bias", 4), ("mlp_gelu", 4), ("mlp_relu_bias", 4), ("norms_after", 2),
    ("latent", 4), ("latent_direct", 4),
])  # fmt: skip
def test_fp8(seed, kind, kv_heads, recipe):
    layer_cases.check_fp8("cpu", kind, 4, kv_heads, 2, 32, seed, RECIPES[recipe])


@pytest.mark.parametrize("recipe", BLOCKS)
@pytest.mark.parametrize("kind, kv_heads", [
    ("linear_bias", 4), ("linear_in_out", 4), ("layernorm_linear_bias", 4), ("mlp_geglu_bias", 4), ("mlp_gelu", 4),
    ("transformer", 4), ("gpt", 2), ("norms_after", 4), ("latent", 4),
])  # fmt: skip
def test_block_scaling(seed, kind, kv_heads, recipe):
    layer_cases.check_fp8("cpu", kind, 4, kv_heads, 2, 64, seed, BLOCKS[recipe])


@pytest.mark.parametrize("backend, dtype", [("transformer_engine", "bfloat16"), ("paddle", "float32")])
@pytest.mark.parametrize("kind, recipe", [*layer_cases.STORED, ("transformer", "current")])
def test_weights_in_fp8_only(seed, kind, recipe, backend, dtype):
    layer_cases.check_stored_weights("cpu", kind, backend, dtype, recipe)


@pytest.mark.parametrize("kind", layer_cases.FIRST_STEP)
def test_the_first_step_of_delayed_scaling(seed, kind):
    layer_cases.check_first_step("cpu", kind, seed)


@pytest.mark.parametrize("recipe", [layer_cases.FROM_CURRENT, ATTENTION["dpa"]], ids=["gemms", "attention"])
def test_the_first_steps_programs_are_recorded_once(recipe):
    """In the first step's micro-batches, one that quantizes the weights and later ones; and so once more in the second
    step, for all layers and the steps to come."""
    layers, freqs = [te("transformer", 2, 2, 128).layer for _ in range(2)], RotaryPositionEmbedding(128)(16)
    program.clear()
    recorded = []
    for _ in range(4):
        for first in (True, False, False):
            x = paddle.ones([1, 16, 256], "bfloat16")
            x.stop_gradient = False
            with fp8.fp8_autocast(True, recipe), fp8.microbatch(first):
                for layer in layers:
                    x = layer(x, None, freqs)
                x.sum().backward()
            recorded.append(program.program_of.cache_info().misses)
    of_first, of_later = recorded[:2]
    assert 0 < of_first < of_later
    assert recorded == [of_first, of_later, of_later, of_later + of_first, *[2 * of_later] * 8]


@pytest.mark.parametrize("recipe", ATTENTION)
@pytest.mark.parametrize(
    "kind, kv_heads", [("dot_product_attention", 2), ("multi_head_attention", 2), ("unrotated", 2), ("transformer", 1)]
)
def test_fp8_attention(seed, kind, kv_heads, recipe):
    layer_cases.check_fp8("cpu", kind, 2, kv_heads, 2, 48, seed, ATTENTION[recipe], head_dim=128)


@pytest.mark.parametrize("kind", ["dot_product_attention", "multi_head_attention", "transformer"])
def test_fp8_attention_in_the_first_step(seed, kind):
    layer_cases.check_fp8("cpu", kind, 2, 1, 2, 48, seed, ATTENTION["dpa"], head_dim=128, steps=1)


@pytest.mark.parametrize("steps", [1, 3])
def test_fp8_attention_rounds_what_the_emulation_rounds(seed, steps):
    """Closer to it than either is to the truth: a rounding that is missing, or one too many, shows."""
    values, inputs, grads, _ = case("dot_product_attention", 4, 2, 2, 64, seed, 128)
    inputs[2][:, 0] /= 128  # else exact ties: see test_attention in tests/unit/fp8/test_emulation.py
    truth = run(make("dot_product_attention", 4, 2, 128, backend="paddle")[0], values, inputs, grads, "float32")
    for recipe in ATTENTION.values():
        paddle_layer, _ = make("dot_product_attention", 4, 2, 128, backend="paddle")
        want = run(paddle_layer, values, inputs, grads, "float32", recipe, steps)
        got = run(te("dot_product_attention", 4, 2, 128), values, inputs, grads, "bfloat16", recipe, steps)
        for name in truth:
            assert relative(got[name], want[name]) < 0.3 * relative(want[name], truth[name]), (recipe, name)


def test_amaxes_of_micro_batches(seed):
    layer_cases.check_amaxes_of_micro_batches("cpu", seed)


@pytest.mark.parametrize("backend", ["paddle", "transformer_engine"])
def test_what_fp8_attention_cannot_is_refused_before_anything_runs(monkeypatch, backend):
    dtype = {"paddle": "float32", "transformer_engine": "bfloat16"}[backend]
    layer = make("multi_head_attention", 2, 2, 128, backend=backend, params_dtype=dtype)[0].layer
    x, freqs = paddle.ones([1, 16, 256]).astype(dtype), RotaryPositionEmbedding(128)(16)
    monkeypatch.setattr(layer.layernorm_qkv, "forward", lambda *_: pytest.fail("a kernel ran"))
    with fp8.fp8_autocast(True, ATTENTION["dpa"]):
        with pytest.raises(ValueError, match="fp8_dpa: .* no attention mask.*leave fp8_dpa out"):
            layer(x, freqs, paddle.zeros([1, 1, 16, 16]))
        with pytest.raises(ValueError, match="fp8_dpa: .* no key-value cache"):
            layer(x, freqs, use_cache=True)
        with pytest.raises(ValueError, match="fp8_dpa: .* no sliding window"):
            q = paddle.ones([1, 16, 2, 128]).astype(dtype)
            DotProductAttention(128, backend, window_size=(4, 0))(q, q, q)
        with pytest.raises(ValueError, match="fp8_dpa: .* no attn_mask_type='no_mask'"):
            q = paddle.ones([1, 16, 2, 128]).astype(dtype)
            DotProductAttention(128, backend, attn_mask_type="no_mask")(q, q, q)
        if backend == "transformer_engine":
            for training in True, False:
                layer.train() if training else layer.eval()
                with pytest.raises(ValueError, match="sequences of 12 tokens; .* multiples of 16"):
                    layer(x[:, :12], freqs)  # in evaluation too: a backward may follow
            layer.train()
        with pytest.raises(ValueError, match="fp8_dpa: .* no key-value cache"):
            q = paddle.ones([1, 1, 2, 128]).astype(dtype)
            layer.core_attention(q, *[paddle.ones([1, 16, 2, 128]).astype(dtype)] * 2)


@pytest.mark.parametrize("value, deterministic", [(None, False), ("1", False), ("0", True)])
def test_the_switch_for_equal_bits_reaches_cudnn(monkeypatch, seed, value, deterministic):
    """NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 is what the launcher's DETERMINISTIC=1 sets."""
    name = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    library, seen = native.load(), []
    attention_bwd = library.attention_bwd

    def spy(*arguments):
        seen.append(arguments[14])
        return attention_bwd(*arguments)

    monkeypatch.setattr(library, "attention_bwd", spy)
    values, inputs, grads, _ = case("transformer", 4, 2, 2, 40, seed)  # a length that no other test has recorded
    run(te("transformer", 4, 2), values, inputs, grads, "bfloat16")
    assert seen and set(seen) == {deterministic}


def test_deterministic_fp8_attention_needs_a_cudnn_that_has_it(monkeypatch):
    check = get_ops("transformer_engine").check_fp8_attention
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    monkeypatch.setattr(float8_attention, "cudnn_version", lambda: (9, 18))
    with pytest.raises(ValueError, match="cuDNN 9.18 has no deterministic backward.*fp8_dpa_bwd"):
        check(128)
    check(128, backward=False)
    check(64, 37, backward=False)
    monkeypatch.setattr(float8_attention, "cudnn_version", lambda: (9, 19))
    check(128)


@pytest.mark.parametrize("capability, head_dim, message", [
    ((8, 9), 128, "compute capability 9.0 to 11, not 8.9"),
    ((12, 0), 128, "compute capability 9.0 to 11, not 12.0"),
    ((9, 0), 64, "heads have 64 numbers; .* takes 128, and with fp8_dpa_bwd=False multiples of 16 up to 256"),
    ((10, 0), 72, "heads have 72 numbers; .* multiples of 16 up to 128"),
    ((9, 0), 128, None),
    ((10, 0), 64, None),
])  # fmt: skip
def test_gpus_and_heads_that_have_fp8_attention(monkeypatch, capability, head_dim, message):
    monkeypatch.setattr(emulated_te.Stream, "capability", capability)
    if message is None:
        return get_ops("transformer_engine").check_fp8_attention(head_dim)
    with pytest.raises(ValueError, match=f"fp8_dpa.*{message}"):
        get_ops("transformer_engine").check_fp8_attention(head_dim)


@pytest.mark.parametrize("where", [True, "grad"])
@pytest.mark.parametrize("recipe", [None, "delayed", "current", "block"])
def test_gradients_add_up_inside_the_gemms(seed, recipe, where):
    layer_cases.check_gradients_add_up("cpu", case("gpt", 4, 2, 2, 64, seed), (RECIPES | BLOCKS).get(recipe), where)


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
@pytest.mark.parametrize("frozen", ["input", "weights", "norms"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(seed, frozen, recipe):
    values, inputs, grads, _ = case("transformer", 4, 4, 2, 32, seed)
    want = run(te("transformer", 4, 4), values, inputs, grads, "bfloat16", RECIPES.get(recipe))
    layer = te("transformer", 4, 4)
    for name, parameter in layer.named_parameters():
        parameter.set_value(paddle.to_tensor(values[name]).astype("bfloat16"))
        parameter.stop_gradient = frozen == ("weights" if parameter.ndim == 2 else "norms")
    x = paddle.to_tensor(inputs[0]).astype("bfloat16").detach()
    x.stop_gradient = frozen == "input"
    with fp8.fp8_autocast(recipe is not None, RECIPES.get(recipe)):
        layer(x).backward(paddle.to_tensor(grads[0]).astype("bfloat16"))
    got = {f"d{name}": p for name, p in layer.named_parameters()} | {"dx0": x}
    for name, tensor in got.items():
        assert (tensor.grad is None) == tensor.stop_gradient, name
        if tensor.grad is not None:
            assert (tensor.grad.astype("float32").numpy() == want[name]).all(), name


@pytest.mark.parametrize("recipe", [None, "delayed", "current", "dpa", "dpa_forward"])
def test_self_attention_at_once_is_what_its_layers_compute(seed, recipe):
    """A hook, as sharding stage 3 has them, makes MultiHeadAttention call its layers one by one."""
    recipes, head_dim = (ATTENTION, 128) if recipe in ATTENTION else (RECIPES, 64)
    values, inputs, grads, _ = case("gpt", 4, 2, 2, 32, seed, head_dim)
    results, calls = [], []
    for hooked in False, True:
        layer = te("gpt", 4, 2, head_dim)
        if hooked:
            layer.layer.self_attention.proj.register_forward_pre_hook(lambda *_: calls.append(1))
        results.append(run(layer, values, inputs, grads, "bfloat16", recipes.get(recipe), steps=3))
    assert len(calls) == 3
    at_once, one_by_one = results
    for name, value in one_by_one.items():
        assert (at_once[name] == value).all(), name


@pytest.mark.parametrize("recipe, options, read", [
    (None, {}, ["qkv", "proj", "fc1", "fc2"]), ("delayed", {}, []), ("block", {}, []),
    ("delayed", dict(recompute_modules=("layernorm", "mlp")), ["fc1"]),
    ("delayed", dict(mlp_chunk_tokens=32), ["fc1", "fc2"]),
])  # fmt: skip
def test_a_backward_in_fp8_reads_no_weights(seed, recipe, options, read):
    """It says so, and sharding stage 3 leaves them without memory then. What it computes again reads them."""
    values, inputs, grads, _ = case("transformer", 4, 2, 2, 64, seed)
    options = dict(backend="transformer_engine", params_dtype="bfloat16", fuse_wgrad_accumulation=True) | options
    found = []
    for taken in False, True:
        layer, _ = make("transformer", 4, 2, **options)
        for name, parameter in layer.named_parameters():
            parameter.set_value(paddle.to_tensor(values[name]).astype("bfloat16"))
        x = paddle.to_tensor(inputs[0]).astype("bfloat16").detach()
        x.stop_gradient = False
        with fp8.fp8_autocast(recipe is not None, (RECIPES | BLOCKS).get(recipe)):
            y = layer(x)
        weights = [parameter for parameter in layer.parameters() if parameter.ndim == 2]
        names = zip(("qkv", "proj", "fc1", "fc2"), weights, strict=True)
        assert [name for name, weight in names if weight.read_in_backward] == read
        for weight in weights:
            if taken and not weight.read_in_backward:
                weight._clear_data()
        y.backward(paddle.to_tensor(grads[0]).astype("bfloat16"))
        found.append([x.grad, *[weight.main_grad for weight in weights]])
    for want, got in zip(*found, strict=True):
        assert (got == want).all()


def test_nothing_before_a_trained_projection_runs_backward(seed):
    values, inputs, grads, _ = case("transformer", 4, 2, 2, 32, seed)
    want = run(te("transformer", 4, 2), values, inputs, grads, "bfloat16")
    layer = te("transformer", 4, 2)
    for name, parameter in layer.named_parameters():
        parameter.set_value(paddle.to_tensor(values[name]).astype("bfloat16"))
        parameter.stop_gradient = not name.endswith("proj.weight")
    x = paddle.to_tensor(inputs[0]).astype("bfloat16")
    with count_entry_points() as counts:
        layer(x).backward(paddle.to_tensor(grads[0]).astype("bfloat16"))
    proj = layer.layer.self_attention.proj.weight
    assert (proj.grad.astype("float32").numpy() == want["dlayer.self_attention.proj.weight"]).all()
    assert not any(name == "attention_bwd" for name, _ in counts)


def tensors(dtype, *shapes):
    return [paddle.ones(shape).astype(dtype) for shape in shapes]


OPERANDS = {
    "normalize": dict(x=[4, 16], ln_weight=[16], ln_bias=[16]),
    "linear": dict(x=[4, 16], weight=[32, 16], bias=[32], residual=[4, 32]),
    "layernorm_linear": dict(x=[4, 16], ln_weight=[16], ln_bias=[16], weight=[32, 16], bias=[32]),
    "layernorm_mlp": dict(
        x=[4, 16], ln_weight=[16], ln_bias=[16], fc1_weight=[64, 16], fc1_bias=[64], fc2_weight=[16, 32], fc2_bias=[16]
    ),
    "self_attention": dict(
        x=[1, 4, 64], ln_weight=[64], qkv_weight=[192, 64], qkv_bias=[192], freqs=[4, 16], proj_weight=[64, 64],
        proj_bias=[64],
    ),
}  # fmt: skip
PROJECTIONS = {
    "normalize": {},
    "linear": {"": "projection"},
    "layernorm_linear": {"": "projection"},
    "layernorm_mlp": {"fc1_": "fc1", "fc2_": "fc2"},
    "self_attention": {"qkv_": "qkv", "proj_": "proj"},
}  # {what an operand's name begins with: the argument}
CALLED = {"ln_weight": "the norm's weight", "ln_bias": "the norm's bias", "freqs": "rotary_pos_emb"}
CALLED |= {f"{part}_{what}": what for part in ("qkv", "proj") for what in ("weight", "bias")}


@pytest.mark.parametrize("function", OPERANDS)
def test_operands_that_do_not_fit_are_refused_before_anything_runs(function):
    """The kernels would read their memory all the same, in x's dtype and shape."""
    op, shapes = getattr(get_ops("transformer_engine"), function), OPERANDS[function]
    operands = {n: paddle.ones(s).astype("float32" if n == "freqs" else "bfloat16") for n, s in shapes.items()}

    def call(**changed):
        given = operands | changed
        if "ln_weight" in given:
            given["norm"] = Norm(given.pop("ln_weight"), 1e-5, given.pop("ln_bias", None))
        for prefix, argument in PROJECTIONS[function].items():
            given[argument] = Projection(given.pop(f"{prefix}weight"), given.pop(f"{prefix}bias"))
        options = dict(heads=Heads(4, 4), attention=Attention(Scores(0.25))) if function == "self_attention" else {}
        return op(**given, **options)

    with count_entry_points() as counts:
        for name in sorted(operands.keys() - {"x"}):
            called, tensor = CALLED.get(name, name), operands[name]
            with pytest.raises(TypeError, match=f"{called} is"):
                call(**{name: tensor.astype("bfloat16" if name == "freqs" else "float32")})
            with pytest.raises(ValueError, match=f"head sizes differ|{called} is|weight is"):
                other = paddle.concat([tensor] * 2, -1) if name == "freqs" else tensor[..., : tensor.shape[-1] // 2]
                call(**{name: other})
        with pytest.raises(ValueError, match="no elements"):
            call(x=operands["x"][:0])
    assert not counts
    call()


def test_a_bias_beside_a_weight_of_the_other_layout_is_refused():
    x, weight, bias = tensors("bfloat16", [4, 16], [16, 32], [32])
    with pytest.raises(ValueError, match="beside weights .out, in. alone"):
        get_ops("transformer_engine").linear(x, Projection(weight, bias), transpose_y=False)


@pytest.mark.parametrize("amax_ranks, gathered", [([0, 1, 2, 3], paddle.uint8), ([0, 2], paddle.bfloat16)])
def test_fp8_bytes_travel_only_among_ranks_that_share_amaxes(amax_ranks, gathered):
    """Rank 1 of ranks 0 and 1, sequence parallel; a group across data parallel ranks leaves the two other scales."""
    dtypes = []
    tp = SimpleNamespace(rank=1, size=2, sequence_parallel=True, group=SimpleNamespace(ranks=[0, 1]))
    tp.all_gather = lambda x: dtypes.append(x.dtype) or paddle.concat([x, x])
    tp.start_all_gather = lambda x: Pending(tp.all_gather(x))
    tp.scattered_shape = lambda shape: [shape[0] // 2, *shape[1:]]
    tp.start_reduce_output = lambda y: Pending(y[: y.shape[0] // 2])
    layer = LayerNormLinear(32, 48, params_dtype="bfloat16")
    layer.tp = type("Ranks", (), vars(tp))  # hashable
    x = paddle.ones([16, 32], "bfloat16")
    group = type("Group", (), dict(nranks=len(amax_ranks), ranks=amax_ranks))
    with fp8.fp8_autocast(fp8_recipe=fp8.DelayedScaling(first_step="delayed"), fp8_group=group):
        y, _ = layer(x)
    y.sum().backward()
    assert y.shape == [32, 48] and dtypes == [gathered] * 2


def test_fp8_is_refused_before_its_first_kernel_where_the_gpu_has_none(monkeypatch):
    te, problem = native.load(), native.Problem("a visible GPU has compute capability 8.0", "train in bf16")

    def load(fp8=False):
        if fp8:
            raise native.BackendUnavailable([problem])
        return te

    monkeypatch.setattr(native, "load", load)
    layer, x = LayerNormLinear(32, 48, params_dtype="bfloat16"), paddle.ones([16, 32], "bfloat16")
    layer(x)
    with count_entry_points() as counts, fp8.fp8_autocast(), pytest.raises(native.BackendUnavailable, match="8.0"):
        layer(x)
    assert not counts


@pytest.mark.parametrize("keys", [1, 2, 9])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [-1, 5])
def test_one_token_with_sinks(seed, keys, masked, window):
    """TE 2.20 answers on a GPU: "decode only mode, i.e. s_q == 1, not supported with sink_token"."""
    q, k, v = (paddle.randn([2, length, heads, 64]) for length, heads in ((1, 4), (keys, 2), (keys, 2)))
    offset, scores = paddle.randn([4]), Scores(64**-0.5, True, window)
    mask = paddle.zeros([2, 1, 1, keys])
    mask[1, :, :, : keys // 2] = -1e9  # padding on the left
    attention, mask = Attention(scores, offset), mask if masked else None
    want = get_ops("paddle").dot_product_attention(q, k, v, attention, mask)
    q, k, v = (each.astype("bfloat16") for each in (q, k, v))
    for _ in range(2):  # what a mask becomes is kept on it
        got = get_ops("transformer_engine").dot_product_attention(q, k, v, attention, mask)
        assert got.shape == [2, 1, 256] and relative(got.astype("float32"), want) < 1e-2
