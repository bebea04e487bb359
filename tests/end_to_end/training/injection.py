"""Something in a training that is not finite, put there on purpose.

    INJECTION="RANK WHAT VALUE STEP" injection.py flags of run_pretrain …

trains with it on that rank, by hand or as the launcher's TRAINING_SCRIPT. With EMULATED_TE=1 te computes with
tests/emulated_te.py.
"""

import os

import paddle
from paddlenlp.trainer import TrainerCallback

from paddle_te.hosts.paddlenlp.training import pretrain
from paddle_te.hosts.paddlenlp.training.trainer import PretrainingTrainer


class Injection(TrainerCallback):
    """Breaks `what` in `steps`: one number of it, or all, becomes `value`."""

    def __init__(self, what, value=float("nan"), steps=(3,)):
        self.what, self.value, self.steps = what, value, steps
        self.rates = {}

    def install(self, setattr):
        install_callbacks, compute_loss = pretrain.install_callbacks, PretrainingTrainer.compute_loss

        def install_with(trainer, exit_signal):
            install_callbacks(trainer, exit_signal)
            trainer.add_callback(self)

        def broken_loss(trainer, *args, **kwargs):
            loss = compute_loss(trainer, *args, **kwargs)
            return loss + self.value if self.what == "loss" and trainer.state.global_step + 1 in self.steps else loss

        setattr(pretrain, "install_callbacks", install_with)
        setattr(PretrainingTrainer, "compute_loss", broken_loss)

    def _break(self, tensor):
        broken = replaced(tensor.astype("float32").numpy(), self.value)
        with paddle.no_grad():
            paddle.assign(paddle.to_tensor(broken).astype(tensor.dtype), tensor)

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step + 1 not in self.steps:
            return
        if self.what == "weight":
            self._break(a_weight(model))
        elif self.what == "weights":
            for parameter in model.parameters():
                parameter.set_value(paddle.full_like(parameter, self.value))
        elif self.what == "optimizer state":
            while not isinstance(optimizer, paddle.optimizer.AdamW):  # but what Paddle has put around it
                optimizer = vars(optimizer).get("_inner_opt") or vars(optimizer)["_optim"]
            self._break(next(iter(optimizer._accumulators["moment2"].values())))

    def on_optimizer_begin(self, args, state, control, model=None, **kwargs):
        if self.what == "gradient" and state.global_step + 1 in self.steps:
            main_grad = getattr(a_weight(model), "main_grad", None)
            self._break(a_weight(model).grad if main_grad is None else main_grad)

    def on_step_end(self, args, state, control, model=None, lr_scheduler=None, **kwargs):
        self.rates[state.global_step] = lr_scheduler.get_lr()
        if self.what == "saved weight" and state.global_step in self.steps:
            self._break(a_weight(model))


def replaced(array, value):
    array = array.copy()
    array.flat[array.size // 2] = value
    return array


def a_weight(model):
    """A matrix of the second layer, or on another pipeline stage the last one."""
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    return next((p for name, p in matrices.items() if "layers.1" in name), list(matrices.values())[-1])


def main():
    rank, what, value, step = os.environ["INJECTION"].split()
    if os.environ.get("EMULATED_TE"):
        from tests import emulated_te

        emulated_te.install()
    if os.environ.get("PADDLE_TRAINER_ID", "0") == rank:
        Injection(what, float(value), [int(step)]).install(setattr)
    pretrain.main()


if __name__ == "__main__":
    main()
