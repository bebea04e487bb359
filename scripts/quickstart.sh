#!/usr/bin/env bash
# The project's own proof, from nothing: trains Llama with PaddleNLP's layers (none), with this project's layers in
# plain Paddle (pd) and, where it can run, with Transformer Engine's kernels (te), from the same weights on real text,
# and compares the loss curves.
#   bash scripts/quickstart.sh [OUTPUT_DIR]     default: outputs/quickstart
# Writes OUTPUT_DIR/{loss.png,summary.json} and each run's logs. Exit status: 0 when the curves agree.
# STEPS=60 sets the length of each run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
out=${1:-outputs/quickstart}
steps=${STEPS:-60}

make_venv
export PATH="$PWD/.venv/bin:$PATH"

say "this machine and the backends that run on it"
python -m paddle_te.env --save "$out/env.json"
env() { python -c "import json, sys; found = json.load(open(sys.argv[1])); print($1)" "$out/env.json"; }
device=$(env 'found["device"]')
backends=$(env '*found["usable"]["bf16"]')
if [[ " $backends " == *" te "* ]]; then # te has no fp32, so all train in bf16, whose rounding decides the tolerance
  precision=(--bf16 --fp16_opt_level O2) tolerance=1e-2
else
  backends=$(env '*found["usable"]["fp32"]') precision=() tolerance=1e-5
fi

say "preparing the demo data"
python tools/prepare_data.py --demo "$out/data"

# train RUN BACKEND STEPS [FLAG...]
train() {
  local run=$1 backend=$2 max_steps=$3
  shift 3
  say "training $run: backend $backend, $max_steps step(s) on $device"
  rm -rf "${out:?}/$run"
  python llm/llama/run_pretrain.py \
    --model_name_or_path tiny-llama-demo --tokenizer_name_or_path "$out/data/tokenizer" --input_dir "$out/data" \
    --output_dir "$out/$run" --transformer_engine_backend "$backend" --device "$device" "${precision[@]}" \
    --max_seq_length 128 --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --max_steps "$max_steps" \
    --learning_rate 3e-4 --warmup_steps 5 --save_steps 100000 --logging_steps 1 --seed 42 --do_train \
    --report_to visualdl "$@"
}

declare -A flag=([none]=none [pd]=paddle [te]=transformer_engine)

train init none 1 --save_steps 1
say "converting its weights to the layout of pd and te"
rm -rf "${out:?}/init_te"
python llm/llama/te_llama_ckpt_converter.py --mode pd2te \
  --input_ckpt_path "$out/init/checkpoint-1" --output_ckpt_path "$out/init_te"

runs=()
for backend in $backends; do
  weights=$out/init_te
  [ "$backend" != none ] || weights=$out/init/checkpoint-1
  train "$backend" "${flag[$backend]}" "$steps" --te_init_weight_path "$weights"
  runs+=("$out/$backend")
done

say "comparing the loss curves"
python -m paddle_te.runs.convergence "${runs[@]}" --tolerance "$tolerance" --output "$out"
