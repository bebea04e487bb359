"""The line about the slowest of several ranks, and what a crash leaves."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import paddle

from paddle_te.training import liveness


def test_the_slowest_rank_is_named_every_so_many_steps(monkeypatch, caplog):
    monkeypatch.setattr(liveness, "STRAGGLER_STEPS", 2)
    monkeypatch.setattr(liveness, "gather_objects", lambda mine, ranks: [mine, (mine[0] + 3, 1, "other")])
    callback, model = liveness.StragglerCallback(), paddle.nn.Linear(2, 2)
    args, state = SimpleNamespace(world_size=2, process_index=0), SimpleNamespace(global_step=0)
    state.is_world_process_zero = True
    callback.on_train_begin(args, state, None, model=model)
    with caplog.at_level("INFO"):
        for _ in range(5):
            callback.on_step_begin(args, state, None)
            model(paddle.ones([1, 2]))
            state.global_step += 1
            callback.on_step_end(args, state, None)
    said = [record.message for record in caplog.records if "slowest" in record.message]
    assert [line.partition(":")[0] for line in said] == ["step 2", "step 4"]
    assert all("the slowest rank, 1 on other, takes 3." in line for line in said)


def test_a_crash_shows_where_each_thread_was():
    code = """
import ctypes
from paddle_te.training.liveness import show_signs_of_life

def reads_a_null_pointer():
    ctypes.string_at(0)

show_signs_of_life()
reads_a_null_pointer()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=120)
    assert ended.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in ended.stderr and "in reads_a_null_pointer" in ended.stderr
