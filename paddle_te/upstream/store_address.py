"""Rank 0's TCP store listens on MASTER's address alone: 127.0.0.1 for one node.

Paddle's store listens on all addresses of the machine (IP_ANY) and takes commands from whoever connects; half of one,
at the start, keeps all ranks waiting for ever. Paddle offers no choice, so its calls of `bind` go through here while
the store is made. Who reaches MASTER's address, on one node any user of the machine, can still connect.
"""

import ctypes
import os
import socket
import struct

from paddle.base import core

from paddle_te.upstream.imported_functions import replaced
from paddle_te.upstream.replacement import Replacement

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "Whoever reaches the machine over a network can hang a training that starts."
LIBRARY = "libphi_core.so"

_libc = ctypes.CDLL(None)
_Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32)


def _bind_to(host: str, port: int):
    """The function in the place of bind; any other port is none of its."""

    def bind(descriptor, address, length):
        family, number = struct.unpack("=H", ctypes.string_at(address, 2))[0], ctypes.string_at(address + 2, 2)
        if family == socket.AF_INET and number == struct.pack(">H", port):  # sockaddr_in
            ctypes.memmove(address + 4, socket.inet_aton(host), 4)
        return _libc.bind(ctypes.c_int(descriptor), ctypes.c_void_p(address), ctypes.c_uint32(length))

    return _Function(bind)


def _store_on_its_address(*args, **kwargs):
    host, _, port = os.environ.get("PADDLE_MASTER", "").partition(":")
    if not port:
        return _store.original(*args, **kwargs)
    with replaced(LIBRARY, {"bind": _bind_to(socket.gethostbyname(host), int(port))}):
        return _store.original(*args, **kwargs)


_store = Replacement(core, "create_or_get_global_tcp_store", _store_on_its_address)
apply, undo = _store.apply, _store.undo
