import json
import os
import subprocess
import sys

import pytest

from paddle_te import device, env, native
from paddle_te.native import Problem
from tests.conftest import missing_gpu

WHY = Problem("the moon is wrong", "wait for another")


@pytest.fixture(scope="module")
def report():
    return env.report()


def test_versions_and_machine(report):
    import paddle
    import paddlenlp

    assert report["packages"]["paddlenlp"] == paddlenlp.__version__
    assert paddle.__version__ in (report["packages"].get("paddlepaddle"), report["packages"].get("paddlepaddle-gpu"))
    assert report["python"]["executable"] == sys.executable
    assert report["machine"]["cores"] == len(os.sched_getaffinity(0))


def test_on_a_cpu_none_and_pd_train_in_fp32_only(report):
    if report["device"] != "cpu":
        pytest.skip(f"Paddle trains on {report['device']} here")
    assert report["usable"] == {"fp32": ["none", "pd"], "bf16": [], "fp8": ["pd"]}


def test_te_is_explained_by_every_condition_that_native_names(report):
    if missing_gpu() is None:
        pytest.skip("this machine has a GPU")
    for precision in ("bf16", "fp8"):
        reasons = report["unusable"][precision]["te"]
        for problem in native.diagnose(fp8=precision == "fp8"):
            assert problem._asdict() in reasons
        assert all(reason["what"] and reason["remedy"] for reason in reasons)
        assert "is no NVIDIA GPU" in reasons[0]["what"]


def test_every_backend_is_either_usable_or_explained(report):
    for precision in env.PRECISIONS:
        usable, unusable = report["usable"][precision], report["unusable"][precision]
        assert sorted([*usable, *unusable]) == sorted(env.BACKENDS)
        assert all(unusable.values())


@pytest.mark.parametrize("error", [subprocess.TimeoutExpired("nvidia-smi", 60), PermissionError("nvidia-smi")])
def test_an_nvidia_smi_that_hangs_is_no_gpu(monkeypatch, error):
    def run(*_, **__):
        raise error

    monkeypatch.setattr(env.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(env.subprocess, "run", run)
    assert env.nvidia_gpus() == []


def test_text_says_each_reason_once_with_its_remedy(report):
    text = env.format_report(report)
    for of in report["unusable"].values():
        for problems in of.values():
            for problem in problems:
                assert text.count(f": {problem['what']}\n      remedy: {problem['remedy']}") == 1
    assert report["packages"]["paddlenlp"] in text


def test_usable_backends_follow_native(monkeypatch):
    monkeypatch.setattr(env, "training_device", lambda: "cpu")
    monkeypatch.setattr(native, "diagnose", lambda fp8=False: [WHY] if fp8 else [])
    assert "te" not in env.usable_backends("bf16")  # a GPU that Paddle does not compute on is of no use
    monkeypatch.setattr(device, "compute_capability", lambda: (9, 0))
    assert env.backend_problems("te", "bf16") == []
    assert env.backend_problems("te", "fp8") == [WHY]
    assert "bf16" in env.backend_problems("te", "fp32")[0].remedy


@pytest.mark.parametrize("precision, names", [("fp32", {"none", "pd"}), ("fp8", {"pd"})])
def test_usable_backends_here(precision, names):
    assert names <= set(env.usable_backends(precision))


def test_device_is_left_as_it_was():
    import paddle

    before = paddle.device.get_device()
    env.usable_backends("bf16")
    assert paddle.device.get_device() == before


def test_wrong_precision():
    with pytest.raises(ValueError, match="precision 'fp64': it may be fp32, bf16, fp8"):
        env.usable_backends("fp64")


def test_gpus_are_read_from_nvidia_smi(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho "NVIDIA H200, 580.65.06, 143771 MiB, 9.0"\necho "Other, 1, 2 MiB, 8.0"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    first, second = env.nvidia_gpus()
    assert first == {
        "name": "NVIDIA H200",
        "driver_version": "580.65.06",
        "memory": "143771 MiB",
        "compute_capability": "9.0",
    }
    assert second["compute_capability"] == "8.0"
    smi.write_text("#!/bin/sh\necho failed\nexit 9\n")
    assert env.nvidia_gpus() == []


def run_env(*arguments, prelude=""):
    code = f"import sys; {prelude}; sys.argv[0] = 'env'; from paddle_te.env import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


def test_command_line_prints_and_saves_json(tmp_path):
    saved = tmp_path / "new" / "env.json"
    faster = "from paddle_te.upstream import deferred_imports; deferred_imports.apply()"
    result = run_env("--json", "--save", saved, prelude=faster)
    assert result.returncode == 0 and not result.stderr, result.stderr  # Paddle warns of what it lacks for its compiler
    assert json.loads(result.stdout) == json.loads(saved.read_text())


def test_without_paddle_it_still_reports():
    result = run_env(prelude="sys.modules['paddle'] = None")
    assert result.returncode == 0, result.stderr
    assert "import paddle fails" in result.stdout and "pip install -c constraints.txt" in result.stdout
    assert "none: no   pd: no   te: no" in result.stdout


def test_a_duplicate_library_is_pointed_out(report):
    twice = {"cudart": {"version": "13.0", "paths": ["/a/libcudart.so.13", "/b/libcudart.so.13"]}}
    assert "/b/libcudart.so.13  DUPLICATE" in env.format_report({**report, "native_libraries": twice})


@pytest.mark.parametrize(
    "available, kind",
    [([], "cpu"), (None, "cpu"), (["nvgpu"], "nvgpu"), (["nvgpu:0", "nvgpu:1"], "nvgpu"), (["other:0"], "cpu")],
)
def test_training_device_by_any_number_of_devices(monkeypatch, available, kind):
    """Paddle leaves the number away where there is one device."""
    import paddle

    monkeypatch.setattr(paddle.device, "get_available_custom_device", lambda: available)
    assert env.training_device() == kind
