"""Pretrains Llama: see paddle_te.training.pretrain, or --help."""

from paddle_te.training.pretrain import main

if __name__ == "__main__":
    main()
