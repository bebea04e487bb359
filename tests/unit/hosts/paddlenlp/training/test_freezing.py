"""--freeze in one process; over ranks in tests/multiprocess/distributed/test_parallel.py."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddle_te.hosts.paddlenlp.freezing import check_freeze
from paddle_te.hosts.paddlenlp.modeling import causal_mask_only
from tests.unit.hosts.paddlenlp.native import tiny_config
from tests.unit.hosts.paddlenlp.training.test_loss_weights import draw_samples, trainer

EMBEDDING_AND_FIRST = r"embed_tokens|layers\.0\."


def weights_of(model):
    return {name: value.astype("float32").numpy().copy() for name, value in model.state_dict().items()}


def step(tmp_path, seed, backend, **flags):
    """(weights before, after, names with a state) of one step."""
    paddle.seed(seed)
    np.random.seed(seed)
    with paddle.utils.unique_name.guard():
        sizes = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=1)
        training = trainer(tmp_path, backend, draw_samples(seed), **sizes, **flags)
        before = weights_of(training.model)
        with causal_mask_only():
            training.train()
        state = "\n".join(training.optimizer.state_dict())
        stated = {name for name, p in training.model.state_dict().items() if f"{p.name}_moment1_0" in state}
        without_gradient = {name for name, p in training.model.state_dict().items() if p.stop_gradient}
        return before, weights_of(training.model), stated, without_gradient


@pytest.mark.parametrize(
    "backend, pattern, flags",
    [
        ("none", EMBEDDING_AND_FIRST, {}),
        ("paddle", EMBEDDING_AND_FIRST, {}),
        ("paddle", "ln_weight|norm", dict(model_flags=dict(use_fused_linear_cross_entropy=True))),
        ("paddle", "lm_head|fc1", dict(model_flags=dict(use_fused_linear_cross_entropy=True))),
        ("paddle", EMBEDDING_AND_FIRST, dict(recompute="true")),
    ],
)
def test_frozen_weights_stay_and_others_learn_as_without(tmp_path, seed, backend, pattern, flags):
    """In the first step, which is not clipped, what is not frozen learns as if nothing were."""
    before, plain, stated, frozen = step(tmp_path / "plain", seed, backend, **flags)
    assert stated == plain.keys() and not frozen
    again, after, stated, frozen = step(tmp_path / "frozen", seed, backend, freeze=pattern, **flags)
    assert 0 < len(frozen) < len(plain) and stated == plain.keys() - frozen
    for name, value in after.items():
        assert (again[name] == before[name]).all()
        want = before if name in frozen else plain
        np.testing.assert_array_equal(value, want[name], name)
    assert all((after[name] != before[name]).any() for name in stated)


@pytest.mark.parametrize(
    "patterns, settings, message",
    [
        (
            [r"layers\.7\."],
            {},
            r"--freeze layers\\.7\\.: is found in no weight's name; they are such as llama.embed_tok",
        ),
        (["."], {}, "--freeze .: is found in all weights' names, and nothing would be trained"),
        (["embed", "layers", "norm", "lm_head"], {}, "is found in all weights' names"),
        (["lm_head"], dict(tie_word_embeddings=True), "--freeze lm_head: is found in no weight's name"),
        (["embed"], dict(tie_word_embeddings=True, pipeline_parallel_degree=2), "copies of llama.embed_tokens.weight"),
    ],
)
def test_refused_before_the_model_is_made(patterns, settings, message):
    args = dict(freeze=patterns, pipeline_parallel_degree=1)
    config = tiny_config(**{name: value for name, value in settings.items() if name not in args})
    with pytest.raises(ValueError, match=message):
        check_freeze(config, SimpleNamespace(**args | {name: settings[name] for name in settings if name in args}))


def test_accepted():
    args = SimpleNamespace(freeze=["embed_tokens", "norm"], pipeline_parallel_degree=2)
    for backend in ("none", "paddle"):
        check_freeze(tiny_config(transformer_engine_backend=backend), args)
    check_freeze(tiny_config(), SimpleNamespace(freeze=None))
