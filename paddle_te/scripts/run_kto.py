"""The program of each process of `paddle-te kto`: see paddle_te.hosts.paddlenlp.training.kto."""

from paddle_te.scripts import run

if __name__ == "__main__":
    run("paddle_te.hosts.paddlenlp.training.kto")
