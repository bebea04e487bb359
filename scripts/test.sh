#!/usr/bin/env bash
# Lints and runs the tests, making .venv first if it is missing.
#   bash scripts/test.sh                          everything that this machine can run
#   bash scripts/test.sh --quick                  lint and unit tests: while you work
#   bash scripts/test.sh tests/unit/layers -k rope    pytest's arguments: these tests alone
# PEERS=1 also compares with transformers and EleutherAI's harness, for which it installs them. The tests of PaddleFormers
# as a host, tests/paddleformers, run in an environment of their own, .venv-paddleformers, which is made first if it is
# missing. HOST=paddleformers runs these alone, HOST=paddlenlp all others.
# JUNIT=DIR leaves reports there, which tools/status.py takes in: unit.xml, gpu.xml, processes.xml, paddleformers.xml.
# WORKERS=N runs N unit tests at a time (default: one a core, at most 4), and of the others two more, and PaddleFormers'
# beside these; but those on a GPU one at a time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh

make_venv
[ "${PEERS:-0}" = 0 ] || make_peers
export PATH="$PWD/.venv/bin:$PATH" # what tests start finds this Python too
unset PYTHONDONTWRITEBYTECODE      # pip makes no byte code (make_venv): each process would compile Paddle again
cores=$(nproc)
workers=${WORKERS:-$((cores < 4 ? cores : 4))}

say "ruff"
ruff check .
ruff format --check .

say "mypy"
mypy # pyproject.toml says which rooms are fully typed

say "codespell"
codespell # pyproject.toml says where, and which words are names

say "clang-format"
find paddle_te nvgpu tests -regextype posix-extended -regex '.*\.(cc|cpp|h|cu|cuh)' -not -path '*/build/*' -print0 |
  xargs -0 clang-format --dry-run --Werror

report() { # NAME: pytest's option that leaves a report of this name, where one is asked for
  [ -z "${JUNIT:-}" ] || echo "--junitxml=$JUNIT/$1.xml"
}

say "building the host runtime of nvgpu"
python nvgpu/build.py --runtime host

test_paddleformers() {
  say "tests of PaddleFormers as a host"
  make_paddleformers
  PADDLE_TE_PADDLENLP_PYTHON=$PWD/.venv/bin/python OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} \
    .venv-paddleformers/bin/python -m pytest $(report paddleformers) "${@:-tests/paddleformers}"
}
host=${HOST:-} # for this script alone: what tests start finds its host by what is installed
unset HOST
if [ "$host" = paddleformers ]; then
  test_paddleformers "$@"
  exit
fi

if [ $# -gt 0 ] && [ "$1" != --quick ]; then
  say "pytest"
  exec python -m pytest $(report chosen) "$@"
fi

# The workers share the cores, so each computes with one thread. A file's tests stay together: they share fixtures.
# Files run in the order given here, so that no long one is left for the end.
run() { # NAME of the report, workers, tests
  OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} python -m pytest $(report "$1") --dist loadfile --no-loadscope-reorder \
    -n "${@:2}" || failed=1
}
failed=0
unit=(tests/unit)
if [ "${1:-}" != --quick ]; then
  if [ "$(cuda_version python)" != 0 ]; then
    say "tests on a GPU"
    python -m pytest $(report gpu) tests/gpu || failed=1
  else
    unit+=(tests/gpu) # which are all skipped
  fi
fi
say "unit tests"
run unit "$workers" "${unit[@]}"
[ "${1:-}" != --quick ] || exit $failed
beside=
if [ "$host" != paddlenlp ]; then
  said=$(mktemp)
  set -m # a process group of its own, which ends with this script
  test_paddleformers >"$said" 2>&1 &
  beside=$!
  set +m
  trap 'kill -- "-$beside" 2>/dev/null || true' EXIT
fi
say "tests with several processes, and of whole commands"
run processes $((workers + 2)) tests/multiprocess/distributed tests/multiprocess nvgpu/tests tests/end_to_end # they often wait
if [ -n "$beside" ]; then
  wait "$beside" || failed=1
  cat "$said"
  rm "$said"
fi
exit $failed
