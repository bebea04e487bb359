"""LoRA on the fused layers against PaddleNLP's LoRALinear on the native ones."""

import json
import pickle
import re
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddlenlp.peft import LoRAModel
from paddlenlp.transformers.llama import modeling
from safetensors.numpy import load_file

from paddle_te.configs.families import FAMILIES
from paddle_te.distributed import ExpertParallel, TensorParallel, expert_parallel
from paddle_te.hosts.paddlenlp.families import config_class, model_class
from paddle_te.hosts.paddlenlp.llama import LlamaForCausalLM
from paddle_te.hosts.paddlenlp.loading import from_pretrained, load_config, load_model
from paddle_te.hosts.paddlenlp.lora import TELoRAModel, load_lora, lora_config, read_lora, target_modules
from paddle_te.hosts.paddlenlp.training.finetune import make_model
from paddle_te.hosts.paddlenlp.training.finetune_trainer import FinetuneModelArguments
from paddle_te.hosts.paddlenlp.training.out_of_memory import lora_of
from paddle_te.layers import stored_weights
from paddle_te.models.lora import TARGETS
from paddle_te.optimizer import fuse_clipping
from paddle_te.options.lora import Adapter
from paddle_te.weights import CheckpointError, check_layout, convert, te_to_native
from paddle_te.weights.adapters.peft import convert_adapter
from tests.small_models import LORA_PARTS
from tests.te_weights import relative
from tests.unit.hosts.paddlenlp.native import draw_adapters, tiny_config, two_models
from tests.unit.runs.completed import complete
from tests.unit.runs.hostile import assert_it_works, hostile_pickle

PLACES = {
    "self_attn.q_proj": "self_attention.layernorm_qkv.q_proj",
    "self_attn.k_proj": "self_attention.layernorm_qkv.k_proj",
    "self_attn.v_proj": "self_attention.layernorm_qkv.v_proj",
    "self_attn.o_proj": "self_attention.proj.o_proj",
    "mlp.gate_proj": "layernorm_mlp.gate_proj",
    "mlp.up_proj": "layernorm_mlp.up_proj",
    "mlp.down_proj": "layernorm_mlp.down_proj",
    "self_attn.out_proj": "self_attention.proj.o_proj",  # GPT's names
    "linear1": "layernorm_mlp.up_proj",
    "linear2": "layernorm_mlp.down_proj",
}


def ours_name(name):
    """The name in our layers of a native parameter of LoRA."""
    layer, module, leaf = re.fullmatch(r"(.+\.layers\.\d+)\.(.+)\.(\w+)", name).groups()
    return f"{layer}.transformer.{PLACES[module]}.{leaf}"


def lora_pair(config, family="llama", **overrides):
    """PaddleNLP's LoRA model and ours, with the same weights and the same random A and B."""
    native, ours = two_models(family, **overrides)
    native, ours = LoRAModel(native, config()), TELoRAModel(ours, config())
    mine = dict(ours.model.named_parameters())
    for name, parameter in native.model.named_parameters():
        if "lora_" in name:
            parameter.set_value(0.1 * paddle.randn(parameter.shape))
            mine[ours_name(name)].set_value(parameter)
    return native, ours


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids)[0]


@pytest.mark.parametrize("targets, kv_heads, family", [
    *((targets, kv_heads, "llama") for targets in TARGETS for kv_heads in (4, 1)),
    ("all", 2, "qwen2"),
    ("mlp", 2, "mistral"),
    ("all", 4, "gpt"),
])  # fmt: skip
def test_same_loss_and_gradients_as_paddlenlps(seed, targets, kv_heads, family):
    sizes = dict(num_key_value_heads=kv_heads, initializer_range=0.1)
    native, ours = lora_pair(lambda: lora_config(Adapter(targets=targets, rank=8)), family, **sizes)
    ids = paddle.randint(0, 96, [2, 20])
    losses = [loss_of(model, ids) for model in (native, ours)]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    adapted = ours(ids)[0]
    ours.disable_lora()
    assert relative(ours(ids)[0], adapted) > 0.1, "LoRA makes no difference"  # 1.26 and more in 210 seeds
    mine = dict(ours.model.named_parameters())
    trained = {ours_name(name) for name, p in native.model.named_parameters() if not p.stop_gradient}
    assert {name for name, p in mine.items() if not p.stop_gradient} == trained
    assert len(trained) == 2 * 2 * (LORA_PARTS[targets] - (family == "gpt"))  # whose MLP has no gate
    for name, parameter in native.model.named_parameters():
        if "lora_" in name:
            assert relative(mine[ours_name(name)].grad, parameter.grad) < 1e-4, name  # seen: 3.2e-5
    assert all(p.grad is None for name, p in mine.items() if "lora_" not in name)


