#!/usr/bin/env bash
# Loss curves of runs from the same weights:
#   bash tools/benchmark/curves.sh precisions DATA OUTPUT    none, te in bf16 and te in fp8, on one GPU
#   bash tools/benchmark/curves.sh layouts DATA OUTPUT       te in fp8 under TP2, under sharding 2 and on one GPU: two GPUs
#   bash tools/benchmark/curves.sh states DATA OUTPUT        te in bf16 with each kind of AdamW's state, on one GPU
#   bash tools/benchmark/curves.sh seeds DATA OUTPUT         none and te in bf16 from each of several weights, on one GPU
# DATA: what `tools/prepare_data.py --demo DATA --demo_sources` makes. OUTPUT gets each run's train_log.jsonl as
# NAME.jsonl, loss.png and summary.json. Exit status: convergence's, 0 if the curves agree within TOLERANCE, as means
# over 20 steps; by default it is 0.01, and for states 0.003. seeds leaves pairs.json instead of loss.png and
# summary.json (tools/benchmark/paired.py makes it), and its exit status is 0. MODEL, STEPS, BATCH (sequences a step),
# SEQ, BACKEND (in te's place), FLAGS (of all runs), RECIPES (of fp8's runs in precisions, by default delayed alone;
# RECIPES="delayed current block" makes three) and SEEDS (of seeds, by default "42 43 44 45") may be set. With AT_ONCE=1
# all runs of precisions and states, and the two of each seed, share the GPU at the same time, if its memory suffices:
#   MODEL=Qwen/Qwen2.5-0.5B bash tools/benchmark/curves.sh precisions data/demo outputs/curves
# CUDA_VISIBLE_DEVICES chooses the GPUs.
set -euo pipefail
usage() { sed -n '2,15s/^# \?//p' "$0" >&2; exit 2; }
[ $# = 3 ] && [[ $1 =~ ^(precisions|layouts|states|seeds)$ ]] || usage
kind=$1 data=$(realpath "$2") output=$(realpath -m "$3")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
gpus=${CUDA_VISIBLE_DEVICES:-0,1} steps=${STEPS:-500} batch=${BATCH:-16} work=$(mktemp -d)
trap 'wait; rm -rf "$work"' EXIT
mkdir -p "$output"

common=(--model_name_or_path "${MODEL:-llama-125m}" --tokenizer_name_or_path "$data/tokenizer" --input_dir "$data"
  --max_seq_length "${SEQ:-1024}" --gradient_accumulation_steps 1 --learning_rate 2e-4 --min_learning_rate 2e-5
  --warmup_steps $((steps / 5)) --weight_decay 0.1 --adam_beta2 0.95 --split 949,50,1 --seed 42 --logging_steps 1
  --bf16 true --fp16_opt_level O2 --amp_master_grad true --do_train true --device nvgpu --disable_tqdm true
  --report_to none)
one_step=(--max_steps 1 --save_steps 1 --per_device_train_batch_size "$batch")
all_steps=(--max_steps "$steps" --save_strategy no)
te=(--transformer_engine_backend "${BACKEND:-transformer_engine}") none=(--transformer_engine_backend none)
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
    tail -n 20 "$folder/log" "$work/$name".ranks/workerlog.* >&2 2>/dev/null
    return 1
  fi
  echo "$name: done after $SECONDS s"
}
ranks() { echo "-m paddle.distributed.launch --devices 0,1 --log_dir $work/$1.ranks"; }

jobs=()
# one_of_several trains as `train` does: with AT_ONCE=1 in the background, else until it is done. finish_runs waits for
# those in the background, and fails if one of them did.
one_of_several() { train "$@" & jobs+=($!); [ "${AT_ONCE:-0}" = 1 ] || finish_runs; }
finish_runs() {
  local job failed=0
  for job in "${jobs[@]}"; do wait "$job" || failed=1; done
  jobs=()
  return $failed
}

