"""Paddle's TCP store, through which ranks find each other."""

import os

import paddle

FLAG = "FLAGS_tcp_store_using_libuv"


def use_threaded_store():
    """Makes rank 0 serve the store from a plain thread; call it before fleet or a process group is initialised.

    Paddle 3.3's default, a libuv loop, still runs while rank 0's libraries are being torn down: when another rank
    hangs up in that moment, it logs through a library that is gone and aborts, and a training that had ended well
    exits with 250 (7 of 125 two-process exits; 0 of 60 with the plain thread). Set FLAGS_tcp_store_using_libuv
    yourself to choose otherwise.
    """
    if FLAG not in os.environ:
        paddle.set_flags({FLAG: False})
