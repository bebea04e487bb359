"""Evaluates a Llama checkpoint: see paddle_te.evaluation.evaluate, or --help."""

from paddle_te.evaluation.evaluate import main

if __name__ == "__main__":
    main()
