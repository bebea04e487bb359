"""The program of each process of `paddle-te pretrain`: see paddle_te.training.pretrain."""

from paddle_te.training.pretrain import main

if __name__ == "__main__":
    main()