precisions() {
  local start="$work/start/checkpoint-1" whole=("${all_steps[@]}" --per_device_train_batch_size "$batch")
  train start "" "${none[@]}" "${one_step[@]}"
  python3 llm/llama/te_llama_ckpt_converter.py --mode pd2te --input_ckpt_path "$start" --output_ckpt_path "$work/te.start"
  one_of_several none "" "${none[@]}" "${whole[@]}" --te_init_weight_path "$start"
  one_of_several te-bf16 "" "${te[@]}" "${whole[@]}" --te_init_weight_path "$work/te.start"
  names=(none te-bf16)
  local recipe name
  for recipe in ${RECIPES:-delayed}; do
    name=te-fp8
    [ "$recipe" = delayed ] || name+="-$recipe"
    one_of_several "$name" "" "${te[@]}" "${whole[@]}" --te_init_weight_path "$work/te.start" --use_fp8 true \
      --fp8_recipe "$recipe"
    names+=("$name")
  done
  finish_runs
}

layouts() {
  train start "" "${te[@]}" "${one_step[@]}"
  local fp8=("${te[@]}" "${all_steps[@]}" --use_fp8 true --te_init_weight_path "$work/start/checkpoint-1") one
  # One job over both GPUs at a time: two would wait for each other's turns on the GPUs at every collective.
  train tp2 "$(ranks tp2)" "${fp8[@]}" --per_device_train_batch_size "$batch" --tensor_parallel_degree 2
  CUDA_VISIBLE_DEVICES=${gpus##*,} train one "" "${fp8[@]}" --per_device_train_batch_size "$batch" &
  one=$!
  train sharding2 "$(ranks sharding2)" "${fp8[@]}" --per_device_train_batch_size $((batch / 2)) \
    --sharding_parallel_degree 2 --sharding stage2
  wait $one
  names=(one tp2 sharding2)
}

states() {
  tolerance=0.003
  train start "" "${te[@]}" "${one_step[@]}"
  local run=("${te[@]}" "${all_steps[@]}" --per_device_train_batch_size "$batch")
  run+=(--te_init_weight_path "$work/start/checkpoint-1")
  one_of_several float32 "" "${run[@]}"
  one_of_several bfloat16 "" "${run[@]}" --optim_moments bfloat16
  one_of_several int8 "" "${run[@]}" --optim_moments int8
  one_of_several int8-remainder "" "${run[@]}" --optim_moments int8 --master_weights bf16_remainder
  finish_runs
  names=(float32 bfloat16 int8 int8-remainder)
}

seeds() {
  local seed start whole=("${all_steps[@]}" --per_device_train_batch_size "$batch")
  for seed in ${SEEDS:-42 43 44 45}; do
    start="$work/start-$seed/checkpoint-1"
    train "start-$seed" "" "${none[@]}" "${one_step[@]}" --seed "$seed"
    python3 llm/llama/te_llama_ckpt_converter.py --mode pd2te --input_ckpt_path "$start" \
      --output_ckpt_path "$work/te.start-$seed"
    one_of_several "none-$seed" "" "${none[@]}" "${whole[@]}" --te_init_weight_path "$start" --seed "$seed"
    one_of_several "te-bf16-$seed" "" "${te[@]}" "${whole[@]}" --te_init_weight_path "$work/te.start-$seed" \
      --seed "$seed"
    finish_runs
    rm -rf "$work/start-$seed" "$work/te.start-$seed"
    names+=("none-$seed" "te-bf16-$seed")
  done
}

tolerance=0.01 names=()
$kind
for name in "${names[@]}"; do cp "$work/$name/train_log.jsonl" "$output/$name.jsonl"; done
cd "$work"
if [ "$kind" = seeds ]; then
  python3 "$OLDPWD/tools/benchmark/paired.py" "${names[@]}" --output "$output/pairs.json"
  exit
fi
python3 -m paddle_te.runs.convergence "${names[@]}" --smoothing 20 --tolerance "${TOLERANCE:-$tolerance}" --output "$output"
