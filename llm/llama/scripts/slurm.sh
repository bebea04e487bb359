# Sourced by the .sub files beside it: what jobs of pretraining and fine-tuning have alike. WORK_DIR: the repository.

fail() {
  echo "error: $*" >&2
  exit 2
}

# Prints auto where one of the settings $1, ... is auto.
left_to_planner() {
  local name
  for name in "$@"; do
    if [ "${!name:-}" = auto ]; then echo auto && return; fi
  done
}

# The degrees of parallelism; sets GPUS_PER_NODE, from the script's argument first.
check_layout() {
  GPUS_PER_NODE=${1:-${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}}
  [[ $GPUS_PER_NODE =~ ^[1-9][0-9]*$ ]] || fail "GPUS_PER_NODE: '$GPUS_PER_NODE' must be a whole number of at least 1"
  local name others
  for name in TP PP VP GA FSDP; do # the launcher's words, in which it says what to change
    [ -z "${!name:-}" ] || fail "$name: here it is ${name}_SIZE"
  done
  for name in TP_SIZE PP_SIZE FSDP_SIZE; do
    if [ "$name" = FSDP_SIZE ]; then others='auto or all'; else others=auto; fi
    [[ ${!name} =~ ^([1-9][0-9]*|auto)$ || $name-${!name} == FSDP_SIZE-all ]] ||
      fail "$name: '${!name}' must be a whole number of at least 1, or $others"
  done
}

# The data-parallel ranks that the layout leaves, or auto where the launcher finds out.
data_parallel() {
  if [[ $TP_SIZE$PP_SIZE$FSDP_SIZE =~ ^[0-9]+$ ]]; then
    echo $((GPUS_PER_NODE * SLURM_JOB_NUM_NODES / TP_SIZE / FSDP_SIZE / PP_SIZE))
  else
    echo auto
  fi
}

# Sets OUTPUT_BASE, EXP_NAME (by default of the model's words $1, and $2 for the rest of the layout) and FOLDER, which
# all nodes must share.
experiment_folder() {
  OUTPUT_BASE=$(realpath -m "${OUTPUT_BASE:-$WORK_DIR/outputs}")
  local name=${1}_N${SLURM_JOB_NUM_NODES}_MBS${MBS}_DP$(data_parallel)_TP${TP_SIZE}_$2
  name+=_FSDP${FSDP_SIZE}_PP${PP_SIZE}_SP${SP}_${RECOMPUTE}_${BACKEND}_${PREC}_${SLURM_JOB_ID}
  EXP_NAME=${EXP_NAME:-${name//\//_}}
  FOLDER=$OUTPUT_BASE/$EXP_NAME
  [[ $(realpath -m "$FOLDER") == "${OUTPUT_BASE%/}"/?* ]] ||
    fail "EXP_NAME: '$EXP_NAME' must name a folder in OUTPUT_BASE, $OUTPUT_BASE"
}

# A job that was requeued goes on from its newest complete checkpoint; without one it starts as it did.
resume_requeued() {
  if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    RESUME_STEP=auto
    if compgen -G "$FOLDER/output/checkpoint-*/.checkpoint_done" >/dev/null; then INIT_WEIGHT=none; fi
  fi
}

# With CONTAINER, what pyxis is told: `container`, with the mounts $1, ... besides those of WORK_DIR and OUTPUT_BASE.
# Sets work and OUTPUT_BASE to the folders as each node's part of the job sees them.
enter_container() {
  container=() work=$WORK_DIR
  [ -n "${CONTAINER:-}" ] || return 0
  work=/workspace
  local mounts=$WORK_DIR:$work,$OUTPUT_BASE:/outputs each
  for each in "$@" ${CONTAINER_MOUNTS:+"$CONTAINER_MOUNTS"}; do mounts+=,$each; done
  OUTPUT_BASE=/outputs
  container=(--container-image="$CONTAINER" --container-mounts="$mounts" --container-workdir="$work")
  container+=(--container-writable) # PaddleNLP makes a folder in the home folder, which may be the image's
  # A container with a name stays on the nodes, and pyxis then takes it whatever image it is told.
  if [ -n "${CONTAINER_NAME:-}" ]; then container+=(--container-name="$CONTAINER_NAME"); fi
  export PYTHON=${PYTHON:-python3} # the image's, not that of an environment on the host
}

# The head node's address as another node knows it: on the head itself its name may be a loopback address.
find_master() {
  if [ -z "${MASTER:-}" ] && [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    MASTER=$(srun --nodes=1 --ntasks=1 --nodelist="${names[-1]}" getent ahostsv4 "${names[0]}" |
      awk 'NR == 1 {print $1}')
    [ -n "$MASTER" ] || fail "node ${names[-1]} cannot find the address of the head node ${names[0]}; set MASTER"
  fi
  export MASTER=${MASTER:-}
}

# shellcheck disable=SC2016  # expanded on the node
on_node='trap "" USR1  # until the launcher has its handler
[ -d "$1" ] || { echo "error: OUTPUT_BASE: $(hostname) does not see $1; it must be shared by all nodes" >&2; exit 2; }
cd "$2" && shift 2 && exec bash "$@"'

# Runs the script $1 of this folder with the arguments $2, ... on each node, and ends the job: requeued where it has
# stopped at a signal or lost a node.
run_on_all_nodes() {
  local script=llm/llama/scripts/$1 start=$((${SLURM_RESTART_COUNT:-0} + 1)) srun status=0
  shift
  mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  find_master
  # the launchers of the nodes ask it of each other
  export JOB_TOKEN=${JOB_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
  export EXP_NAME OUTPUT_BASE DEVICES=${DEVICES:-$(seq -s, 0 $((GPUS_PER_NODE - 1)))}
  mkdir -p "$FOLDER" 2>/dev/null && [ -w "$FOLDER" ] || fail "OUTPUT_BASE: the folder $FOLDER cannot be made or written"
  echo "job $SLURM_JOB_ID, start $start: $SLURM_JOB_NUM_NODES nodes (${names[*]}), output in $FOLDER"
  srun --ntasks-per-node=1 --kill-on-bad-exit=1 --export=ALL --open-mode=append --output="$FOLDER/output-%t.txt" \
    "${container[@]}" bash -c "$on_node" node "$OUTPUT_BASE/$EXP_NAME" "$work" "$script" "$@" &
  srun=$!

  # Slurm's signal before the time limit: to the ranks, again until they have ended, should they still be starting.
  # shellcheck disable=SC2064  # the step's process, as it is now
  trap "echo 'SIGUSR1: the ranks are asked to save a checkpoint and stop'
        while kill -USR1 $srun; do sleep 10; done 2>/dev/null &" USR1
  while kill -0 $srun 2>/dev/null; do wait $srun || :; done # a trap ends wait; only the last one tells srun's status
  wait $srun || status=$?
  end_job $status
}

end_job() {
  if [ "$1" = 0 ] && [ -e "$FOLDER/output/stopped" ]; then
    echo "stopped at step $(cat "$FOLDER/output/stopped"); requeued"
    scontrol requeue "$SLURM_JOB_ID"
  elif [ "$1" = 75 ]; then # a node died, and Slurm has not noticed yet
    echo "a node died; requeued unless the job has --no-requeue"
    scontrol requeue "$SLURM_JOB_ID" || :
  elif [ "$1" != 0 ]; then
    echo "failed with status $1; why: $FOLDER/output-*.txt" >&2
    tail -qn 1 "$FOLDER"/output-*.txt 2>/dev/null | grep '^error: ' | sort -u >&2 || : # once where all nodes say it
  fi
  exit "$1"
}
