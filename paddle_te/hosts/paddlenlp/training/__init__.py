"""Pretraining and fine-tuning with PaddleNLP's Trainer: main functions, arguments, data sets, callbacks."""
