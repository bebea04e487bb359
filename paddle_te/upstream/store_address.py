"""Let rank 0's TCP store listen only on MASTER's address, 127.0.0.1 for one node, and wait for no half command.

Paddle's store listens on all addresses of the machine (IP_ANY) and takes commands from whoever connects, one after the
other; half of one keeps all ranks waiting for ever. Paddle offers no choice, so its calls of `bind` go through here
while the store is made. The bound on receiving, SO_RCVTIMEO, passes from the listening socket to the accepted ones, and
the store closes a connection of which it cannot receive. Who reaches MASTER's address, on one node any user of the
machine, can still connect and give whole commands: the store asks nobody for a token.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from typing import Any

from paddle.base import core

from paddle_te.upstream.imported_functions import replaced
from paddle_te.upstream.replacement import Replacement

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "Whoever reaches the machine over a network can hang a training that starts."
LIBRARY = "libphi_core.so"
COMMAND_SECONDS = 30  # for the rest of a command that has begun; a rank sends it in one go

_libc = ctypes.CDLL(None)
_Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32)


def _bind_to(host: str, port: int) -> Any:
    """Return the function that replaces bind; it leaves any other port alone."""

    def bind(descriptor: int, address: int, length: int) -> int:
        family, number = struct.unpack("=H", ctypes.string_at(address, 2))[0], ctypes.string_at(address + 2, 2)
        if family == socket.AF_INET and number == struct.pack(">H", port):  # sockaddr_in
            ctypes.memmove(address + 4, socket.inet_aton(host), 4)
            bound = struct.pack("@ll", COMMAND_SECONDS, 0)  # timeval
            _libc.setsockopt(ctypes.c_int(descriptor), socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound, len(bound))
        return _libc.bind(ctypes.c_int(descriptor), ctypes.c_void_p(address), ctypes.c_uint32(length))

    return _Function(bind)


def _store_on_its_address(*args: Any, **kwargs: Any) -> Any:
    host, _, port = os.environ.get("PADDLE_MASTER", "").partition(":")
    if not port:
        return _store.original(*args, **kwargs)
    with replaced(LIBRARY, {"bind": _bind_to(socket.gethostbyname(host), int(port))}):
        return _store.original(*args, **kwargs)


_store = Replacement(core, "create_or_get_global_tcp_store", _store_on_its_address)
apply, undo = _store.apply, _store.undo
