"""Two nodes on one machine, each with a network, processes and a name of its own, sshd, and Open MPI.

Debian's packages, unpacked and not installed; keys and configuration lie below one folder. The nodes are joined by a
pair of virtual Ethernet devices, as 10.0.0.1 (node1) and 10.0.0.2 (node2), and share the machine's files.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil

from tests.multiprocess.cluster.machines import Unavailable, download, unshare
from tests.processes import environment_of_children, write_stacks

PACKAGES = """openssh-server openssh-client libwrap0 openmpi-bin openmpi-common libopenmpi3 libpmix2 libhwloc15
    libevent-2.1-7 libevent-core-2.1-7 libevent-pthreads-2.1-7 libmunge2 libucx0 libfabric1 libibverbs1 librdmacm1
    libnl-3-200 libnl-route-3-200 libpsm2-2 libpsm-infinipath1""".split()
ADDRESSES = {"node1": "10.0.0.1", "node2": "10.0.0.2"}

SSHD = """\
HostKey {folder}/host
AuthorizedKeysFile {folder}/key.pub
AuthenticationMethods publickey
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
SetEnv {environ}
"""
SSH = """#!/bin/sh
exec {root}/usr/bin/ssh -F none -i {folder}/key -o BatchMode=yes -o StrictHostKeyChecking=no \\
  -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"
"""

# what a node runs: $0 its name, $1 the folder, $2 sshd
NODE = """
hostname "$0" && mount --bind "$1/hosts" /etc/hosts && mount --bind "$1/passwd" /etc/passwd &&
mount -t tmpfs none /run && mkdir -m 755 /run/sshd && ip link set lo up || exit
until ip addr add "$3/24" dev eth0 2>/dev/null; do sleep 0.05; done
ip link set eth0 up
"$2" -D -f "$1/sshd_config" -E "$1/$0.log" & wait $!
"""


class Pair:
    """start() it, stop() it.

    environ: what is in the environment of all that runs on the nodes, besides PATH and the like.
    """

    def __init__(self, folder, environ):
        if os.geteuid() or not shutil.which("ip"):
            raise Unavailable("sshd and virtual networks need root and iproute2's ip")
        self.folder, self.nodes = Path(folder), {}
        self.unshare = unshare("--net")
        download(self.folder, PACKAGES)
        root = self.folder / "root"
        self.sshd, self.bin = root / "usr/sbin/sshd", self.folder / "bin"
        (libraries,) = root.glob("usr/lib/*/openmpi")
        libraries = libraries.parent
        self.environ = {
            "PATH": f"{self.bin}:{root / 'usr/bin'}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{libraries}:{root / 'lib' / libraries.name}:{libraries / 'openmpi/lib'}",
            "OPAL_PREFIX": str(root / "usr"),
            "PMIX_MCA_pcompress_base_silence_warning": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            **environ,
        }
        environment_of_children(self.environ)
        self._configure(root)

    def _configure(self, root):
        self.bin.mkdir()
        (self.bin / "mpirun").symlink_to(root / "usr/bin/mpirun.openmpi")
        (self.bin / "ssh").write_text(SSH.format(root=root, folder=self.folder))
        (self.bin / "ssh").chmod(0o755)
        for name in ("host", "key"):
            keygen = [root / "usr/bin/ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name]
            subprocess.run(keygen, check=True)
        environ = " ".join(f'"{name}={value}"' for name, value in self.environ.items())
        (self.folder / "sshd_config").write_text(SSHD.format(folder=self.folder, environ=environ))
        hosts = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in ADDRESSES.items())]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        users = Path("/etc/passwd").read_text()
        if "\nsshd:" not in users:
            users += "sshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n"
        (self.folder / "passwd").write_text(users)

    def start(self):
        for name, address in ADDRESSES.items():
            command = [*self.unshare, "sh", "-c", NODE, name, self.folder, self.sshd, address]
            with open(self.folder / f"{name}.out", "wb") as out:
                self.nodes[name] = subprocess.Popen(
                    command, env=self.environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
                )
        self.wait_for(lambda: all(self._init(name) for name in ADDRESSES), "nodes")
        first, second = (str(self._init(name)) for name in ADDRESSES)
        link = "ip link add eth0 type veth peer name eth0 netns".split()
        done = subprocess.run(["nsenter", "-t", first, "-n", *link, second], capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(f"no virtual network: {done.stderr.strip()}")
        for address in ADDRESSES.values():
            self.wait_for(lambda to=address: self.run("node1", f"ssh {to} true").wait() == 0, f"sshd of {address}")

    def _init(self, name):
        """The node's first process, once it has namespaces of its own."""
        for child in psutil.Process(self.nodes[name].pid).children():
            if os.readlink(f"/proc/{child.pid}/ns/net") != os.readlink("/proc/self/ns/net"):
                return child.pid
        return None

    def run(self, node, script, output=subprocess.DEVNULL, cwd="/"):
        """Starts a bash script on a node. Returns nsenter's Popen; see `signal`."""
        enter = ["nsenter", "-t", str(self._init(node)), "-m", "-p", "-u", "-n", f"--wd={cwd}", "bash", "-c", script]
        return subprocess.Popen(
            enter,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def end(self, process, seconds):
        """Exit status of a script that `run` started; None if it was killed then, all stacks written."""
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            write_stacks(process.pid, *(node.pid for node in self.nodes.values()))
            self.signal(process, signal.SIGKILL)
            process.wait()
            return None

    @staticmethod
    def signal(process, signum):
        """Sends a signal to a script that `run` started.

        SIGINT to its process group, as Ctrl-C does; SIGKILL to all that it started on its node.
        """
        (script,) = psutil.Process(process.pid).children()
        if signum == signal.SIGINT:
            return os.killpg(process.pid, signum)
        for victim in (script, *(script.children(recursive=True) if signum == signal.SIGKILL else ())):
            victim.send_signal(signum)

    def wait_for(self, condition, what, seconds=120):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"no {what} in {seconds} s\n{self.logs()}"
            time.sleep(0.05)

    def logs(self):
        return "\n".join(
            f"{name}: {path.read_text()[-1500:]}" for name in ADDRESSES for path in self.folder.glob(f"{name}.*")
        )

    def stop(self):
        for node in self.nodes.values():
            node.kill()  # and so all of its processes
            node.wait()