@pytest.mark.parametrize("names", [[".*q_proj", ".*v_proj"], [".*up_proj"], [".*down_proj", ".*k_proj"]])
def test_some_parts_only(seed, names):
    def config():
        config = lora_config(Adapter(rank=4))
        config.target_modules = names
        return config

    native, ours = lora_pair(config, initializer_range=0.1)
    ids = paddle.randint(0, 96, [2, 9])
    assert loss_of(ours, ids).item() == pytest.approx(loss_of(native, ids).item(), rel=1e-5)
    before = ours(ids)[0].numpy()
    ours.merge()
    assert relative(ours(ids)[0], before) < 1e-5


def test_merge_gives_the_same_logits_and_unmerge_the_weights(seed):
    _, ours = lora_pair(lambda: lora_config(Adapter()), initializer_range=0.1)
    ids = paddle.randint(0, 96, [2, 12])
    weights = {name: value.numpy() for name, value in ours.model.state_dict().items()}
    apart = ours(ids)[0].numpy()
    ours.disable_lora()
    plain = ours(ids)[0].numpy()
    ours.enable_lora()
    ours.merge()
    ours.merge()  # once only
    assert relative(ours(ids)[0], apart) < 1e-5
    assert relative(plain, apart) > 1e-2
    ours.unmerge()
    for name, value in ours.model.state_dict().items():
        np.testing.assert_allclose(value.numpy(), weights[name], atol=1e-6)
    ours.merge()
    model = ours.restore_original_model()
    assert relative(model(ids)[0], apart) < 1e-5
    assert set(model.state_dict()) == set(LlamaForCausalLM(tiny_config()).state_dict())


@pytest.mark.parametrize("fused", [False, True])
def test_lora_plus_moves_b_faster_as_paddlenlps(seed, fused):
    """After a step of AdamW with weight decay, in Paddle's own form and in one call."""
    paddle.seed(seed)
    native, ours = lora_pair(lambda: lora_config(Adapter(rank=4, plus_scale=4.0)))
    ids, before = paddle.randint(0, 64, [2, 16]), {}
    for model in (native, ours):
        trained = [weight for weight in model.parameters() if not weight.stop_gradient]
        before[model] = {weight.name: weight.clone() for weight in trained}
        rate = paddle.optimizer.lr.LambdaDecay(1e-3, lambda step: 1.0)
        clip = paddle.nn.ClipGradByGlobalNorm(1.0)
        optimizer = paddle.optimizer.AdamW(rate, parameters=trained, weight_decay=0.1, grad_clip=clip)
        if fused and model is ours:
            fuse_clipping(optimizer)
        loss_of(model, ids).backward()
        optimizer.step()
    mine = dict(ours.model.named_parameters())
    moved = {"lora_A": [], "lora_B": []}
    for name, weight in native.model.named_parameters():
        if "lora_" in name:
            change = mine[ours_name(name)] - before[ours][mine[ours_name(name)].name]
            moved[name[-6:]].append(change.abs().max().item())
            theirs = weight - before[native][weight.name]
            assert relative(change.numpy(), theirs.numpy()) < 1e-2, name
    assert np.mean(moved["lora_B"]) == pytest.approx(4 * np.mean(moved["lora_A"]), rel=0.05)


def test_a_new_adapter_changes_nothing(seed):
    model = LlamaForCausalLM(tiny_config())
    ids = paddle.randint(0, 96, [1, 8])
    want = model(ids)[0].numpy()
    assert relative(TELoRAModel(model, lora_config(Adapter()))(ids)[0], want) < 1e-6


