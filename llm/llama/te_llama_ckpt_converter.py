"""Converts checkpoints: see paddle_te.weights.command, or --help."""

from paddle_te.weights.command import main

if __name__ == "__main__":
    main()
