"""Tunes a model on single answers: see paddle_te.hosts.paddlenlp.training.kto, or --help."""

from paddle_te.scripts import run

if __name__ == "__main__":
    run("paddle_te.hosts.paddlenlp.training.kto")
