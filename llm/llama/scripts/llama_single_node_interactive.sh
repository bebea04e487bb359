#!/usr/bin/env bash
# Pretrain Llama on the devices of this machine (or, with NNODES, NODE_RANK and MASTER, on this node of several):
#
#   bash llama_single_node_interactive.sh <model_name> <tokenizer_name> <batch_size_per_device> <FSDP> <TP> <PP> <VP> \
#     <GA> <SP> <max_seqlen> <sharding_stage> <backend> <precision> <recompute> <resume_step> <init_weight> <nsys_profile>
#
# An argument left out or empty has its default; --help lists them all, with the environment variables (DEVICES,
# OUTPUT_BASE, DATA_PATH, MOCK_DATA, EXTRA_ARGS, DRY_RUN=1 to see the command, ...). paddle_te/training/launch.py
# checks and runs. PYTHON chooses the interpreter; otherwise the active environment's, or the repository's .venv.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
names=(model_name tokenizer_name batch_size_per_device FSDP TP PP VP GA SP max_seqlen sharding_stage
  backend precision recompute resume_step init_weight nsys_profile)

if [ "${1-}" = -h ] || [ "${1-}" = --help ]; then
  args=(--help)
elif [ $# -gt ${#names[@]} ]; then
  echo "error: too many arguments: $# given, at most ${#names[@]} (the last is nsys_profile)" >&2
  exit 2
else
  args=()
  for name in "${names[@]}"; do
    if [[ ${1-} == --* ]]; then
      echo "error: $name: '$1': arguments go by position, without names (--help); EXTRA_ARGS takes run_pretrain.py's flags" >&2
      exit 2
    fi
    if [ -n "${1-}" ]; then args+=("--$name=$1"); fi
    shift || true
  done
fi

if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ -x "$root/.venv/bin/python" ]; then PYTHON=$root/.venv/bin/python; fi
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m paddle_te.training.launch "--training_script=${TRAINING_SCRIPT:-$root/llm/llama/run_pretrain.py}" \
  ${args[@]+"${args[@]}"}
