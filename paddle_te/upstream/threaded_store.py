"""Serve Paddle's TCP store, through which ranks find each other, from a plain thread of rank 0.

Paddle's default, a libuv loop, still runs while rank 0's libraries are being torn down. When another rank hangs up in
that moment, the loop logs through a library that is gone and aborts (7 of 125 exits of two processes; 0 of 60 with the
plain thread). Must be applied before fleet or a process group is initialised. Whoever sets FLAGS_tcp_store_using_libuv
in the environment has chosen, and nothing is changed.
"""

import os

import paddle

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "A training of several processes that had ended well sometimes exits with status 250."
FLAG = "FLAGS_tcp_store_using_libuv"


def apply() -> None:
    if FLAG not in os.environ:
        paddle.set_flags({FLAG: False})


def undo() -> None:
    if FLAG not in os.environ:
        paddle.set_flags({FLAG: True})
