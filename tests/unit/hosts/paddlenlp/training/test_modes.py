"""paddle_te.hosts.paddlenlp.training.modes."""

import paddle

from paddle_te.hosts.paddlenlp.training.modes import TrainingModes


class Counted(paddle.nn.Sequential):
    calls = 0

    def train(self):
        type(self).calls += 1
        super().train()


def test_train_is_called_where_a_layer_is_not_in_training_mode():
    inner = paddle.nn.Sequential(paddle.nn.Linear(2, 2), paddle.nn.Dropout(0.5))
    model, modes = Counted(inner, paddle.nn.Linear(2, 2)), TrainingModes()

    def micro_batch():
        before = Counted.calls
        with modes.kept(model):
            model.train()
        assert all(layer.training for layer in model.sublayers(include_self=True))
        return Counted.calls - before

    assert micro_batch() == 0  # as layers are made
    inner[1].eval()
    assert micro_batch() == 1 and micro_batch() == 0
    model.eval()
    assert micro_batch() == 1 and micro_batch() == 0
    inner.add_sublayer("new", paddle.nn.Dropout(0.5))
    model.eval()
    assert micro_batch() == 1 and micro_batch() == 0
    inner.new.eval()
    assert micro_batch() == 1
    before = Counted.calls
    model.train()  # outside
    assert Counted.calls == before + 1
