#!/usr/bin/env bash
# Tune Llama on single answers that are wanted or not (KTO). Arguments and variables are those of
# llama_finetune.sh; --help lists them. docs/guides/preferences.md describes the data and the flags of EXTRA_ARGS.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/python.sh"
exec "$PYTHON" -m paddle_te.launch kto "--training_script=${TRAINING_SCRIPT:-$root/llm/llama/run_kto.py}" "$@"