@pytest.mark.parametrize("fp8_recipe", ["delayed", "current"])
def test_in_fp8_frozen_weights_train(seed, fp8_recipe):
    """The frozen GEMMs are those of fp8; A and B are not, and learn."""
    paddle.seed(seed)
    settings = dict(use_fp8=True, fp8_recipe=fp8_recipe, initializer_range=0.1)
    lora = TELoRAModel(LlamaForCausalLM(tiny_config(**settings)), lora_config(Adapter(rank=4)))
    lora.train()
    frozen = {n: p.numpy() for n, p in lora.model.named_parameters() if p.stop_gradient}
    trained = [p for p in lora.model.parameters() if not p.stop_gradient]
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=trained)
    ids = paddle.randint(0, 96, [2, 16])
    losses = []
    for _ in range(6):
        loss = loss_of(lora, ids)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    for name, parameter in lora.model.named_parameters():
        assert name not in frozen or (parameter.numpy() == frozen[name]).all(), name


def lora_in_fp8(folder, in_fp8, targets="all", fp8_recipe="current"):
    """TELoRAModel of the model in a folder, whose weights exist in fp8 only or are quantized in each step."""
    config = load_config(folder, "paddle", use_fp8=True, fp8_recipe=fp8_recipe, seq_length=64)
    model = from_pretrained(LlamaForCausalLM, folder, config, "float32", in_fp8)
    return TELoRAModel(model, lora_config(Adapter(targets=targets, rank=4)))


@pytest.mark.parametrize("targets, fp8_recipe", [*((targets, "current") for targets in TARGETS), ("mlp", "block")])
def test_over_weights_in_fp8_only(seed, tmp_path, targets, fp8_recipe):
    """The numbers of weights that are quantized in each step, in a byte each."""
    sizes = dict(hidden_size=128, intermediate_size=256) if fp8_recipe == "block" else {}
    LlamaForCausalLM(tiny_config(initializer_range=0.1, **sizes)).save_pretrained(str(tmp_path))
    want, got = (lora_in_fp8(tmp_path, in_fp8, targets, fp8_recipe) for in_fp8 in (False, True))
    assert want.base_precision is None
    assert got.base_precision == ("fp8 in blocks with scales of powers of 2" if fp8_recipe == "block" else "fp8")
    stored = stored_weights(got.model)
    assert len(stored) == 2 * 4 and all(getattr(*place).element_size() == 1 for place in stored.values())
    draw_adapters(want)
    theirs, ids = dict(want.model.named_parameters()), paddle.randint(0, 96, [2, 64])
    got.set_state_dict({name: value for name, value in theirs.items() if "lora_" in name})
    for lora in (want, got):
        lora.train()
        loss_of(lora, ids).backward()
    trained = {name: p.grad for name, p in got.model.named_parameters() if not p.stop_gradient}
    assert len(trained) == 2 * 2 * LORA_PARTS[targets]  # A and B in two layers
    for name, gradient in trained.items():
        np.testing.assert_array_equal(gradient.numpy(), theirs[name].grad.numpy(), err_msg=name)
    with pytest.raises(RuntimeError, match="merge into those that they were made from"):
        got.merge()


@pytest.mark.parametrize("keeps", [False, True], ids=["", "keeping transposes"])
def test_fine_tuning_keeps_the_transposed_copies_that_it_is_told_to(tmp_path, keeps):
    """And so the advice after a lack of memory counts them."""
    LlamaForCausalLM(tiny_config()).save_pretrained(str(tmp_path))
    config = load_config(tmp_path, "paddle", use_fp8=True, seq_length=64)
    asked = FinetuneModelArguments(
        model_name_or_path=str(tmp_path), lora=True, quantize_base="fp8", keep_fp8_transpose_cache=keeps
    )
    training = SimpleNamespace(
        transformer_engine_backend="paddle", pipeline_parallel_degree=1, tensor_parallel_degree=1,
        model_dtype="float32", verify_checkpoint="full", recompute=False,
    )  # fmt: skip
    lora = make_model(config, asked, training)
    stored = [scale for layer, _ in stored_weights(lora.model).values() for scale in layer.fp8.stored]
    assert stored and all(scale.scaling.keeps_transpose == keeps for scale in stored)
    assert lora_of(lora)["keep_fp8_transpose_cache"] == keeps


