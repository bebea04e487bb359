"""The criterion of pd and te models beside PaddleNLP's on the same logits."""

import paddle
import pytest
from paddlenlp.transformers.llama import modeling

from paddle_te.hosts.paddlenlp.llama import LlamaForCausalLM
from paddle_te.hosts.paddlenlp.modeling import TECriterion
from paddle_te.models.switch import take_over
from tests import emulated_te
from tests.te_weights import relative
from tests.unit.hosts.paddlenlp.native import tiny_config


def ours(config):
    return take_over(modeling.LlamaPretrainingCriterion(config), TECriterion)


def draw(seed, dtype):
    """Logits [2, 24, 96], and labels of which some are ignored."""
    paddle.seed(seed)
    labels = paddle.randint(0, 96, [2, 24])
    labels[0, 5:12] = -100
    return paddle.randn([2, 24, 96]).astype(dtype), labels


def loss_and_gradient(criterion, logits, labels):
    logits = logits.detach()
    logits.stop_gradient = False
    loss = criterion(logits, labels)
    (loss / 3).backward()
    return loss.item(), logits.grad.astype("float32")


# the last bit of a 16-bit gradient may fall either way
@pytest.mark.parametrize(
    "backend, dtype, tolerance",
    [("paddle", "float32", 1e-6), ("paddle", "bfloat16", 5e-4), ("transformer_engine", "bfloat16", 5e-3)],
)
def test_as_paddlenlps(seed, backend, dtype, tolerance, monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    config = tiny_config(transformer_engine_backend=backend)
    logits, labels = draw(seed, dtype)
    want, want_gradient = loss_and_gradient(modeling.LlamaPretrainingCriterion(config), logits, labels)
    got, gradient = loss_and_gradient(ours(config), logits, labels)
    assert got == pytest.approx(want, rel=1e-6) and relative(gradient, want_gradient) < tolerance


def test_models_have_it_and_it_does_not_wait(seed, monkeypatch):
    """Python asking for a number is what lets the host wait for the device."""
    model = LlamaForCausalLM(tiny_config())
    logits, labels = draw(seed, "float32")

    def asked(tensor):
        raise AssertionError("the host waits for a number")

    with monkeypatch.context() as context:
        context.setattr(paddle.Tensor, "__bool__", asked)
        with pytest.raises(AssertionError, match="waits"):
            modeling.LlamaPretrainingCriterion(model.config)(logits, labels)
        loss = model.criterion(logits, labels)
    assert loss.item() == pytest.approx(float(modeling.LlamaPretrainingCriterion(model.config)(logits, labels)))


@pytest.mark.parametrize("backend", ["paddle", "transformer_engine"])
def test_no_label_counts(seed, backend, monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    criterion = ours(tiny_config(transformer_engine_backend=backend))
    logits, labels = draw(seed, "bfloat16")
    loss, gradient = loss_and_gradient(criterion, logits, paddle.full_like(labels, -100))
    assert loss == 0 and not gradient.any()
