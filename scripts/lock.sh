#!/usr/bin/env bash
# Writes locks/python3.11.txt and locks/python3.12.txt: the version of every package, also of those that others require,
# for all extras in setup.py. constraints.txt has the versions that must not change, and why. Versions that a lock has
# already stay where they fit; `bash scripts/lock.sh --upgrade` takes the newest. Likewise locks/paddleformers/python*.txt
# from locks/paddleformers/requirements.in. Needs PyPI, and uv: pip install uv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v uv >/dev/null || { echo "error: uv is missing: pip install uv" >&2; exit 2; }
for version in 3.11 3.12; do
  compile() {
    uv pip compile --quiet --python-version "$version" --python-platform x86_64-manylinux_2_28 --no-config \
      --custom-compile-command "bash scripts/lock.sh" "$@"
  }
  compile setup.py --all-extras --constraint constraints.txt --output-file "locks/python$version.txt" "$@"
  compile locks/paddleformers/requirements.in --output-file "locks/paddleformers/python$version.txt" "$@"
done
