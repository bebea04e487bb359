"""The steps of the Dockerfile, in order and in a fresh folder, without docker and without a download.

pip is told by its environment variables to take what these packages require from the present environment, and nvgpu
is compiled for no GPU, which it is already. The packages of the system are not installed.
"""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests import processes

ROOT = Path(__file__).parents[2]


def instructions():
    """[(instruction, its text)] of the Dockerfile."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line]


def ignored(folder, names):
    """Of .dockerignore, for shutil.copytree; but what is compiled of nvgpu comes along."""
    compiled = ROOT / "nvgpu/build"
    if compiled in (Path(folder), *Path(folder).parents):
        return set()
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    top = {pattern for pattern in patterns if "/" not in pattern} if Path(folder) == ROOT else set()
    anywhere = [pattern.removeprefix("**/") for pattern in patterns if pattern.startswith("**/")]
    return top & set(names) | shutil.ignore_patterns(*anywhere)(folder, names)


class Image:
    """A folder that stands for the image's root, on which the instructions act."""

    def __init__(self, root):
        self.root, self.folder, self.command = root, root, None
        theirs = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        self.environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
        self.environment |= dict(PYTHONPATH=os.pathsep.join(theirs), NVGPU_RUNTIMES="host", PIP_NO_DEPS="1")
        self.environment |= dict(PIP_NO_INDEX="1", PIP_NO_BUILD_ISOLATION="0", PIP_IGNORE_INSTALLED="1")
        self.environment |= dict(CFLAGS="-O0", CXXFLAGS="-O0")  # the shim is not run here

    def inside(self, text):
        return re.sub(r"(?<![\w.])/(opt|work)\b", rf"{self.root}/\1", text)

    def do(self, instruction, text):
        getattr(self, instruction.lower())(self.inside(text))

    def copy(self, text):
        source, target = text.split()
        assert source == "."
        shutil.copytree(ROOT, target, ignore=ignored)

    def workdir(self, text):
        self.folder = Path(text)
        self.folder.mkdir(parents=True, exist_ok=True)

    def env(self, text):
        name, _, value = text.partition("=")
        self.environment[name] = value.replace(f"${name}", self.environment[name])

    def run(self, text):
        if not text.startswith("apt-get"):
            done = self.call(["sh", "-c", text])
            assert done.returncode == 0, done.stderr[-3000:]

    def cmd(self, text):
        self.command = shlex.split(text.strip("[]").replace(",", " "))

    def call(self, command):
        return processes.run(command, cwd=self.folder, env=self.environment, timeout=500)


@pytest.fixture(scope="module")
def image(tmp_path_factory, nvgpu_host):
    image = Image(tmp_path_factory.mktemp("image"))
    (name, base), *steps = instructions()
    assert name == "FROM" and base.startswith("nvidia/cuda:13")
    for step in steps:
        image.do(*step)
    return image


def test_what_it_installs_is_its_own(image):
    """The command, the package and the plug-in, of the image's folder, and the command that it runs by default."""
    done = image.call(image.command)
    assert done.returncode == 0 and done.stdout.startswith("usage: paddle-te COMMAND"), done.stderr
    where = "import nvgpu, paddle_te; print(paddle_te.__file__, nvgpu.__file__)"
    done = image.call(["python", "-c", where])
    assert all(path.startswith(f"{image.root}/opt/venv/lib/") for path in done.stdout.split()), done.stdout
    assert list((image.root / "opt/venv").glob("lib/*/site-packages/nvgpu/host/libnvgpu.so"))


def test_the_lock_is_that_of_the_images_python():
    """Ubuntu 24.04's python3 is 3.12."""
    text = (ROOT / "Dockerfile").read_text()
    assert "ubuntu24.04" in text and re.findall(r"locks/\S+", text) == ["locks/python3.12.txt"]


def test_the_base_image_is_of_the_locked_cuda():
    (cuda,) = re.findall(r"nvidia/cuda:(\d+\.\d+)", (ROOT / "Dockerfile").read_text())
    assert f"nvidia-cuda-runtime=={cuda}." in (ROOT / "constraints.txt").read_text()
