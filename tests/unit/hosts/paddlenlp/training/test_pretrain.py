import json
from types import SimpleNamespace

import pytest

from paddle_te import configs
from paddle_te.hosts.paddlenlp.training import beginning, pretrain

ARGUMENTS = dict(use_fp8=False, transformer_engine_backend="none", model_dtype="float32", world_size=1)


@pytest.mark.parametrize("scaling, positions", [
    ({}, 4096),
    (dict(rope_scaling_type="linear", rope_scaling_factor=2.0), 4096),
    (dict(rope_scaling_type="dynamic_ntk", rope_scaling_factor=2.0), 64),
])  # fmt: skip
def test_a_new_model_is_for_the_sequences_it_is_trained_on(tmp_path, monkeypatch, caplog, scaling, positions):
    """But for dynamic scaling, which begins beyond max_position_embeddings."""
    monkeypatch.setattr(beginning.LlmMetaConfig, "set_llm_config", lambda config, arguments: None)
    monkeypatch.setattr(beginning, "configure", lambda *arguments: None)
    config = configs.read("tiny-llama-demo") | dict(max_position_embeddings=64) | scaling
    (tmp_path / "config.json").write_text(json.dumps(config))
    model_args = SimpleNamespace(model_name_or_path=str(tmp_path), continue_training=False)
    data_args = SimpleNamespace(max_seq_length=4096, reset_attention_mask=False)
    training_args = SimpleNamespace(**ARGUMENTS)
    with caplog.at_level("INFO", "paddle_te"):
        made = pretrain.make_config(model_args, data_args, training_args, None)
    assert made.max_position_embeddings == positions and made.seq_length == 4096
    assert ("the model gets 4096 positions" in caplog.text) == (positions == 4096)


@pytest.mark.parametrize("needed, rows", [(4000, 4096), (4096, 4096), (4097, 4224)])
def test_a_new_model_has_a_row_for_each_token(monkeypatch, caplog, needed, rows):
    """It says so where its configuration has fewer."""
    monkeypatch.setattr(beginning.LlmMetaConfig, "set_llm_config", lambda config, arguments: None)
    monkeypatch.setattr(beginning, "configure", lambda *arguments: None)
    model_args = SimpleNamespace(model_name_or_path="tiny-llama-demo", continue_training=False)
    data_args = SimpleNamespace(max_seq_length=64, reset_attention_mask=False)
    training_args = SimpleNamespace(**ARGUMENTS)
    with caplog.at_level("INFO", "paddle_te"):
        made = pretrain.make_config(model_args, data_args, training_args, SimpleNamespace(needed_rows=needed))
    assert made.vocab_size == rows
    assert ("a vocabulary of 4224, for a tokenizer with 4097" in caplog.text) == (rows == 4224)


@pytest.mark.parametrize("scaling", [{}, dict(rope_scaling_type="dynamic_ntk", rope_scaling_factor=2.0)])
def test_weights_know_their_positions(tmp_path, scaling):
    """Sequences beyond them would be trained on with angles that the model has not seen, in silence."""
    config = configs.read("tiny-llama-demo") | dict(max_position_embeddings=64) | scaling
    (tmp_path / "config.json").write_text(json.dumps(config))
    pretrain.check_trained_length(tmp_path, 64)
    if scaling:
        pretrain.check_trained_length(tmp_path, 65)
    else:
        with pytest.raises(ValueError, match="--max_seq_length 65: the weights in .* model with 64 positions"):
            pretrain.check_trained_length(tmp_path, 65)
