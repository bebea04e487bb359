"""The nodes of a job: how many, which of them this one is, and where they find each other."""

from __future__ import annotations

import argparse
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from paddle_te.launch.devices import words_of
from paddle_te.launch.errors import LaunchError


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, as this one sees them."""

    count: int = 1
    rank: int = 0  # this node's
    master: str = ""  # address:port of the node of rank 0
    host: str = "127.0.0.1"  # this node's address


def find_nodes(args: argparse.Namespace, environ: Mapping[str, str]) -> Nodes:
    """Return the nodes of the job, from NNODES, NODE_RANK and MASTER, or from Slurm and IP_STR.

    Raises:
        LaunchError: several nodes and one of these is missing or makes no sense.
    """
    addresses = words_of(args.IP_STR)
    count, rank = args.NNODES, args.NODE_RANK
    if count == 1:
        return Nodes(host=addresses[0] if addresses else "127.0.0.1")
    if rank is None or rank >= count:
        raise LaunchError(f"NODE_RANK: with {count} nodes it must be 0 to {count - 1} (one a node), not {rank}")
    if wrong := several_tasks(environ):
        raise LaunchError(wrong)
    if addresses and len(addresses) != count:
        raise LaunchError(f"IP_STR: it must hold {count} addresses, one a node, not {len(addresses)}")
    master = args.MASTER or (addresses[0] if addresses else None)
    if not master:
        raise LaunchError(f"MASTER: with {count} nodes it must be address:port of the node with NODE_RANK 0")
    address, port = _parts_of(master)
    job = environ.get("SLURM_JOB_ID", "")  # two jobs may share a node's network, so each has its own two ports
    port = port or str(args.MASTER_PORT or (20000 + 2 * (int(job) % 5000) if job.isdigit() else 6070))
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65535:  # the launchers take the next one, too
        raise LaunchError(f"MASTER: {address}:{port} must be address:port, the port from 1 to 65534")
    if not args.DRY_RUN:
        name, address = address, _numeric(address)
        if rank == 0 and address.startswith("127.") and name not in (address, "localhost"):
            raise LaunchError(
                f"MASTER: {name!r} is {address} on this node, where no other node reaches it (/etc/hosts says so on "
                "Debian and Ubuntu); give the address that the other nodes know"
            )
    return Nodes(count, rank, f"{address}:{port}", _own_address(rank, address, addresses))


def _parts_of(master: str) -> tuple[str, str]:
    """Address and port, "" where there is none, of MASTER.

    Raises:
        LaunchError: an address that Paddle cannot use, or under which the other nodes do not find this one.
    """
    address, _, port = master.partition(":")
    if ":" in port or master.startswith("["):
        raise LaunchError(
            f"MASTER: {master} is an IPv6 address, and Paddle's processes find each other by IPv4 only; give the "
            "node's IPv4 address, or a name that has one, as address:port"
        )
    if not address.isascii() or address in ("", "0.0.0.0"):
        raise LaunchError(f"MASTER: {master} must be address:port, the address one that the other nodes know")
    return address, port


def several_tasks(environ: Mapping[str, str]) -> str:
    """Return what is wrong where srun starts several launchers on a node, "" where it does not.

    --ntasks-per-node=8 is usual where tasks are ranks. Tasks that have a NODE_RANK each are told apart by it.
    """
    tasks, nodes = (environ.get(f"SLURM_STEP_NUM_{name}") for name in ("TASKS", "NODES"))
    if "NODE_RANK" in environ or tasks == nodes:
        return ""
    on = "one node" if nodes == "1" else f"{nodes} nodes"
    return (
        f"SLURM_STEP_NUM_TASKS: srun starts this {tasks} times on {on}; start it once a node (--ntasks-per-node=1): it "
        "starts a process for each device itself"
    )


def _numeric(name: str) -> str:
    """Paddle's rendezvous server starts where --master equals the node's own address, so names do not do."""
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise LaunchError(f"MASTER: the address of {name!r} cannot be found ({error})") from error


def _own_address(rank: int, master: str, addresses: list[str]) -> str:
    """This node's address as the others reach it; the host name's may be a loopback address (Debian's 127.0.1.1)."""
    if rank == 0:
        return master
    if addresses:
        return addresses[rank]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))  # sends nothing; only chooses the route
        except OSError:
            return ""
        address = probe.getsockname()[0]
    if not address.startswith("127."):
        return address
    # nodes of one machine, as in tests: their names tell their loopback addresses, the route 127.0.0.1 for all of them
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return address
