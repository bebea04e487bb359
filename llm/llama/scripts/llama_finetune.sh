#!/usr/bin/env bash
# Fine-tune Llama on the devices of this machine:
#
#   bash llama_finetune.sh <model> <tokenizer> <dataset> <output> <method> <batch_size_per_device> <FSDP> <TP> <GA> \
#     <SP> <max_seqlen> <sharding_stage> <backend> <precision> <recompute>
#
#   model, tokenizer  folders; the checkpoint is in the backend's layout (te_llama_ckpt_converter.py makes one) or
#                     Hugging Face's
#   dataset           folder of train.json and, if there is one, dev.json: JSON lines {"src": …, "tgt": …}
#   output            folder for the fine-tuned model or adapter, and for checkpoints
#   method            full, lora, lora-attention or lora-mlp (lora)
#   batch_size_per_device (4), FSDP (1), TP (1), GA (1), SP (false), max_seqlen (2048), sharding_stage (stage2),
#   backend           none, te or pd (te)
#   precision         bf16, fp8 or fp32 (bf16)
#   recompute         none, core_attn or full (none)
#
# An argument left out or empty has the default in brackets. From the environment: DEVICE (gpu, nvgpu, cpu) and DEVICES
# (0,1,2,3), found if not given; EXTRA_ARGS, flags of run_finetune.py; DRY_RUN=1 prints the command and stops; PYTHON.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)

fail() { echo "error: $*" >&2; exit 2; }

one_of() { # name value choices...
  local name=$1 value=$2 choice
  shift 2
  for choice; do if [ "$choice" = "$value" ]; then return; fi; done
  fail "$name: '$value' must be one of $*"
}

positive() { if ! [[ $2 =~ ^[1-9][0-9]*$ ]]; then fail "$1: '$2' must be a whole number of at least 1"; fi; }

if [ "${1-}" = -h ] || [ "${1-}" = --help ]; then
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
  exit
fi
for word; do
  if [[ $word == --* ]]; then
    fail "'$word': arguments go by position, without names (--help); EXTRA_ARGS takes run_finetune.py's flags"
  fi
done
if [ $# -gt 15 ]; then fail "too many arguments: $# given, at most 15 (the last is recompute)"; fi

model=${1-} tokenizer=${2:-${1-}} dataset=${3-} output=${4-}
method=${5:-lora} batch=${6:-4} fsdp=${7:-1} tp=${8:-1} ga=${9:-1}
sp=${10:-false} max_seqlen=${11:-2048} stage=${12:-stage2} backend=${13:-te} precision=${14:-bf16} recompute=${15:-none}

if [ ! -f "$model/config.json" ]; then fail "model: '$model' is no folder with config.json (--help lists the arguments)"; fi
if [ ! -d "$tokenizer" ]; then fail "tokenizer: '$tokenizer' is no folder"; fi
if [ ! -f "$dataset/train.json" ]; then fail "dataset: '$dataset' is no folder with train.json"; fi
if [ -z "$output" ]; then fail "output: give a folder for the result"; fi
one_of method "$method" full lora lora-attention lora-mlp
positive batch_size_per_device "$batch"; positive FSDP "$fsdp"; positive TP "$tp"; positive GA "$ga"
positive max_seqlen "$max_seqlen"
if [ $((max_seqlen % 16)) -ne 0 ]; then fail "max_seqlen: '$max_seqlen' must be divisible by 16"; fi
one_of SP "$sp" true false
one_of sharding_stage "$stage" stage1 stage2 stage3
one_of backend "$backend" none te pd
one_of precision "$precision" bf16 fp8 fp32
one_of recompute "$recompute" none core_attn full
if [ "$sp" = true ] && [ "$tp" -eq 1 ]; then fail "SP: sequence parallelism needs TP of at least 2"; fi
if [ "$precision" = fp8 ] && [ "$backend" = none ]; then fail "precision: fp8 needs backend te (or pd, emulated)"; fi

if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ -x "$root/.venv/bin/python" ]; then PYTHON=$root/.venv/bin/python; fi
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# the launcher of pretraining finds the devices: kind, numbers, and the first one's place among the visible ones
found=$("$PYTHON" - "$precision" <<'EOF'
import os, sys
from argparse import Namespace
from paddle_te.training.machines import LaunchError, find_devices

ids = os.environ.get("DEVICES")
args = Namespace(DEVICE=os.environ.get("DEVICE") or None, DEVICES=ids.split(",") if ids else None,
                 DRY_RUN=os.environ.get("DRY_RUN") == "1", precision=sys.argv[1])
try:
    devices = find_devices(args, os.environ)
except LaunchError as error:
    sys.exit(f"error: {error}")
print(devices.kind, ",".join(devices.ids), *devices.selected().values())
EOF
) || exit 2
read -r kind ids place <<<"$found"
count=$(tr ',' '\n' <<<"$ids" | wc -l)
if [ $((count % (tp * fsdp))) -ne 0 ]; then fail "TP, FSDP: $tp·$fsdp must divide the number of devices, $count ($ids)"; fi
if [ "$kind" = cpu ] && [ "$precision" = bf16 ]; then fail "precision: a CPU has fp32 (or, emulated by pd, fp8) only"; fi

