"""The converter's command line, on checkpoints that PaddleNLP's own models save and load."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddlenlp.transformers import LlamaForCausalLM

from paddle_te.hosts.paddlenlp.families import model_class
from paddle_te.weights import command

SCRIPT = Path(__file__).parents[3] / "llm" / "llama" / "te_llama_ckpt_converter.py"


def run(*arguments):
    """The command as a user starts it."""
    words = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.fixture
def convert(monkeypatch):
    """The command in this process."""

    def convert(source, target, mode, *arguments):
        words = ["--input_ckpt_path", source, "--output_ckpt_path", target, "--mode", mode, *arguments]
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words)])
        command.main()

    return convert


def logits(model, tokens):
    model.eval()
    with paddle.no_grad():
        out = model(tokens)
    return (out[0] if isinstance(out, tuple) else out).numpy()


@pytest.fixture
def tokens(seed, tiny_config):
    return paddle.randint(0, tiny_config().vocab_size, [2, 16])


@pytest.mark.parametrize(
    "kv_heads, shard_size, safetensors", [(2, "10GB", False), (4, "40KB", False), (2, "40KB", True)]
)
def test_native_and_te_models_agree(convert, tmp_path, tiny_config, tokens, kv_heads, shard_size, safetensors):
    native = LlamaForCausalLM(tiny_config(num_key_value_heads=kv_heads))
    native.save_pretrained(str(tmp_path / "pd"), max_shard_size=shard_size, safe_serialization=safetensors)
    expected = logits(native, tokens)

    convert(tmp_path / "pd", tmp_path / "te", "pd2te")
    config = tiny_config(num_key_value_heads=kv_heads)
    config.transformer_engine_backend = "paddle"
    te = model_class(config).from_pretrained(str(tmp_path / "te"), config=config, dtype="float32")
    np.testing.assert_allclose(logits(te, tokens), expected, rtol=1e-5, atol=1e-5)

    convert(tmp_path / "te", tmp_path / "back", "te2pd")
    back = LlamaForCausalLM.from_pretrained(str(tmp_path / "back"))
    np.testing.assert_array_equal(logits(back, tokens), expected)


@pytest.mark.parametrize("flags", [("--fuse_attention_qkv", "--fuse_attention_ffn"), ("--fuse_attention_ffn",)])
def test_fused_weights_are_paddlenlps(convert, tmp_path, tiny_config, tokens, flags):
    native = LlamaForCausalLM(tiny_config())
    native.save_pretrained(str(tmp_path / "pd"))
    fused = {flag[2:]: True for flag in flags}
    convert(tmp_path / "pd", tmp_path / "te", "pd2te")
    convert(tmp_path / "te", tmp_path / "fused", "te2pd", *flags)
    model = LlamaForCausalLM.from_pretrained(str(tmp_path / "fused"), **fused)
    assert any("gate_up_fused_proj" in name for name in model.state_dict())
    np.testing.assert_allclose(logits(model, tokens), logits(native, tokens), rtol=1e-5, atol=1e-5)

    # and what PaddleNLP saves fused is read as such, and given back so without a flag
    model.save_pretrained(str(tmp_path / "saved"))
    convert(tmp_path / "saved", tmp_path / "te2", "pd2te")
    first, second = (paddle.load(str(tmp_path / name / "model_state.pdparams")) for name in ("te", "te2"))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name].numpy(), second[name].numpy()) for name in first)
    convert(tmp_path / "te2", tmp_path / "back", "te2pd")
    saved, back = (paddle.load(str(tmp_path / name / "model_state.pdparams")) for name in ("saved", "back"))
    assert saved.keys() == back.keys()
    assert all(np.array_equal(saved[name].numpy(), back[name].numpy()) for name in saved)


def test_command_line(tmp_path, tiny_config):
    LlamaForCausalLM(tiny_config()).save_pretrained(str(tmp_path / "pd"))
    (tmp_path / "pd" / "optimizer.pdopt").write_bytes(b"state")
    result = run("--input_ckpt_path", tmp_path / "pd", "--output_ckpt_path", tmp_path / "te")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{tmp_path}/te: complete\nnot carried over: optimizer.pdopt\n"
    assert "100%" in result.stderr and "B/s" in result.stderr

    again = run("--input_ckpt_path", tmp_path / "pd", "--output_ckpt_path", tmp_path / "te", "--mode", "pd2te")
    assert again.returncode == 1
    assert again.stderr == f"error: {tmp_path}/te: not empty; the output must be a new or an empty folder\n"
    wrong = run("--input_ckpt_path", tmp_path / "te", "--output_ckpt_path", tmp_path / "x", "--mode", "te2te")
    assert wrong.returncode == 2
    assert "invalid choice: 'te2te'" in wrong.stderr
    assert run("--mode", "pd2te").returncode == 2
    nowhere = run("--input_ckpt_path", tmp_path / "pd")
    assert nowhere.returncode == 2 and "--output_ckpt_path: say where the result goes" in nowhere.stderr
    assert not (tmp_path / "x").exists()
