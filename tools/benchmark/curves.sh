#!/usr/bin/env bash
# Loss curves of runs from the same weights:
#   bash tools/benchmark/curves.sh precisions DATA OUTPUT    none, te in bf16 and te in fp8, on one GPU
#   bash tools/benchmark/curves.sh recipes DATA OUTPUT       te in bf16 and te in fp8, on one GPU: for a family of which
#                                                            PaddleNLP has no model, MODEL=Qwen/Qwen3-0.6B
#   bash tools/benchmark/curves.sh layouts DATA OUTPUT       te in fp8 under TP2, under sharding 2 and on one GPU: two GPUs
#   bash tools/benchmark/curves.sh states DATA OUTPUT        te in bf16 with each kind of AdamW's state, on one GPU
#   bash tools/benchmark/curves.sh stored DATA OUTPUT        te in fp8 with SwiGLU's input kept in bf16, in fp8, and in
#                                                            fp8 with SwiGLU computed again from it, on one GPU
#   bash tools/benchmark/curves.sh base DATA OUTPUT          LoRA with te in bf16, in fp8, and in fp8 over a base that
#                                                            exists in fp8 only, also with less kept for backward, on
#                                                            one GPU
#   bash tools/benchmark/curves.sh seeds DATA OUTPUT         none and te in bf16 from each of several weights, on one GPU
# DATA: what `tools/prepare_data.py --demo DATA --demo_sources` makes. OUTPUT gets each run's train_log.jsonl as
# NAME.jsonl, loss.png and summary.json. Exit status: convergence's, 0 if the curves agree within TOLERANCE, as means
# over 20 steps; by default it is 0.01, for states 0.003, for base and stored 0.005. seeds leaves pairs.json instead of
# loss.png and summary.json (tools/benchmark/paired.py makes it), and its exit status is 0. MODEL, STEPS (500, for base
# 150), BATCH (sequences a step), SEQ, BACKEND (in te's place), FLAGS (of all runs), RECIPES (of fp8's runs in
# precisions, recipes and base, by default only delayed; RECIPES="delayed current block" makes three; in precisions and
# recipes, head is delayed scaling with the head in fp8, too, and all with head and attention), SPLIT (as --split) and
# SEEDS (of seeds, by default "42 43 44 45") may be set. The weights that base begins with are those of START_STEPS (300) steps of
# pretraining on the same text.
# With AT_ONCE=1 all runs of precisions, recipes, states, stored and base, and the two of each seed, run at the same time:
# on the GPUs in CUDA_VISIBLE_DEVICES in turn, which they share where there are fewer, if the memory suffices:
#   MODEL=Qwen/Qwen2.5-0.5B bash tools/benchmark/curves.sh precisions data/demo outputs/curves
# CUDA_VISIBLE_DEVICES chooses the GPUs. With HELD_OUT=PREFIX precisions and recipes also leave NAME.held-out.json: the
# loss of PREFIX.bin and .idx after the last step, computed in bf16.
set -euo pipefail
usage() { sed -n '2,27s/^# \?//p' "$0" >&2; exit 2; }
[ $# = 3 ] && [[ $1 =~ ^(precisions|recipes|layouts|states|stored|base|seeds)$ ]] || usage
default_steps=500
[ "$1" != base ] || default_steps=150
kind=$1 data=$(realpath "$2") output=$(realpath -m "$3") held_out=""
if [ -n "${HELD_OUT:-}" ] && [[ $1 =~ ^(precisions|recipes)$ ]]; then held_out=$(realpath -m "$HELD_OUT"); fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
gpus=${CUDA_VISIBLE_DEVICES:-0,1}
IFS=, read -ra cards <<<"${CUDA_VISIBLE_DEVICES:-0}" # of runs on one GPU
steps=${STEPS:-$default_steps} sequence=${SEQ:-1024} batch=${BATCH:-16} work=$(mktemp -d)
trap 'wait; rm -rf "$work"' EXIT
mkdir -p "$output"

common=(--tokenizer_name_or_path "$data/tokenizer" --gradient_accumulation_steps 1 --learning_rate 2e-4
  --warmup_steps $((steps / 5)) --weight_decay 0.1 --adam_beta2 0.95 --seed 42 --logging_steps 1
  --bf16 true --fp16_opt_level O2 --amp_master_grad true --do_train true --device nvgpu --disable_tqdm true
  --report_to none)
pretraining=(--model_name_or_path "${MODEL:-llama-125m}" --input_dir "$data" --max_seq_length "$sequence"
  --min_learning_rate 2e-5 --split "${SPLIT:-949,50,1}")
one_step=(--max_steps 1 --save_steps 1 --per_device_train_batch_size "$batch")
all_steps=(--max_steps "$steps" --save_strategy no)
[ -z "$held_out" ] || all_steps=(--max_steps "$steps" --save_steps "$steps")
te=(--transformer_engine_backend "${BACKEND:-transformer_engine}") none=(--transformer_engine_backend none)
less_kept=(--activation_func_fp8_input_store true --recompute_modules layernorm mlp_act)
read -ra flags <<<"${FLAGS:-}"

# logged NAME COMMAND ...: with its output in the run's log; a failure shows the last lines of every log.
logged() {
  local name=$1
  shift
  if ! "$@" >>"$work/$name/log" 2>&1; then
    echo "error: $name failed" >&2
    tail -n 20 "$work/$name/log" "$work/$name".ranks/workerlog.* >&2 2>/dev/null
    return 1
  fi
}

# run NAME "LAUNCHER" SCRIPT FLAG...: in the background of its caller.
run() {
  local name=$1 launcher=$2 script=$3
  shift 3
  mkdir -p "$work/$name"
  # shellcheck disable=SC2086  # a list of words
  logged "$name" python3 $launcher "llm/llama/$script" "${common[@]}" "${flags[@]}" --output_dir "$work/$name" "$@"
  echo "$name: done after $SECONDS s"
}
train() {
  run "$1" "$2" run_pretrain.py "${pretraining[@]}" --data_cache "$work/$1" "${@:3}"
  local last="$work/$1/checkpoint-$steps" backend=${te[1]}
  [ -n "$held_out" ] && [ -e "$last" ] || return 0
  [ "$1" != none ] || backend=none
  logged "$1" python3 llm/llama/run_eval.py --model_name_or_path "$last" --tokenizer_name_or_path "$data/tokenizer" \
    --dtype bfloat16 --transformer_engine_backend "$backend" --device nvgpu --perplexity "$held_out" \
    --max_seq_length "$sequence" --batch_size "$batch" --output_file "$output/$1.held-out.json"
}
ranks() { echo "-m paddle.distributed.launch --devices 0,1 --log_dir $work/$1.ranks"; }

jobs=()
# one_of_several COMMAND ...: with AT_ONCE=1 in the background, else until it is done. finish_runs waits for those in the
# background, and fails if one of them did.
one_of_several() {
  CUDA_VISIBLE_DEVICES=${cards[${#jobs[@]} % ${#cards[@]}]} "$@" &
  jobs+=($!)
  [ "${AT_ONCE:-0}" = 1 ] || finish_runs
}
finish_runs() {
  local job failed=0
  for job in "${jobs[@]}"; do wait "$job" || failed=1; done
  jobs=()
  return $failed
}

# start_fp8 FLAG...: te in fp8 with each of RECIPES.
start_fp8() {
  local recipe name more
  for recipe in ${RECIPES:-delayed}; do
    name=te-fp8 more=()
    [ "$recipe" = delayed ] || name+="-$recipe"
    [ "$recipe" != head ] || { recipe=delayed more=(--fp8_lm_head true); }
    [ "$recipe" != all ] || { recipe=delayed more=(--fp8_dpa true --fp8_lm_head true); }
    one_of_several train "$name" "" "$@" --use_fp8 true --fp8_recipe "$recipe" "${more[@]}"
    names+=("$name")
  done
}

precisions() {
  local start="$work/start/checkpoint-1" whole=("${all_steps[@]}" --per_device_train_batch_size "$batch")
  train start "" "${none[@]}" "${one_step[@]}"
  python3 llm/llama/te_llama_ckpt_converter.py --mode pd2te --input_ckpt_path "$start" --output_ckpt_path "$work/te.start"
  one_of_several train none "" "${none[@]}" "${whole[@]}" --te_init_weight_path "$start"
  one_of_several train te-bf16 "" "${te[@]}" "${whole[@]}" --te_init_weight_path "$work/te.start"
  names=(none te-bf16)
  start_fp8 "${te[@]}" "${whole[@]}" --te_init_weight_path "$work/te.start"
  finish_runs
}

recipes() {
  train start "" "${te[@]}" "${one_step[@]}"
  local run=("${te[@]}" "${all_steps[@]}" --per_device_train_batch_size "$batch")
  run+=(--te_init_weight_path "$work/start/checkpoint-1")
  one_of_several train te-bf16 "" "${run[@]}"
  names=(te-bf16)
  start_fp8 "${run[@]}"
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
  one_of_several train float32 "" "${run[@]}"
  one_of_several train bfloat16 "" "${run[@]}" --optim_moments bfloat16
  one_of_several train int8 "" "${run[@]}" --optim_moments int8
  one_of_several train int8-remainder "" "${run[@]}" --optim_moments int8 --master_weights bf16_remainder
  finish_runs
  names=(float32 bfloat16 int8 int8-remainder)
}

stored() {
  tolerance=0.005
  train start "" "${te[@]}" "${one_step[@]}"
  local run=("${te[@]}" "${all_steps[@]}" --per_device_train_batch_size "$batch" --use_fp8 true
    --te_init_weight_path "$work/start/checkpoint-1")
  one_of_several train bf16-input "" "${run[@]}"
  one_of_several train fp8-input "" "${run[@]}" --activation_func_fp8_input_store true
  one_of_several train fp8-input-again "" "${run[@]}" "${less_kept[@]}"
  finish_runs
  names=(bf16-input fp8-input fp8-input-again)
}

seeds() {
  local seed start whole=("${all_steps[@]}" --per_device_train_batch_size "$batch")
  for seed in ${SEEDS:-42 43 44 45}; do
    start="$work/start-$seed/checkpoint-1"
    train "start-$seed" "" "${none[@]}" "${one_step[@]}" --seed "$seed"
    python3 llm/llama/te_llama_ckpt_converter.py --mode pd2te --input_ckpt_path "$start" \
      --output_ckpt_path "$work/te.start-$seed"
    one_of_several train "none-$seed" "" "${none[@]}" "${whole[@]}" --te_init_weight_path "$start" --seed "$seed"
    one_of_several train "te-bf16-$seed" "" "${te[@]}" "${whole[@]}" --te_init_weight_path "$work/te.start-$seed" \
      --seed "$seed"
    finish_runs
    rm -rf "$work/start-$seed" "$work/te.start-$seed"
    names+=("none-$seed" "te-bf16-$seed")
  done
}

base() {
  tolerance=0.005
  local start_steps=${START_STEPS:-300}
  train start "" "${te[@]}" --max_steps "$start_steps" --save_steps "$start_steps" --warmup_steps $((start_steps / 5)) \
    --per_device_train_batch_size "$batch"
  # longer than a sequence, so that each is full
  python3 tools/benchmark/text_samples.py "$data/corpus.jsonl.gz" "$work/samples" --characters $((6 * sequence))
  local lora=(run_finetune.py "${te[@]}" "${all_steps[@]}" --model_name_or_path "$work/start/checkpoint-$start_steps"
    --dataset_name_or_path "$work/samples" --src_length $((sequence / 8)) --max_length "$sequence"
    --pad_to_max_length true --per_device_train_batch_size "$batch" --lora true --lora_rank 16)
  one_of_several run bf16 "" "${lora[@]}"
  names=(bf16)
  local recipe
  for recipe in ${RECIPES:-delayed}; do
    local fp8=("${lora[@]}" --use_fp8 true --fp8_recipe "$recipe") suffix=""
    [ "$recipe" = delayed ] || suffix="-$recipe"
    [ "$recipe" != block ] || fp8+=(--pad_to_multiple_of 128)
    one_of_several run "fp8$suffix" "" "${fp8[@]}"
    one_of_several run "fp8-base$suffix" "" "${fp8[@]}" --quantize_base fp8
    one_of_several run "fp8-base-lean$suffix" "" "${fp8[@]}" --quantize_base fp8 "${less_kept[@]}"
    names+=("fp8$suffix" "fp8-base$suffix" "fp8-base-lean$suffix")
  done
  finish_runs
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
