"""Evaluation of PaddleNLP's models, with our layers or its own, by the likelihood of texts and by generation."""
