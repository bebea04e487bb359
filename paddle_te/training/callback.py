"""What a host's Trainer calls while it trains."""


class Callback:
    """Does nothing at each event of a Trainer. Needs no class of a host: their Trainers call the methods by name."""

    def _nothing(self, args, state, control, **kwargs):
        """args: the host's TrainingArguments. state, control: the Trainer's. kwargs: what belongs to the event."""

    on_init_end = on_train_begin = on_train_end = on_epoch_begin = on_epoch_end = _nothing
    on_step_begin = on_load_data_end = on_substep_end = on_step_end = on_optimizer_begin = on_optimizer_end = _nothing
    on_log = on_prediction_step = on_evaluate = on_save = on_save_hf = _nothing
