"""Evaluates a checkpoint: see paddle_te.evaluation.evaluate, or --help."""

from paddle_te.runs import screen
from paddle_te.upstream import deferred_imports

if __name__ == "__main__":
    screen.before_imports()
    deferred_imports.apply()  # before anything imports PaddleNLP
    from paddle_te.evaluation.evaluate import main

    main()
