"""What a pretraining run needs beside the model: arguments, datasets, trainer, callbacks."""
