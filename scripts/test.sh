#!/usr/bin/env bash
# Lints and runs the whole test suite, making .venv first if it is missing. Arguments go to pytest:
#   bash scripts/test.sh                      everything
#   bash scripts/test.sh tests/layers -k rope
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh

make_venv
export PATH="$PWD/.venv/bin:$PATH" # what tests start finds this Python too

say "ruff"
ruff check .
ruff format --check .

say "clang-format"
find paddle_te nvgpu tests -regextype posix-extended -regex '.*\.(cc|cpp|h|cu|cuh)' -not -path '*/build/*' -print0 |
  xargs -0 clang-format --dry-run --Werror

say "building the host runtime of nvgpu"
python nvgpu/build.py --runtime host

say "pytest"
python -m pytest "$@"
