"""Evaluation of a checkpoint by the likelihood of texts."""