def test_weights_in_fp8_only_are_not_trained(seed, tmp_path):
    LlamaForCausalLM(tiny_config()).save_pretrained(str(tmp_path))
    lora = lora_in_fp8(tmp_path, True)
    lora.lora_config.trainable_modules = [r".*proj\.weight"]
    with pytest.raises(ValueError, match="self_attention.proj.weight of trainable_modules exists in fp8 only"):
        lora.mark_only_lora_as_trainable()


@pytest.mark.parametrize("granularity", ["full", "core_attn"])
def test_recompute_gives_the_same_gradients(seed, granularity):
    paddle.seed(seed)
    settings = dict(recompute=True, recompute_granularity=granularity, initializer_range=0.1)
    _, lora = lora_pair(lambda: lora_config(Adapter(rank=4)), **settings)
    lora.train()
    ids = paddle.randint(0, 96, [2, 16])
    gradients = []
    for enable in (False, True):
        if enable:
            lora.model.recompute_enable()
        loss_of(lora, ids).backward()
        gradients.append({n: p.grad.numpy() for n, p in lora.model.named_parameters() if p.grad is not None})
        for parameter in lora.model.parameters():
            parameter.clear_gradient()
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) == 28
    for name, value in gradients[0].items():
        np.testing.assert_array_equal(gradients[1][name], value)


@pytest.mark.parametrize("backend", ["none", "paddle"])
def test_save_load_and_merged_checkpoint(seed, tmp_path, backend):
    base = {"none": modeling.LlamaForCausalLM, "paddle": LlamaForCausalLM}[backend](tiny_config(initializer_range=0.1))
    base.save_pretrained(str(tmp_path / "base"))
    lora = {"none": LoRAModel, "paddle": TELoRAModel}[backend](base, lora_config(Adapter(targets="attention", rank=4)))
    draw_adapters(lora)
    ids = paddle.randint(0, 96, [2, 12])
    want = lora(ids)[0].numpy()
    lora.save_pretrained(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter/lora_model_state.pdparams").stat().st_size < 0.5 * sum(
        f.stat().st_size for f in (tmp_path / "base").glob("model_state*")
    )
    convert(tmp_path / "base", tmp_path / "merged", lora_path=tmp_path / "adapter", progress=False)
    check_layout(tmp_path / "merged", "native" if backend == "none" else "te")
    assert relative(load_model(tmp_path / "merged", backend)(ids)[0], want) < 1e-5
    # in either backend: the adapter beside the weights, or in them
    other, mode = ("paddle", "pd2te") if backend == "none" else ("none", "te2pd")
    convert(tmp_path / "base", tmp_path / "other", mode, progress=False)
    for folder, layers in (("base", backend), ("other", other)):
        model = load_lora(load_model(tmp_path / folder, layers), tmp_path / "adapter", layers)
        assert relative(model(ids)[0], want) < 1e-5
        assert relative(load_model(tmp_path / folder, layers, adapter=tmp_path / "adapter")(ids)[0], want) < 1e-5


@pytest.mark.parametrize(
    "family, targets", [("llama", "all"), ("qwen2", "attention"), ("mistral", "mlp"), ("gpt", "mlp")]
)
def test_by_way_of_pefts_folder_and_back(seed, tmp_path, family, targets):
    """From pd to PEFT's folder, from there to native layers, and again: the same logits and bits, as rsLoRA scales."""
    _, ours = lora_pair(
        lambda: lora_config(Adapter(targets=targets, rank=4, alpha=8, rslora=True)), family, initializer_range=0.1
    )
    assert ours.lora_config.scaling == 4
    ids = paddle.randint(0, 96, [2, 12])
    want = ours(ids)[0].numpy()
    ours.save_pretrained(str(tmp_path / "ours"))
    convert_adapter(tmp_path / "ours", tmp_path / "peft", "te2hf")
    native = two_models(family)[0]
    native.config.transformer_engine_backend, native.config.dtype = "none", "bfloat16"  # as a Hugging Face folder says
    native.set_state_dict(te_to_native(ours.restore_original_model().state_dict(), native.config))
    lora = load_lora(native, tmp_path / "peft", "none")
    assert isinstance(lora, LoRAModel) and not isinstance(lora, TELoRAModel)
    assert {weight.dtype for weight in lora.model.parameters()} == {paddle.float32}
    logits = lora(ids)  # PaddleNLP's GPT does not put them into a tuple
    assert relative(logits if paddle.is_tensor(logits) else logits[0], want) < 1e-5
    lora.save_pretrained(str(tmp_path / "native"))
    convert_adapter(tmp_path / "native", tmp_path / "again", "pd2hf")
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "again"))
    assert first.keys() == second.keys() and all((second[name] == value).all() for name, value in first.items())
    first, second = ((tmp_path / name / "adapter_config.json").read_text() for name in ("peft", "again"))
    assert first == second


