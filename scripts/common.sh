# Sourced by the other scripts: make_venv leaves a ready .venv in the repository root. Where there is an NVIDIA driver it
# has Transformer Engine and the nvgpu plug-in too, with which Paddle's CPU wheel computes on the GPU; GPU=0: without.
# PYTHON=python3.12 chooses the interpreter that a new .venv is made with.
# PEERS=1 is for tests that compare with other software: EleutherAI's harness in .venv, transformers in .venv-peers.
# HOST=paddleformers is for the tests of that host, which has .venv-paddleformers.

say() { printf '\n== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
supported() { case "$(python_version "$1")" in 3.11 | 3.12) return 0 ;; esac; return 1; }

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    supported "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.11 or 3.12 (found: $(python_version "$PYTHON" || echo none))"
    echo "$PYTHON"
    return
  fi
  local candidate
  for candidate in python3 python3.12 python3.11; do
    if supported "$candidate"; then echo "$candidate"; return; fi
  done
  die "no Python 3.11 or 3.12 found (python3 is $(python_version python3 || echo missing)); set PYTHON=/path/to/python3.12"
}

# What building needs beyond Python itself: venv with pip, Python's headers, a C++ compiler.
missing_tools() {
  "$1" -c 'import ensurepip, venv' 2>/dev/null || echo "python$(python_version "$1")-venv"
  "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' ||
    echo "python$(python_version "$1")-dev"
  command -v g++ >/dev/null || echo g++
}

need_tools() {
  local packages
  packages=$(missing_tools "$1")
  [ -n "$packages" ] || return 0
  packages=$(echo $packages)
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing $packages"
    # shellcheck disable=SC2086  # a list of words
    apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages
    packages=$(missing_tools "$1")
    [ -z "$packages" ] || die "still missing after apt-get: $(echo $packages)"
  else
    die "missing: $packages. Install them (Debian, Ubuntu: sudo apt-get install $packages) and run this again"
  fi
}

# The newest CUDA version that the NVIDIA driver runs, such as 13000; 0 without a driver.
cuda_version() {
  "$1" -c '
import ctypes
version = ctypes.c_int()
try:
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
except OSError:
    pass
print(version.value)'
}

venv_extras() {
  local cuda=0 tests=test
  [ "${PEERS:-0}" = 0 ] || tests=test,harness
  [ "${GPU:-1}" = 0 ] || cuda=$(cuda_version .venv/bin/python)
  if [ "${cuda:=0}" -ge 13000 ]; then
    echo "cpu,paddlenlp,$tests,te-cu13,nvgpu"
  else
    [ "$cuda" = 0 ] || say "the NVIDIA driver is for CUDA $((cuda / 1000)).$((cuda % 1000 / 10)): the GPU needs one for \
CUDA 13 (580 or newer) here, or paddlepaddle-gpu (docs/get-started/install.md). Everything runs on the CPU" >&2
    echo "cpu,paddlenlp,$tests"
  fi
}

# The version of every package, for the Python in .venv (scripts/lock.sh).
lock() { echo "locks/python$(python_version .venv/bin/python).txt"; }

# Everything that decides what is in .venv, and where its editable installation points.
venv_stamp() {
  {
    echo "$1"
    pwd -P
    .venv/bin/python -VV
    cat setup.py pyproject.toml "$(lock)"
    find paddle_te/native \( -name '*.cpp' -o -name '*.map' -o -path '*/shim/*.h' \) -exec cat {} +
    [[ $1 != *nvgpu* ]] || find nvgpu -type f -not -path '*/build/*' -not -path '*.egg-info/*' -exec cat {} +
  } | sha256sum | cut -d' ' -f1
}

make_venv() {
  local extras
  if .venv/bin/python -c '' 2>/dev/null; then
    if [ -n "${PYTHON:-}" ] && [ "$(python_version "$PYTHON")" != "$(python_version .venv/bin/python)" ]; then
      die ".venv has Python $(python_version .venv/bin/python), PYTHON=$PYTHON is $(python_version "$PYTHON"); remove .venv to change it"
    fi
  else
    local python
    python=$(find_python)
    need_tools "$python"
    say "making .venv with Python $(python_version "$python")"
    "$python" -m venv --clear .venv
  fi
  extras=$(venv_extras)
  if [ "$(cat .venv/stamp 2>/dev/null)" != "$(venv_stamp "$extras")" ]; then
    need_tools .venv/bin/python
    say "installing paddle_te and its pinned dependencies into .venv (first time: a few minutes)"
    # --no-compile: byte code is made when a module is first imported, for the few that are
    .venv/bin/python -m pip install --disable-pip-version-check --no-compile -c "$(lock)" -e ".[$extras]"
    if [[ $extras == *nvgpu* ]]; then
      say "compiling and installing the nvgpu plug-in (first time: a few minutes)"
      .venv/bin/python -m pip install --disable-pip-version-check --no-compile ./nvgpu
    fi
    venv_stamp "$extras" >.venv/stamp
  fi
}

# PyTorch and transformers want a newer huggingface_hub than PaddleNLP takes, so they have an environment of their own.
make_peers() {
  export PADDLE_TE_HF_PYTHON="$PWD/.venv-peers/bin/python"
  "$PADDLE_TE_HF_PYTHON" -c 'import torch, transformers' 2>/dev/null && return
  say "installing PyTorch and transformers into .venv-peers (first time: a few minutes)"
  .venv/bin/python -m venv --clear .venv-peers
  "$PADDLE_TE_HF_PYTHON" -m pip install --disable-pip-version-check --no-compile 'torch>=2.11' 'transformers>=5,<6'
}

# PaddleFormers wants other versions than PaddleNLP of what both require, so it has an environment of its own.
make_paddleformers() {
  local lock stamp extras=cpu,paddleformers,trackers
  lock="locks/paddleformers/python$(python_version .venv/bin/python).txt"
  stamp=$({
    echo "$extras"
    pwd -P
    cat "$lock" setup.py paddle_te/native/shim.{cpp,map} paddle_te/native/shim/*.h
  } | sha256sum)
  [ "$(cat .venv-paddleformers/stamp 2>/dev/null)" != "$stamp" ] || return 0
  say "installing PaddleFormers into .venv-paddleformers (first time: a few minutes)"
  .venv/bin/python -m venv --clear .venv-paddleformers
  .venv-paddleformers/bin/python -m pip install --disable-pip-version-check --no-compile -c "$lock" \
    -e ".[$extras]" pytest pytest-timeout
  printf '%s\n' "$stamp" >.venv-paddleformers/stamp
}
