import numpy as np
import paddle
import pytest

from paddle_te.configs.families import FAMILIES
from paddle_te.configs.spec import spec_of
from paddle_te.hosts.paddlenlp.capabilities import PADDLENLP
from paddle_te.weights import CheckpointError, native_to_te, te_to_native
from paddle_te.weights.dims import Dims
from paddle_te.weights.layout import Part, Place
from paddle_te.weights.layouts import detect, hf_layout, native_layout, te_layout
from tests.unit.weights.models import Model, assert_same

# GPT has tests of its own, and so have the families that PaddleNLP has no layout of
LLAMAS = [FAMILIES[name] for name in PADDLENLP if FAMILIES[name].names == "llama"]
FUSED = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize("family", [family.model_type for family in LLAMAS])
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_native_to_te_and_back(rng, kv_heads, fused, family):
    model = Model(rng, kv_heads=kv_heads, family=family)
    native = model.fused(*fused)
    te = native_to_te(native, model.config)
    assert_same(te, model.te())
    assert_same(te_to_native(te, model.config, *fused), native)


def test_paddle_tensors_and_a_config_object(rng):
    from paddlenlp.transformers import LlamaConfig

    model = Model(rng, "bfloat16")
    config = LlamaConfig(**model.config)
    te = native_to_te({k: paddle.to_tensor(v) for k, v in model.fused().items()}, config)
    assert_same({k: v.numpy() for k, v in te.items()}, model.te())
    native = te_to_native(te, config, fuse_attention_qkv=True, fuse_attention_ffn=True)
    assert_same({k: v.numpy() for k, v in native.items()}, model.fused())


@pytest.mark.parametrize("family", [family.model_type for family in LLAMAS])
def test_one_tensor_parallel_rank(rng, family):
    model = Model(rng, heads=8, kv_heads=2, family=family)
    half = model.rank(1, 2)
    te = native_to_te(half, model.config)
    for kind in ("weight", "bias")[: 1 + model.biased]:
        qkv = [half[f"{family}.layers.1.self_attn.{part}_proj.{kind}"] for part in "qkv"]
        got = te[f"{family}.layers.1.transformer.self_attention.layernorm_qkv.{kind}"]
        assert_same({"qkv": got}, {"qkv": np.concatenate(qkv, -1).T})
    assert_same(te_to_native(te, model.config), half)


def test_hundred_layers_and_more():
    layout = native_layout()
    assert layout.find("llama.layers.107.self_attn.o_proj.weight").layer == 107
    assert layout.find("llama.layers.7.self_attn.o_proj.weight").layer == 7
    for wrong in ("llama.layers.07.mlp.down_proj.weight", "llama.layers..mlp.down_proj.weight", "xllama.norm.weight"):
        assert layout.find(wrong) is None


@pytest.mark.parametrize("family", LLAMAS, ids=lambda family: family.model_type)
def test_detect(rng, family):
    """A family from the names alone, where they tell it."""
    model = Model(rng, family=family.model_type)
    for fused in FUSED:
        assert detect(model.fused(*fused)) == native_layout(*fused, family=family)
    assert detect(model.te()) == te_layout(family=family)
    hf = hf_layout(family=family)
    assert detect([hf.full_name(place) for place in hf.tensors(spec_of(model.config))], family=family) == hf


def test_names_that_are_no_layouts(rng):
    model = Model(rng)
    with pytest.raises(
        CheckpointError, match="'gpt.layers.0.fc.weight'.*Llama or Qwen2 or .* or Mistral or GPT.* checkpoint"
    ):
        detect([*model.native, "gpt.layers.0.fc.weight"])
    wrong = ["llama.layers.7.self_attn.q_prj.weight", *(f"llama.layers.{n}.strange" for n in range(9))]
    with pytest.raises(CheckpointError) as error:
        detect([*model.native, *wrong])
    assert (
        f"tensor {wrong[0]!r} is in none of the known layouts (perhaps 'llama.layers.7.self_attn.q_proj.weight'?)"
        in (str(error.value))
    )
    assert f"{wrong[4]!r} is in none of the known layouts; and 5 more: not a Llama" in str(error.value)
    with pytest.raises(CheckpointError, match="mixed layouts"):
        detect([*model.te(), "llama.layers.2.self_attn.q_proj.weight"])
    with pytest.raises(CheckpointError, match="mixed layouts"):
        detect([*model.fused(), "llama.layers.2.self_attn.q_proj.weight"])