@pytest.mark.parametrize("parts", [dict(attention="q_proj"), dict(attention="q_proj", mlp="down_proj")])
def test_some_layers_only(seed, tmp_path, parts):
    """Of PEFT's layers_to_transform, say: no other layer gets A and B."""
    config = lora_config(Adapter(rank=2))
    config.target_modules = [rf".*layers\.1\..*{name}" for name in parts.values()]
    lora = TELoRAModel(LlamaForCausalLM(tiny_config(initializer_range=0.1)), config)
    draw_adapters(lora)
    ids = paddle.randint(0, 96, [2, 12])
    want = lora(ids)[0].numpy()
    lora.save_pretrained(str(tmp_path / "ours"))
    convert_adapter(tmp_path / "ours", tmp_path / "peft", "te2hf")
    again = load_lora(lora.restore_original_model(), tmp_path / "peft", "paddle")
    assert relative(again(ids)[0], want) < 1e-6
    assert len([name for name in again.model.state_dict() if "lora_" in name]) == 2 * len(parts)


def test_an_adapter_that_training_does_not_go_on_from(seed, tmp_path):
    """One with an A each for q, k and v, on PaddleNLP's fused weights; one of several ranks."""
    lora = TELoRAModel(LlamaForCausalLM(tiny_config()), lora_config(Adapter(rank=2)))
    lora.save_pretrained(str(tmp_path / "ours"))
    config = tiny_config(transformer_engine_backend="none")
    config.fuse_attention_qkv = True
    fused = modeling.LlamaForCausalLM(config)
    with pytest.raises(CheckpointError, match="q, k, v have an A each there.*leave fuse_attention_qkv"):
        load_lora(fused, tmp_path / "ours", "none")
    convert_adapter(tmp_path / "ours", tmp_path / "peft", "te2hf")
    path = tmp_path / "peft/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(alpha_pattern=dict(q_proj=7))))
    with pytest.raises(CheckpointError, match="training does not go on.*scalings.*merge it into its model first"):
        load_lora(LlamaForCausalLM(tiny_config()), tmp_path / "peft", "paddle")


def test_an_adapter_of_another_dtype(seed, tmp_path):
    """Trained in bfloat16, loaded in float32."""
    _, lora = lora_pair(lambda: lora_config(Adapter(rank=4)), initializer_range=0.1)
    for name, parameter in lora.model.named_parameters():
        if "lora_" in name:
            parameter.set_value(parameter.astype("bfloat16").astype("float32"))
    ids = paddle.randint(0, 96, [2, 12])
    want = lora(ids)[0].numpy()
    lora.save_pretrained(str(tmp_path))
    path = str(tmp_path / "lora_model_state.pdparams")
    paddle.save({name: value.astype("bfloat16") for name, value in paddle.load(path).items()}, path)
    lora.restore_original_model()
    assert relative(load_lora(lora.model, tmp_path, "paddle")(ids)[0], want) < 3e-5


@pytest.mark.parametrize("name", ["lora_model_state.pdparams", "lora_model_state.tp01.pdparams", "peft_model.pdparams"])
def test_a_hostile_adapter_is_refused_and_not_run(tmp_path, name):
    assert_it_works(tmp_path)
    lora_config(Adapter(rank=4)).save_pretrained(str(tmp_path))
    paddle.save({}, str(tmp_path / "lora_model_state.pdparams"))
    (tmp_path / name).write_bytes(hostile_pickle(tmp_path / "ran"))
    with pytest.raises(CheckpointError, match=f"{name}: refused: it holds posix.system.*it was not run"):
        load_lora(LlamaForCausalLM(tiny_config()), tmp_path, "paddle")
    assert not (tmp_path / "ran").exists()


