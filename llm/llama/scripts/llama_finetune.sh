#!/usr/bin/env bash
# Fine-tune Llama on the devices of this machine (or, with NNODES, NODE_RANK and MASTER, on this node of several):
#
#   bash llama_finetune.sh <model_name> <tokenizer_name> <dataset> <output> <method> <batch_size_per_device> <FSDP> <TP> \
#     <GA> <SP> <max_seqlen> <sharding_stage> <backend> <precision> <recompute> <resume_step> <nsys_profile>
#
# An argument left out or empty has its default; --help lists them all, with the environment variables (DEVICES,
# MAX_STEPS, EXTRA_ARGS, DRY_RUN=1 to see the command, ...). paddle_te/launch checks and runs.
# PYTHON chooses the interpreter; otherwise the active environment's, or the repository's .venv.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/python.sh"
exec "$PYTHON" -m paddle_te.launch finetune "--training_script=${TRAINING_SCRIPT:-$root/llm/llama/run_finetune.py}" "$@"
