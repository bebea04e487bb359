"""PaddleFormers' own recipes, pretraining, fine-tuning and LoRA, all packed, on a CPU: its own layers beside ours."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("paddleformers", reason="needs PaddleFormers: HOST=paddleformers bash scripts/test.sh")

from paddleformers.cli.train.sft.sft_trainer import SFTTrainer
from paddleformers.transformers.kimi_k2.configuration import KimiK2Config
from safetensors.numpy import load_file

from paddle_te.hosts.paddleformers.export import export
from paddle_te.hosts.paddleformers.recipes import check_recipe, check_training, read_recipe, train
from paddle_te.hosts.paddleformers.trainer import OurTrainer, TETrainer
from paddle_te.job import Job
from tests.paddleformers.recipe import STEPS, indexed, losses_in, write_indexed
from tests.paddleformers.test_checkpoints import weights_in
from tests.te_weights import SIZES, relative
from tests.tracker_files import mlflow, swanlab, without_logins, without_network


@pytest.fixture
def losses(recipe_of, tmp_path, caplog):
    """Runs the recipe, without checkpoints, into tmp_path/output and returns the loss of each step."""

    def run(output, stage="PT", **settings):
        caplog.clear()
        with caplog.at_level("INFO", "PaddleFormers"):
            train(recipe_of(stage) | dict(output_dir=str(tmp_path / output), save_strategy="no") | settings)
        return losses_in(caplog.text)

    return run


@pytest.mark.parametrize("stage", ["PT", "SFT"])
def test_none_and_pd_train_alike(losses, tmp_path, stage):
    none, pd = (losses(backend, stage, transformer_engine_backend=backend) for backend in ("none", "paddle"))
    assert len(pd) == STEPS
    np.testing.assert_allclose(pd, none, rtol=1e-5)
    theirs, ours = weights_in(tmp_path / "none"), weights_in(tmp_path / "paddle")
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert relative(ours[name], array) < 1e-3, name


def test_the_hosts_own_layers_on_nvgpu(losses, model_folder, tmp_path):
    """With PaddleFormers' defaults, fused RMSNorm and FlashMask, beside what a CPU has; documents are packed."""
    shutil.copytree(model_folder, tmp_path / "model")
    config = json.loads((model_folder / "config.json").read_text()) | dict(fuse_rms_norm=True)
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    fused = dict(model_name_or_path=str(tmp_path / "model"), _attn_implementation="flashmask", device="nvgpu")
    none = dict(transformer_engine_backend="none")
    np.testing.assert_allclose(losses("fused", **none, **fused), losses("plain", **none), rtol=1e-5)


@pytest.mark.parametrize("data", ["PT", "LONG"])
def test_indexed_data(losses, data_folder, data):
    """Several documents in a sequence, and one that fills it, for which our layers get no boundaries."""
    write_indexed(data_folder)
    settings = indexed(data_folder / data)
    none, pd = (losses(backend, transformer_engine_backend=backend, **settings) for backend in ("none", "paddle"))
    assert len(pd) == STEPS
    np.testing.assert_allclose(pd, none, rtol=1e-5)


def test_damaged_orders_of_samples_are_made_anew(losses, data_folder, caplog):
    """Also where a death has left the description only, for which PaddleFormers by itself waits without end."""
    write_indexed(data_folder)
    settings = indexed(data_folder / "PT") | dict(transformer_engine_backend="paddle")
    first = losses("first", **settings)
    arrays = sorted(data_folder.glob("index-cache/*_shuffle_idx.npy"))
    for path in arrays:
        np.save(path, np.load(path)[::-1])
    caplog.set_level("INFO")
    assert losses("again", **settings) == first and "_shuffle_idx.npy is damaged" in caplog.text
    for path in data_folder.glob("index-cache/*"):
        if path.suffix != ".dsc":
            path.unlink()
    assert losses("after", **settings) == first


def test_a_damaged_corpus_is_refused(data_folder, recipe_of, tmp_path):
    write_indexed(data_folder)
    (tmp_path / "PT.bin").write_bytes((data_folder / "PT.bin").read_bytes())
    index = bytearray((data_folder / "PT.idx").read_bytes())
    index[34 + 4 * 60 + 16] ^= 1  # where the third document begins
    (tmp_path / "PT.idx").write_bytes(index)
    settings = indexed(tmp_path / "PT") | dict(transformer_engine_backend="none", output_dir=str(tmp_path / "out"))
    with pytest.raises(ValueError, match="PT.idx is damaged: entry 1 ends at byte"):
        train(recipe_of("PT") | settings)
    settings["input_dir"] = settings["input_dir"].replace(" ", " x")
    with pytest.raises(ValueError, match="x.*PT.bin is missing"):
        train(recipe_of("PT") | settings)


