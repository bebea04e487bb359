"""Where a job runs, on all machines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paddle_te.launch.devices import Devices
from paddle_te.launch.nodes import Nodes


@dataclass(frozen=True)
class Machines:
    """Where a job runs: the devices of this node, and the nodes, which have as many each."""

    devices: Devices
    nodes: Nodes

    @property
    def world(self) -> int:
        """The number of devices of the job, and so of its processes."""
        return len(self.devices.ids) * self.nodes.count

    def folder(self, logs: Path) -> Path:
        """Return this node's part of a folder of logs, which nodes share."""
        return logs / f"node{self.nodes.rank}" if self.nodes.count > 1 else logs
