"""A job whose step has no room on a GPU: what its screen says, and that it ends; over two GPUs where there are two."""

import re
import subprocess
import sys
import time

import paddle
import pytest

from tests.processes import end

SIZE = dict(model_name="llama-125m", tokenizer_name="none", max_seqlen=8192, batch_size_per_device=512)
LAYOUTS = {"one": {}, "tp2": dict(TP=2), "pp2": dict(PP=2, GA=2), "sharding1": dict(FSDP=2)}
END, TIMEOUT = 10, 90  # seconds from the first error to the end, and of the whole job


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_job_says_so_and_ends(gpu, tmp_path, layout):
    """Without memory for its logits: sizes and layouts that fit; no rank waits for another."""
    ranks = 1 if layout == "one" else 2
    if paddle.base.core.get_custom_device_count("nvgpu") < ranks:
        pytest.skip("needs 2 GPUs")
    arguments = SIZE | dict(FSDP=1, TP=1, PP=1, GA=1, backend="te", precision="bf16", SP="false") | LAYOUTS[layout]
    arguments |= dict(MOCK_DATA=1, MAX_STEPS=2, CHECK_MEMORY=0, DEVICE=gpu.split(":")[0], EXP_NAME="run")
    arguments |= dict(OUTPUT_BASE=tmp_path, DEVICES=",".join(map(str, range(ranks))))
    words = [f"--{name}={value}" for name, value in arguments.items()]
    status, said, seconds = watch([sys.executable, "-m", "paddle_te.launch", "pretrain", *words], tmp_path)
    assert status == 1, said[-3000:]
    assert "out of memory on nvgpu" in said and " more wanted" in said, said[-3000:]
    assert "All layouts: paddle-te plan llama-125m" in said
    assert seconds < END


def watch(command, folder):
    """(exit status, what the screen and the ranks' logs say, seconds from the first error that they say to the end)."""
    screen, seen = folder / "screen", None

    def said():
        return "".join(log.read_text(errors="replace") for log in [screen, *folder.glob("run/logs/workerlog.*")])

    with open(screen, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        last = time.monotonic() + TIMEOUT
        while process.poll() is None and time.monotonic() < last:
            if seen is None and re.search(r" error: |Traceback|SIGSEGV", said()):
                seen = time.monotonic()
            time.sleep(0.1)
        status = end(process, timeout=0.1)
    return status, said(), time.monotonic() - (seen or 0)