def test_errors(rng):
    model = Model(rng)
    with pytest.raises(CheckpointError, match="Transformer Engine's"):
        native_to_te(model.te(), model.config)
    with pytest.raises(CheckpointError, match="PaddleNLP's native"):
        te_to_native(model.native, model.config)
    with pytest.raises(CheckpointError, match="contradicts 4 query heads"):
        native_to_te(model.native, model.config | {"num_key_value_heads": 1})
    incomplete = {k: v for k, v in model.native.items() if "layers.1.self_attn.k" not in k}
    with pytest.raises(CheckpointError, match="layer 1 has no k"):
        native_to_te(incomplete, model.config)


EXPERTS = dict(
    model_type="qwen2_moe", hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=25, num_hidden_layers=3, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
    shared_expert_intermediate_size=40, decoder_sparse_step=2,
)  # fmt: skip


def test_places_of_experts():
    """The second layer has experts, the others an MLP; ranks have some experts whole, and share the shared one."""
    dims, family = Dims(spec_of(EXPERTS)), FAMILIES["qwen2_moe"]
    te, hf = te_layout(family=family), hf_layout(family=family)
    shapes = {te.full_name(place): dims.slot_shape(place, 2) for place in te.tensors(dims.spec)}
    moe, mlp = "qwen2_moe.layers.1.transformer.moe_layer.", "qwen2_moe.layers.2.transformer.layernorm_mlp."
    assert {name: shape for name, shape in shapes.items() if name.startswith((moe, mlp))} == {
        f"{moe}ln_weight": (32,),
        f"{moe}router.weight": (6, 32),
        f"{moe}experts.fc1_weight": (3, 32, 32),
        f"{moe}experts.fc2_weight": (3, 32, 16),
        f"{moe}shared_experts.fc1_weight": (40, 32),
        f"{moe}shared_experts.fc2_weight": (32, 20),
        f"{moe}shared_experts.gate_weight": (1, 32),
        f"{mlp}ln_weight": (32,),
        f"{mlp}fc1_weight": (48, 32),
        f"{mlp}fc2_weight": (32, 24),
    }
    place = te.place(f"{moe}experts.fc1_weight")
    assert dims.parts(place, degree=2, rank=1)[:3] == [Part(1, 3, "gate"), Part(1, 3, "up"), Part(1, 4, "gate")]
    expert = hf.place("model.layers.1.mlp.experts.5.down_proj.weight")
    assert dims.parts(expert) == [Part(1, 5, "down")] and hf.full_name(expert).endswith("experts.5.down_proj.weight")
    with pytest.raises(CheckpointError, match="num_experts=6 cannot be divided by tensor_parallel_degree=4"):
        dims.slot_shape(place, 4)


def test_shapes_of_tensor_parallel_ranks():
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=25)
    dims = Dims(spec_of(sizes | dict(num_hidden_layers=2)))
    of_layer = lambda name: Part(1, None, name)  # noqa: E731
    assert dims.part_shape(of_layer("q"), 4) == (8, 32)
    assert dims.part_shape(of_layer("down"), 4) == (32, 12)
    assert dims.part_shape(of_layer("k"), 4) == (16, 32)  # fewer kv heads than ranks: not split
    assert dims.part_shape(Part(None, None, "embed"), 2) == (25, 32)  # an odd vocabulary: not split
    assert dims.part_shape(Part(None, None, "norm"), 4) == (32,)
    with pytest.raises(CheckpointError, match="num_attention_heads=4 cannot be divided by tensor_parallel_degree=3"):
        dims.part_shape(of_layer("q"), 3)
    with pytest.raises(CheckpointError, match="num_key_value_heads=2"):
        dims.slot_shape(Place(0, None, te_layout().layer[1]), 4)
