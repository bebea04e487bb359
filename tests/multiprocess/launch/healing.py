"""A real training on nvgpu's host runtime whose ranks are killed and stopped, beside one that is left alone.

    python -m tests.multiprocess.launch.healing [--layout tp2] [--backend none|pd] [--harm kill,stop,…] [--folder DIR]

Prints whether every loss and every weight are the same to the bit, and what the launcher said.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import processes
from tests.nvgpu_processes import build_host
from tests.pretraining import losses, numbers

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "llm/llama/scripts/llama_single_node_interactive.sh"
MODEL = ROOT / "tests/model"
# FSDP, TP, PP, GA, sharding stage; two processes each
LAYOUTS = {
    "tp2": (1, 2, 1, 2, "stage1"),
    "pp2": (1, 1, 2, 2, "stage1"),
    "sharding1": (2, 1, 1, 2, "stage1"),
    "sharding2": (2, 1, 1, 2, "stage2"),
    "sharding3": (2, 1, 1, 2, "stage3"),
    "dp2": (1, 1, 1, 2, "stage1"),
}
STEPS_APART = 4  # between two harms; a checkpoint every second step
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Training:
    """The launch script on two of the host runtime's devices. harms: how many times it will be harmed."""

    def __init__(self, folder, name, layout, backend, plugin, harms, precision="fp32", **more):
        self.output = Path(folder) / name / "output"
        self.screen_file = Path(folder) / f"{name}.screen"
        self.tag = f"{os.getpid()}-{name}-{time.monotonic_ns()}"
        fsdp, tp, pp, accumulation, stage = LAYOUTS[layout]
        values = [MODEL, "none", 1, fsdp, tp, pp, 1, accumulation, "false", 32, stage, backend, precision]
        environ = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **plugin}
        environ |= dict(DEVICE="nvgpu", DEVICES="0,1", MOCK_DATA="1", OUTPUT_BASE=str(folder), EXP_NAME=name)
        environ |= dict(MAX_STEPS=str(STEPS_APART * (harms + 1)), SAVE_STEPS="2", LEARNING_RATE="0.01")
        environ |= dict(TEST_TAG=self.tag, DEFERRED_IMPORTS="1") | more
        processes.environment_of_children(environ)
        with open(self.screen_file, "w") as output:
            command = ["bash", str(SCRIPT), *map(str, values)]
            self.process = subprocess.Popen(command, env=environ, stdout=output, stderr=output)

    def step(self):
        try:
            return json.loads((self.output / "train_log.jsonl").read_text().splitlines()[-1])["step"]
        except (OSError, IndexError, ValueError):
            return 0

    def ranks(self):
        """{number: process}, those that run the training script itself."""
        found = processes.with_in_environment("TEST_TAG", self.tag)
        found = [each for each in found if "run_pretrain.py" in "".join(each.cmdline()[1:3])]
        leaders = [each for each in found if os.getsid(each.pid) == each.pid]
        return {int(each.environ().get("PADDLE_TRAINER_ID", 0)): each for each in leaders}

    def harm(self, step, how, before=lambda: None, seconds=200):
        """Sends the signal to rank 1 once the log has this step, after before()."""
        deadline = time.monotonic() + seconds
        while self.step() < step:
            assert self.process.poll() is None and time.monotonic() < deadline, self.screen()[-6000:]
            time.sleep(0.02)
        before()
        os.kill(self.ranks()[1].pid, SIGNALS[how])

    def end(self, seconds=300):
        status = processes.end(self.process, seconds)
        assert status is not None, self.screen()[-6000:]
        return status

    def left(self):
        return processes.with_in_environment("TEST_TAG", self.tag)

    def screen(self):
        return self.screen_file.read_text()


def compare(folder, layout, backend, harms, plugin, **more):
    """Two trainings, of which one is harmed. Returns (the one that is left alone, the harmed one)."""
    whole = Training(folder, "whole", layout, backend, plugin, len(harms))
    assert whole.end() == 0, whole.screen()[-6000:]
    settings = dict(MAX_RESTARTS=str(len(harms)), STEP_TIMEOUT="8") | more
    harmed = Training(folder, "harmed", layout, backend, plugin, len(harms), **settings)
    for number, how in enumerate(harms):
        harmed.harm(STEPS_APART * number + 2, how)
    assert harmed.end() == 0, harmed.screen()[-6000:]
    return whole, harmed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="tp2", choices=LAYOUTS)
    parser.add_argument("--backend", default="pd", choices=["none", "pd"])
    parser.add_argument("--harm", default="kill,kill,stop,kill,kill")
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    plugin = dict(CUSTOM_DEVICE_ROOT=build_host())
    folder = args.folder or tempfile.mkdtemp()
    Path(folder).mkdir(exist_ok=True)
    harms = args.harm.split(",")
    whole, harmed = compare(folder, args.layout, args.backend, harms, plugin)
    for line in harmed.screen().splitlines():
        if line.startswith("launch:"):
            print(line)
    same = [read(whole.output) == read(harmed.output) for read in (losses, numbers)]
    words = [{True: "equal", False: "DIFFERENT"}[each] for each in same]
    print(
        f"{args.layout}, harmed {len(harms)} times ({args.harm}): {len(losses(whole.output))} losses {words[0]} to the"
    )
    print(f"bit, {len(numbers(whole.output))} tensors and numbers {words[1]}; processes left: {harmed.left()}")
    return not all(same)


if __name__ == "__main__":
    sys.exit(main())
