"""Rank 0's store is reached on MASTER's address and on no other of this machine, and waits for no half command."""

import os
import subprocess
import sys

from tests.processes import free_ports

ALONE = """
import os, socket, time
from paddle.base import core
from paddle_te.upstream import store_address, threaded_store
threaded_store.apply()
if os.environ["GUARDED"] == "1":
    store_address.apply()
    store_address.COMMAND_SECONDS = 2
store = core.create_or_get_global_tcp_store()
store.set("key", "value")
assert store.get("key") == b"value"
host, port = os.environ["PADDLE_MASTER"].split(":")
for address in (host, "127.0.0.9"):
    with socket.socket() as probe:
        print(address, probe.connect_ex((address, int(port))) == 0)
if os.environ["GUARDED"] == "1":
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(bytes(1))  # a command has four
        time.sleep(0.5)
        store.set("key", "after")
        print("a stranger's half command, then", store.get("key").decode())
"""


def test_the_store_listens_on_masters_address_alone_and_outlasts_half_a_command():
    for guarded in "01":
        master = f"127.0.0.2:{free_ports(1)[0]}"
        environ = os.environ | dict(PADDLE_MASTER=master, PADDLE_TRAINER_ID="0", PADDLE_TRAINERS_NUM="1")
        environ |= dict(GUARDED=guarded, PADDLE_CURRENT_ENDPOINT=master, PADDLE_TRAINER_ENDPOINTS=master)
        done = subprocess.run([sys.executable, "-c", ALONE], env=environ, capture_output=True, text=True, timeout=200)
        reached = [line for line in done.stdout.splitlines() if line.startswith(("127.", "a stranger"))]
        expected = ["127.0.0.2 True", f"127.0.0.9 {guarded == '0'}"] + ["a stranger's half command, then after"] * (
            guarded == "1"
        )
        assert reached == expected, done.stdout + done.stderr[-3000:]