def test_an_adapter_that_is_cut_short_is_refused(tmp_path):
    lora_config(Adapter(rank=4)).save_pretrained(str(tmp_path))
    (tmp_path / "lora_model_state.pdparams").write_bytes(pickle.dumps({"a": 1.0}, protocol=4)[:-3])
    with pytest.raises(CheckpointError, match="lora_model_state.pdparams: truncated"):
        load_lora(LlamaForCausalLM(tiny_config()), tmp_path, "paddle")


def test_no_adapter_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="it holds no LoRA adapter"):
        load_lora(LlamaForCausalLM(tiny_config()), tmp_path, "paddle")


@pytest.mark.parametrize(
    "name, value", [("pissa", True), ("use_mora", True), ("lora_use_mixer", True), ("trainable_bias", "all")]
)
def test_what_is_not_built_is_refused(name, value):
    config = lora_config(Adapter())
    setattr(config, name, value)
    with pytest.raises(ValueError, match=name):
        TELoRAModel(LlamaForCausalLM(tiny_config()), config)


def test_targets_that_match_nothing_are_refused():
    config = lora_config(Adapter())
    config.target_modules = ["query"]
    with pytest.raises(ValueError, match="match nothing"):
        TELoRAModel(LlamaForCausalLM(tiny_config()), config)
    with pytest.raises(ValueError, match="all, attention, mlp"):
        target_modules("everything")


def test_an_adapter_with_a_flipped_bit(seed, tmp_path):
    """What a run has saved with a manifest is compared with it."""
    lora = TELoRAModel(LlamaForCausalLM(tiny_config()), lora_config(Adapter(rank=4)))
    lora.save_pretrained(str(tmp_path))
    complete(tmp_path)
    path = tmp_path / "lora_model_state.pdparams"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    make = lambda: LlamaForCausalLM(tiny_config())  # noqa: E731
    with pytest.raises(CheckpointError, match="lora_model_state.pdparams has another checksum"):
        load_lora(make(), tmp_path, "paddle")
    assert load_lora(make(), tmp_path, "paddle", verify="none")


def experts_of(rank, monkeypatch):
    """A small Mixtral with LoRA everywhere, as one of two ranks that divide the experts has it, without the other."""
    group = SimpleNamespace(nranks=2, rank=rank)
    ep = ExpertParallel(TensorParallel(group, rank, 2, sequence_parallel=True), SimpleNamespace(nranks=1))
    monkeypatch.setattr(ExpertParallel, "from_fleet", lambda tp: ep)
    monkeypatch.setattr(expert_parallel, "_group", lambda: group)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    more = dict(num_key_value_heads=2, num_local_experts=4, vocab_size=64, transformer_engine_backend="paddle")
    config = config_class(FAMILIES["mixtral"])(**sizes, **more)
    return model_class(config)(config)


def test_ranks_that_divide_experts_have_one_adapter(tmp_path, monkeypatch):
    """The first rank saves the A and B of all experts, and each reads its own."""
    gather = lambda parts, tensor, group: parts.extend([tensor, tensor + 1])  # noqa: E731
    monkeypatch.setattr(expert_parallel.dist, "all_gather", gather)
    saved = {}
    for rank in (1, 0):
        lora = TELoRAModel(experts_of(rank, monkeypatch), lora_config(Adapter(rank=4, alpha=8)))
        draw_adapters(lora)
        lora.save_pretrained(str(tmp_path / str(rank)), variant=f"ep{rank:02d}", is_main_process=rank == 0)
        saved[rank] = {name: value.numpy() for name, value in lora.model.state_dict().items() if "lora_" in name}
    assert not (tmp_path / "1").exists()
    whole = paddle.load(str(tmp_path / "0/lora_model_state.pdparams"), return_numpy=True)
    assert whole.keys() == saved[0].keys() and any(".experts." in name for name in whole)
    for name, value in saved[0].items():
        assert (whole[name] == (np.concatenate([value, value + 1]) if ".experts." in name else value)).all(), name
    for rank in (0, 1):
        found = load_lora(experts_of(rank, monkeypatch), tmp_path / "0", "paddle")
        again = TELoRAModel(experts_of(rank, monkeypatch), lora_config(Adapter(rank=4, alpha=8)))
        read_lora(again, tmp_path / "0")
        for name, value in saved[0].items():
            own = value + rank * (".experts." in name)
            for each in (found, again):
                assert (each.model.state_dict()[name].numpy() == own).all(), name