script=$root/llm/llama/run_finetune.py
command=("$PYTHON" -u)
if [ "$count" -gt 1 ]; then
  command+=(-m paddle.distributed.launch --log_dir "$output/logs")
  if [ "$kind" = cpu ]; then command+=(--nproc_per_node "$count"); else command+=(--devices "$ids"); fi
elif [ "$kind" != cpu ]; then
  command=(env "FLAGS_selected_${kind}s=$place" "${command[@]}")
fi
if [ "$kind" = cpu ]; then # Paddle's launcher would go by what it sees
  unset CUDA_VISIBLE_DEVICES
  export CUSTOM_DEVICE_ROOT=
fi
declare -A flags=([none]=none [te]=transformer_engine [pd]=paddle)
command+=("$script"
  --model_name_or_path "$model" --tokenizer_name_or_path "$tokenizer" --dataset_name_or_path "$dataset"
  --output_dir "$output" --do_train true --device "$kind" --transformer_engine_backend "${flags[$backend]}"
  --per_device_train_batch_size "$batch" --per_device_eval_batch_size "$batch" --gradient_accumulation_steps "$ga"
  --max_length "$max_seqlen" --src_length $((max_seqlen / 2)) --tensor_parallel_degree "$tp"
  --sharding_parallel_degree "$fsdp" --sequence_parallel "$sp" --pad_to_max_length "$sp" --logging_steps 1)
if [ -f "$dataset/dev.json" ]; then command+=(--do_eval true); fi
if [ "$fsdp" -gt 1 ]; then command+=(--sharding "$stage"); fi
if [ "$method" != full ]; then
  targets=${method#lora}
  targets=${targets#-}
  command+=(--lora true --lora_targets "${targets:-all}")
fi
if [ "$kind" != cpu ] && [ "$precision" != fp32 ]; then command+=(--bf16 true --fp16_opt_level O2); fi
if [ "$precision" = fp8 ]; then command+=(--use_fp8 true); fi
if [ "$kind" = nvgpu ] && [ "$count" -gt 1 ] && [ "$precision" != fp32 ]; then command+=(--amp_master_grad true); fi
if [ "$recompute" != none ]; then command+=(--recompute true --recompute_granularity "$recompute"); fi
read -ra extra <<<"${EXTRA_ARGS:-}"
command+=(${extra[@]+"${extra[@]}"})

if [ "${DRY_RUN:-0}" = 1 ]; then
  printf '%q ' "${command[@]}"
  echo
  exit
fi
exec "$PYTHON" -m paddle_te.training.supervise --script "$script" --processes "$count" --logs "$output/logs" -- \
  "${command[@]}"
