#!/usr/bin/env bash
# Tune Llama on pairs of a better and a worse answer (DPO and its kin). Arguments and variables are those of
# llama_finetune.sh; --help lists them. docs/guides/preferences.md describes the data and the flags of EXTRA_ARGS.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/python.sh"
exec "$PYTHON" -m paddle_te.launch dpo "--training_script=${TRAINING_SCRIPT:-$root/llm/llama/run_dpo.py}" "$@"
