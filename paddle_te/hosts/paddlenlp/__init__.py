"""PaddleNLP: what all its families share, a folder for each of them, training and evaluation."""
