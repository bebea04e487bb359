"""What a pretraining run needs in addition to the model: arguments, datasets, trainer, callbacks."""
