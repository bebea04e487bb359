"""What the clusters of these tests are made of: Debian's packages, unpacked and not installed, and namespaces."""

import os
import shutil
import subprocess


class Unavailable(Exception):
    """Why there can be no cluster on this machine."""


def download(folder, packages):
    """Unpacks the packages below folder/root. Raises Unavailable where they cannot be had."""
    what = f"{packages[0]} and {len(packages) - 1} more of Debian's packages"
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise Unavailable(f"{what} come through apt-get, which this system does not have")
    fetch = ["apt-get", "download", "-qq", *packages]
    done = subprocess.run(fetch, cwd=folder, capture_output=True, text=True)
    if done.returncode and os.geteuid() == 0:
        subprocess.run(["apt-get", "update", "-qq"], capture_output=True)
        done = subprocess.run(fetch, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{what} cannot be downloaded: {done.stderr.strip()[-300:]}")
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, folder / "root"], check=True)


def unshare(*more):
    """The command that starts a node in PID, mount and UTS namespaces of its own. Raises Unavailable without them."""
    command = ["unshare", "--mount", "--pid", "--uts", *more, "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid():
        command += ["--user", "--map-root-user"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unavailable(f"no namespaces for the nodes: {' '.join(command)}: {error}") from error
    return command
