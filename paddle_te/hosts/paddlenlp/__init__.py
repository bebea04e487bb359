"""PaddleNLP: what all its families share, a folder for each of them, training and evaluation.

Nothing is imported here, because PaddleNLP takes seconds, and `prepare_data` answers a wrong argument without it.
"""
