#!/usr/bin/env bash
# Loss curves of te in fp8 under TP2, under sharding 2 and on one GPU, from the same weights, on two GPUs:
#   bash tools/benchmark/parallel_curves.sh DATA OUTPUT
# DATA: what `tools/prepare_data.py --demo DATA --demo_sources` makes. OUTPUT gets one.jsonl, tp2.jsonl, sharding2.jsonl
# (train_log.jsonl of each run), loss.png and summary.json. Exit status: convergence's, 0 if the curves agree within
# TOLERANCE, as means over 20 steps. STEPS, MODEL, BATCH (sequences a step), SEQ, BACKEND and FLAGS (of all runs) may be
# set; CUDA_VISIBLE_DEVICES chooses the two GPUs.
set -euo pipefail
[ $# = 2 ] || { sed -n '2,7s/^# \?//p' "$0" >&2; exit 2; }
data=$(realpath "$1") output=$(realpath -m "$2")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
gpus=${CUDA_VISIBLE_DEVICES:-0,1} steps=${STEPS:-500} batch=${BATCH:-16} work=$(mktemp -d)
trap 'wait; rm -rf "$work"' EXIT
mkdir -p "$output"

common=(--model_name_or_path "${MODEL:-llama-125m}" --tokenizer_name_or_path "$data/tokenizer" --input_dir "$data"
  --max_seq_length "${SEQ:-1024}" --gradient_accumulation_steps 1 --learning_rate 2e-4 --min_learning_rate 2e-5
  --warmup_steps $((steps / 5)) --weight_decay 0.1 --adam_beta2 0.95 --split 949,50,1 --seed 42 --logging_steps 1
  --bf16 true --fp16_opt_level O2 --amp_master_grad true --do_train true --device nvgpu --disable_tqdm true
  --report_to none --transformer_engine_backend "${BACKEND:-transformer_engine}")
read -ra flags <<<"${FLAGS:-}"

# train NAME "LAUNCHER" FLAG...: in the background of its caller; a failure shows the last lines of every log.
train() {
  local name=$1 launcher=$2 folder="$work/$1"
  shift 2
  mkdir -p "$folder"
  # shellcheck disable=SC2086  # a list of words
  if ! python3 $launcher llm/llama/run_pretrain.py "${common[@]}" "${flags[@]}" --output_dir "$folder" \
    --data_cache "$folder" "$@" >"$folder/log" 2>&1; then
    echo "error: $name failed" >&2
    tail -n 20 "$folder/log" "$work/$name".ranks/workerlog.* 2>/dev/null >&2
    return 1
  fi
  echo "$name: done after $SECONDS s"
}
ranks() { echo "-m paddle.distributed.launch --devices 0,1 --log_dir $work/$1.ranks"; }

train start "" --max_steps 1 --save_steps 1 --per_device_train_batch_size "$batch"
fp8=(--use_fp8 true --te_init_weight_path "$work/start/checkpoint-1" --save_strategy no --max_steps "$steps")
# One job over both GPUs at a time: two would wait for each other's turns on the GPUs at every collective.
train tp2 "$(ranks tp2)" "${fp8[@]}" --per_device_train_batch_size "$batch" --tensor_parallel_degree 2
CUDA_VISIBLE_DEVICES=${gpus##*,} train one "" "${fp8[@]}" --per_device_train_batch_size "$batch" &
one=$!
train sharding2 "$(ranks sharding2)" "${fp8[@]}" --per_device_train_batch_size $((batch / 2)) \
  --sharding_parallel_degree 2 --sharding stage2
wait $one

for name in one tp2 sharding2; do cp "$work/$name/train_log.jsonl" "$output/$name.jsonl"; done
cd "$work"
python3 -m paddle_te.runs.convergence one tp2 sharding2 --smoothing 20 --tolerance "${TOLERANCE:-0.01}" \
  --output "$output"
