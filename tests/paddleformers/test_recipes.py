"""PaddleFormers' own recipe for pretraining, with packed documents, on a CPU: its own layers beside ours."""

import json
import re

import numpy as np
import pytest

pytest.importorskip("paddleformers", reason="needs PaddleFormers: HOST=paddleformers bash scripts/test.sh")

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paddle_te.hosts.paddleformers.recipes import check_recipe, train
from tests.paddleformers.llama import model_class, tiny_config
from tests.paddleformers.test_checkpoints import weights_in
from tests.te_weights import SIZES, relative

STEPS = 4


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A small Llama with a tokenizer of one token a word."""
    folder = tmp_path_factory.mktemp("model")
    words = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(90))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = tiny_config("none")
    model_class(config)(config).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    generator = np.random.default_rng(0)
    texts = [" ".join(f"w{i}" for i in generator.integers(0, 90, length)) for length in generator.integers(5, 40, 60)]
    path = tmp_path_factory.mktemp("data") / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def losses(model_folder, documents, tmp_path, caplog):
    """Runs the recipe into tmp_path/output and returns the loss of each step."""

    def run(output, **settings):
        data = {f"{part}_dataset_{name}": value for part in ("train", "eval") for name, value in (
            ("type", "erniekit"), ("path", str(documents)), ("prob", "1.0")
        )}  # fmt: skip
        recipe = dict(
            stage="PT",
            fine_tuning="full",
            model_name_or_path=str(model_folder),
            _attn_implementation="eager",
            max_seq_len=32,
            packing=True,
            do_train=True,
            device="cpu",
            amp_master_grad=False,
            max_steps=STEPS,
            save_steps=STEPS,
            logging_steps=1,
            per_device_train_batch_size=2,
            learning_rate=0.001,
            output_dir=str(tmp_path / output),
            disable_tqdm=True,
        )
        caplog.clear()
        with caplog.at_level("INFO", "PaddleFormers"):
            train(recipe | data | settings)
        return [float(loss) for loss in re.findall(r"loss: ([\d.]+), learning_rate", caplog.text)]

    return run


def test_none_and_pd_train_alike(losses, tmp_path):
    none, pd = (losses(backend, transformer_engine_backend=backend) for backend in ("none", "paddle"))
    assert len(pd) == STEPS
    np.testing.assert_allclose(pd, none, rtol=1e-5)
    theirs, ours = weights_in(tmp_path / "none"), weights_in(tmp_path / "paddle")
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert relative(ours[name], array) < 1e-3, name


@pytest.mark.parametrize("settings, bound", [({}, 0.01), (dict(use_fp8=True, fp8_recipe="current"), 0.05)])
def test_te_trains_as_pd(losses, te, settings, bound):
    """In bfloat16 on nvgpu, TE's kernels emulated, beside pd in float32 on it."""
    pd = losses("paddle", transformer_engine_backend="paddle", device="nvgpu")
    bf16 = dict(device="nvgpu", bf16=True, fp16_opt_level="O2", amp_master_grad=True, gradient_accumulation_steps=1)
    got = losses("te", transformer_engine_backend="transformer_engine", **bf16, **settings)
    np.testing.assert_allclose(got, pd, rtol=bound)


def test_options_are_checked(model_folder):
    recipe = dict(model_name_or_path=str(model_folder), transformer_engine_backend="paddle")
    check_recipe(recipe)
    with pytest.raises(ValueError, match="--fp8_recipe blocks: it must be"):
        check_recipe(recipe | dict(fp8_recipe="blocks"))


def test_another_family_is_refused(tmp_path):
    content = SIZES | dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(content))
    recipe = dict(model_name_or_path=str(tmp_path), transformer_engine_backend="paddle")
    with pytest.raises(ValueError, match="model_type='qwen2'.*paddlefleet"):
        check_recipe(recipe)
    check_recipe(recipe | dict(transformer_engine_backend="none"))
