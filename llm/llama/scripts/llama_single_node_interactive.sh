#!/usr/bin/env bash
# Pretrain Llama on the devices of this machine (or, with NNODES, NODE_RANK and MASTER, on this node of several):
#
#   bash llama_single_node_interactive.sh <model_name> <tokenizer_name> <batch_size_per_device> <FSDP> <TP> <PP> <VP> \
#     <GA> <SP> <max_seqlen> <sharding_stage> <backend> <precision> <recompute> <resume_step> <init_weight> <nsys_profile>
#
# An argument left out or empty has its default; --help lists them all, with the environment variables (DEVICES,
# OUTPUT_BASE, DATA_PATH, MOCK_DATA, EXTRA_ARGS, DRY_RUN=1 to see the command, ...). paddle_te/launch checks and runs.
# PYTHON chooses the interpreter; otherwise the active environment's, or the repository's .venv.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/python.sh"
exec "$PYTHON" -m paddle_te.launch pretrain "--training_script=${TRAINING_SCRIPT:-$root/llm/llama/run_pretrain.py}" "$@"