def test_trackers_that_the_host_cannot_report_to(losses, tmp_path, monkeypatch):
    """SwanLab, whose run PaddleFormers asks for too early, and MLflow, which it does not know."""
    without_network(tmp_path, monkeypatch)
    settings = dict(report_to=["swanlab", "mlflow"], max_steps=2)
    logged = losses("tracked", transformer_engine_backend="paddle", **settings)
    for read in swanlab, mlflow:
        values = [value for _, name, value in read(tmp_path) if name == "train/loss"]
        assert values == pytest.approx(logged, abs=1e-6) and len(values) == 2


@pytest.mark.parametrize("settings, refused", [
    (dict(report_to="all"), "wandb"),
    (dict(report_to="all", wandb_api_key="key"), "swanlab"),
])  # fmt: skip
def test_trackers_without_a_login(recipe_of, tmp_path, monkeypatch, settings, refused):
    refusal = pytest.raises(ValueError, match=f"^--report_to {refused}: .* API key")
    with without_logins(tmp_path, monkeypatch), refusal:
        check_training(recipe_of("PT") | dict(transformer_engine_backend="none") | settings)


LORA = dict(stage="SFT", fine_tuning="lora", lora_rank=4)


def adapter_in(folder):
    index = json.loads((folder / "peft_model.safetensors.index.json").read_text())["weight_map"]
    return {name: array for file in dict.fromkeys(index.values()) for name, array in load_file(folder / file).items()}


