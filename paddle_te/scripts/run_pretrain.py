"""The program of each process of `paddle-te pretrain`: see paddle_te.training.pretrain."""

from paddle_te.runs import screen
from paddle_te.upstream import deferred_imports

if __name__ == "__main__":
    screen.before_imports()
    deferred_imports.apply()  # before anything imports PaddleNLP
    from paddle_te.training.pretrain import main

    main()
