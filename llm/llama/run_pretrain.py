"""Pretrains a model: see paddle_te.training.pretrain, or --help."""

from paddle_te.scripts import run

if __name__ == "__main__":
    run("paddle_te.training.pretrain")
