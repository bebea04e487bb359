"""Evaluates a checkpoint: see paddle_te.hosts.paddlenlp.evaluation.evaluate, or --help."""

from paddle_te.scripts import run

if __name__ == "__main__":
    run("paddle_te.hosts.paddlenlp.evaluation.evaluate")
