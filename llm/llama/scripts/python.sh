# Sourced by the scripts beside it. root: the repository; PYTHON: as set, else the active environment's, else .venv's.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ -x "$root/.venv/bin/python" ]; then PYTHON=$root/.venv/bin/python; fi
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
