#!/usr/bin/env bash
# Writes locks/python3.11.txt and locks/python3.12.txt: the version of every package, also of those that others require,
# for the extras in setup.py with PaddleNLP as the host. constraints.txt has the versions that must not change, and why.
# Versions that a lock has already stay where they fit; `bash scripts/lock.sh --upgrade` takes the newest. Likewise
# locks/paddleformers/python*.txt with PaddleFormers as the host. Needs PyPI, and uv: pip install uv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v uv >/dev/null || { echo "error: uv is missing: pip install uv" >&2; exit 2; }

shared=(cpu data plots te-cu12 te-cu13 nvgpu profile docs test)
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
# what both hosts are used with, and PaddleFormers itself: the rest of constraints.txt is for PaddleNLP
grep -E '^(paddlepaddle|xxhash|transformer-engine|nvidia|ruff|clang-format|codespell|mypy|types-|mkdocs)' constraints.txt >"$constraints"
cat locks/paddleformers/constraints.txt >>"$constraints"

for version in 3.11 3.12; do
  # compile LOCK CONSTRAINTS EXTRA...
  compile() {
    local lock=$1 constraints=$2
    shift 2
    # shellcheck disable=SC2046  # a list of words
    uv pip compile setup.py --quiet --python-version "$version" --python-platform x86_64-manylinux_2_28 --no-config \
      --custom-compile-command "bash scripts/lock.sh" $(printf -- '--extra %s ' "$@") --constraint "$constraints" \
      --output-file "$lock" "${options[@]}"
  }
  options=("$@")
  compile "locks/python$version.txt" constraints.txt paddlenlp harness "${shared[@]}"
  compile "locks/paddleformers/python$version.txt" "$constraints" paddleformers "${shared[@]}"
done