def test_lora_trains_alike_and_is_merged(losses, model_folder, tmp_path):
    """From one adapter, which PaddleFormers' own layers have begun; its `export` merges what ours made of it."""
    losses("start", transformer_engine_backend="none", **LORA)
    start = dict(LORA, lora_path=str(tmp_path / "start"))
    none, pd = (losses(backend, transformer_engine_backend=backend, **start) for backend in ("none", "paddle"))
    assert len(pd) == STEPS
    np.testing.assert_allclose(pd, none, rtol=1e-5)
    theirs, ours = adapter_in(tmp_path / "none"), adapter_in(tmp_path / "paddle")
    assert ours.keys() == theirs.keys() and len(ours) == 2 * 2 * 7
    for name, array in theirs.items():
        assert relative(ours[name], array) < 1e-3, name
    places = dict(model_name_or_path=str(model_folder), output_dir=str(tmp_path / "paddle"))
    export(dict(places, fine_tuning="lora", device="cpu", transformer_engine_backend="paddle"))
    before, merged = weights_in(model_folder), weights_in(tmp_path / "paddle/export")
    assert merged.keys() == before.keys()
    for name, array in before.items():
        projection = name.removesuffix(".weight")
        if f"{projection}.lora_A" in ours:  # lora_alpha is twice the rank in PaddleFormers' recipes
            array = array + 2 * (ours[f"{projection}.lora_A"] @ ours[f"{projection}.lora_B"]).T
        np.testing.assert_allclose(merged[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


PD = dict(transformer_engine_backend="paddle")
BF16 = dict(bf16=True, fp16_opt_level="O2", amp_master_grad=True)
TE = dict(BF16, transformer_engine_backend="transformer_engine")
DELAYED = dict(TE, use_fp8=True, fp8_recipe="delayed")


@pytest.mark.parametrize(
    "settings",
    [dict(PD, stage="SFT"), dict(DELAYED, gradient_accumulation_steps=2)],
    ids=["full", "accumulated"],
)
def test_resumed_exactly(losses, te, tmp_path, settings):
    """An adapter, and one micro-batch a step: test_parallel.py."""
    # on a CPU PaddleFormers misses the random state of nvgpu's devices
    settings = dict(settings, save_strategy="steps", device="nvgpu")
    whole = losses("whole", **settings)
    resumed = losses("resumed", resume_from_checkpoint=str(tmp_path / f"whole/checkpoint-{STEPS // 2}"), **settings)
    assert resumed == whole[STEPS // 2 :]
    first, second = weights_in(tmp_path / "whole"), weights_in(tmp_path / "resumed")
    for name, array in first.items():
        np.testing.assert_array_equal(second[name], array, err_msg=name)


@pytest.mark.parametrize(
    "settings, bound", [({}, 0.01), (dict(use_fp8=True, fp8_recipe="current"), 0.05), (LORA, 0.01)]
)
def test_te_trains_as_pd(losses, te, settings, bound):
    """In bfloat16 on nvgpu, TE's kernels emulated, beside pd in float32 on it."""
    lora = settings if settings is LORA else {}
    pd = losses("paddle", transformer_engine_backend="paddle", device="nvgpu", **lora)
    bf16 = dict(device="nvgpu", bf16=True, fp16_opt_level="O2", amp_master_grad=True, gradient_accumulation_steps=1)
    got = losses("te", transformer_engine_backend="transformer_engine", **bf16, **settings)
    np.testing.assert_allclose(got, pd, rtol=bound)


@pytest.fixture
def gradients(losses, monkeypatch):
    """Runs two steps of two micro-batches in te. Returns their losses, and {name: gradient} before each update."""

    def run(where, **settings):
        steps = []

        def optimizer_step(trainer, args, model, parameters_list=None):
            layers = [layer for layer in model.sublayers() if hasattr(layer, "fuse_wgrad_accumulation")]
            assert len(layers) == 6 and {layer.fuse_wgrad_accumulation for layer in layers} == {where}
            of_step = {name: getattr(each, "main_grad", each.grad) for name, each in model.named_parameters()}
            steps.append({name: gradient.astype("float32").numpy() for name, gradient in of_step.items()})
            OurTrainer.optimizer_step(trainer, args, model, parameters_list)

        monkeypatch.setattr(TETrainer, "optimizer_step", optimizer_step, raising=False)
        short = dict(device="nvgpu", gradient_accumulation_steps=2, max_steps=2)
        return losses(f"fused_{where}", **TE | short | settings), steps

    return run


def test_gemms_add_up_gradients(gradients, te, monkeypatch):
    """They do so in main gradients, or in the gradients themselves. Paddle adds rounded ones to main gradients.

    The greatest differences in 100 seeds were 0.0018 and 0.0026 of the first step's gradients. Behind AdamW's first
    update they were 0.016 of the second step's gradients, and 0.0005 of its loss.
    """
    found = [(gradients(True), 0.0027), (gradients("grad", amp_master_grad=False), 0.0039)]
    monkeypatch.setattr(Job, "fuses_wgrad", False)
    want, (first, second) = gradients(False)
    for (got, (ours, ours_later)), bound in found:
        np.testing.assert_allclose(got, want, rtol=8e-4)
        for name, gradient in first.items():
            assert relative(ours[name], gradient) < bound, name
            assert relative(ours_later[name], second[name]) < 0.024, name


def test_options_are_checked(model_folder):
    recipe = dict(model_name_or_path=str(model_folder), transformer_engine_backend="paddle")
    check_recipe(recipe)
    with pytest.raises(ValueError, match="--fp8_recipe blocks: it must be"):
        check_recipe(recipe | dict(fp8_recipe="blocks"))
    with pytest.raises(ValueError, match="stage: 'DPO': .* have only PT and SFT in PaddleFormers"):
        check_recipe(recipe | dict(stage="DPO"))
    with pytest.raises(ValueError, match="save_checkpoint_format: 'unified_checkpoint'"):
        check_recipe(recipe | dict(save_checkpoint_format="unified_checkpoint"))
    check_recipe(recipe | dict(transformer_engine_backend="none", stage="DPO"))


def test_no_sharding_is_said_behind_a_recipe(tmp_path, monkeypatch):
    """PaddleFormers reads it there as None, and its arguments end in TypeError."""
    (tmp_path / "run.yaml").write_text("stage: PT\nsharding: stage1\n")
    monkeypatch.setattr("sys.argv", ["main", "train", str(tmp_path / "run.yaml"), "sharding=", "max_steps=3"])
    assert read_recipe() == dict(stage="PT", sharding="", max_steps=3)


def test_another_family_is_refused(tmp_path):
    content = SIZES | dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(content))
    recipe = dict(model_name_or_path=str(tmp_path), transformer_engine_backend="paddle")
    with pytest.raises(ValueError, match="model_type='qwen2'.*paddlefleet"):
        check_recipe(recipe)
    check_recipe(recipe | dict(transformer_engine_backend="none"))


def test_other_families_have_other_configurations(monkeypatch):
    """PaddleFormers' own layers train them; only ours read what Llama's has."""
    asked = []
    monkeypatch.setattr(SFTTrainer, "create_optimizer_and_scheduler", lambda self, steps: asked.append(steps))
    trainer = OurTrainer.__new__(OurTrainer)
    trainer.args, trainer.model = SimpleNamespace(warmup_steps=0), SimpleNamespace(config=KimiK2Config())
    trainer.create_optimizer_and_scheduler(STEPS)
    assert asked == [STEPS]
