"""A Slurm cluster of two nodes on one machine, from Debian's packages: unpacked, not installed, all below one folder.

Each node is a slurmd with its own PID, mount and UTS namespace and a loopback address of its own (127.0.0.2 and .3);
killing the namespace's first process is the node's sudden death. All daemons run as the caller.
"""

import contextlib
import getpass
import os
import random
import signal
import subprocess
import time
from pathlib import Path

from tests.multiprocess.cluster.machines import download, unshare
from tests.processes import free_ports

PACKAGES = "munge libmunge2 slurmctld slurmd slurm-client slurm-wlm-basic-plugins libhwloc15 liblua5.1-0".split()
NODES = {"node1": "127.0.0.2", "node2": "127.0.0.3"}

CONF = """\
ClusterName=pair
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={run}/munge.sock
CredType=cred/munge
PluginDir={plugins}
StateSaveLocation={run}/state
SlurmdSpoolDir={run}/%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/%n.pid
SlurmctldLogFile={run}/slurmctld.log
SlurmdLogFile={run}/%n.log
# no cgroups, no accounting
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
SlurmdTimeout=10
JobRequeue=1
FirstJobId={first_job}
NodeName=node1 NodeAddr=127.0.0.2 Port={ports[1]} CPUs=2
NodeName=node2 NodeAddr=127.0.0.3 Port={ports[2]} CPUs=2
PartitionName=main Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP
"""

# what a node runs: $0 its name, $1 the folder with hosts, $2 slurmd, $3 slurmstepd
NODE = """
hostname "$0" && mount --bind "$1/hosts" /etc/hosts && "$2" -D -N "$0" -d "$3" & wait $!
"""


class Cluster:
    """start() it, stop() it; `environ` is what Slurm's commands need."""

    def __init__(self, folder):
        self.folder, self.run_folder, self.nodes = Path(folder), Path(folder) / "run", {}
        self.unshare = unshare()
        download(self.folder, PACKAGES)
        root = self.folder / "root"
        self.bin, self.sbin = root / "usr/bin", root / "usr/sbin"
        (plugins,) = root.glob("usr/lib/*/slurm-wlm")
        self.environ = os.environ | {
            "LD_LIBRARY_PATH": f"{plugins.parent}:{plugins}",
            "PATH": f"{self.bin}:{self.sbin}:{os.environ['PATH']}",
            "SLURM_CONF": str(self.run_folder / "slurm.conf"),
        }
        self._configure(plugins)

    def _configure(self, plugins):
        run = self.run_folder
        for name in ("state", *NODES):
            (run / name).mkdir(parents=True)
        run.chmod(0o755)
        settings = dict(run=run, plugins=plugins, user=getpass.getuser(), ports=free_ports(3))
        (run / "slurm.conf").write_text(CONF.format(first_job=random.randrange(1, 50_000), **settings))
        (run / "key").write_bytes(os.urandom(128))
        (run / "key").chmod(0o600)
        lines = Path("/etc/hosts").read_text().splitlines() + [f"{address} {name}" for name, address in NODES.items()]
        (run / "hosts").write_text("\n".join(lines) + "\n")

    def start(self):
        run = self.run_folder
        files = {"key-file": "key", "socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log"}
        options = [f"--{option}={run / name}" for option, name in {**files, "seed-file": "munge.seed"}.items()]
        self.call(self.sbin / "munged", "--force", "--num-threads=2", *options)
        self.call(self.sbin / "slurmctld-wlm")
        for name in NODES:
            self.node_up(name)
        self.wait_for_idle_nodes()

    def wait_for_idle_nodes(self):
        self.wait_for(lambda: len(self.call("sinfo", "-hN", "-tidle", "-o%N").split()) == len(NODES), "idle nodes", 120)

    def node_up(self, name):
        programs = (self.sbin / "slurmd-wlm", self.sbin / "slurmstepd-wlm")
        command = [*self.unshare, "sh", "-c", NODE, name, self.run_folder, *programs]
        with open(self.run_folder / f"{name}.out", "ab") as out:
            self.nodes[name] = subprocess.Popen(
                command, env=self.environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def node_down(self, name):
        """The node's sudden death, with all that it runs."""
        node = self.nodes.pop(name)
        node.kill()
        node.wait()

    def stop(self):
        for name in list(self.nodes):
            self.node_down(name)
        # Its state goes with its folder. Asked to end, slurmctld waits for its messages to nodes that are dead,
        # which took more than 90 s on a busy machine.
        for name in ("slurmctld.pid", "munge.pid"):
            with contextlib.suppress(OSError, ValueError):  # it has ended
                os.kill(int((self.run_folder / name).read_text()), signal.SIGKILL)

    def call(self, *command, environ=None):
        """Runs a command of Slurm's; returns what it printed."""
        done = subprocess.run(
            [str(word) for word in command],
            env=self.environ | (environ or {}),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self, job):
        """The job's state, such as RUNNING, and its exit status."""
        shown = self.call("scontrol", "-o", "show", "job", job)
        fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        return fields["JobState"], int(fields["ExitCode"].split(":")[0])

    def has_ended(self, job):
        """Whether the job has ended and none of it is left."""
        return self.state(job)[0] in {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}

    def wait_for(self, condition, what, seconds):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"no {what} in {seconds} s\n{self.logs()}"
            time.sleep(0.2)

    def logs(self):
        """The last lines of the daemons' logs."""
        tails = (f"{path.name}: {path.read_text()[-1500:]}" for path in self.run_folder.glob("*.log"))
        return "\n".join(tails)
