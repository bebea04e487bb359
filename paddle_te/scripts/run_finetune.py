"""The program of each process of `paddle-te finetune`: see paddle_te.training.finetune."""

from paddle_te.training.finetune import main

if __name__ == "__main__":
    main()
