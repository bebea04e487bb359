"""Mixtures of experts while a model trains, in every host's Trainer."""

from __future__ import annotations

from typing import Any

from paddle_te.host import HostArguments, HostModel
from paddle_te.models.experts import routing_values, update_biases
from paddle_te.training.callback import Callback, Control, State


class ExpertsCallback(Callback):
    """Move the bias of experts after each step of the optimizer, and add ROUTING to the logs.

    It must come before the callbacks that read the logs.
    """

    def on_optimizer_end(
        self, args: HostArguments, state: State, control: Control, model: HostModel = None, **kwargs: Any
    ) -> None:
        update_biases(model)

    def on_log(
        self,
        args: HostArguments,
        state: State,
        control: Control,
        logs: dict[str, Any] | None = None,
        model: HostModel = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and "loss" in logs:
            logs.update({name: round(value, 6) for name, value in routing_values(model, args.world_size).items()})
