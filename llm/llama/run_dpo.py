"""Tunes a model on pairs of answers: see paddle_te.hosts.paddlenlp.training.dpo, or --help."""

from paddle_te.scripts import run

if __name__ == "__main__":
    run("paddle_te.hosts.paddlenlp.training.dpo")
