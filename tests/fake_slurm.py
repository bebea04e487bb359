"""Slurm's commands as scripts of a few lines: sbatch runs a job at once, on one node, which is this machine.

For what jobs make of their settings, and for pages that run them. tests/multiprocess/cluster has the real Slurm.
"""

import os

JOB = 4711
COMMANDS = {
    # options as -A x, -p y, -N1 and --name=value; then the script and its arguments
    "sbatch": f"""
nodes=1
while [[ $1 == -* ]]; do
  case $1 in -N*) nodes=${{1#-N}};; -[Ap]) shift;; --output=*) out=${{1#--output=}};; esac
  shift
done
[ "$nodes" = 1 ] || {{ echo "this stand-in has one node" >&2; exit 1; }}
export SLURM_JOB_ID={JOB} SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=head FAKE_SUBMITTED=$(realpath "$1")
cp "$1" "$FAKE_SLURM/spooled" && shift
bash "$FAKE_SLURM/spooled" "$@" >>"${{out:-slurm-{JOB}.out}}" 2>&1 || {{ cat "${{out:-slurm-{JOB}.out}}" >&2; exit 1; }}
echo {JOB}
""",
    "srun": """
while [[ $1 == -* ]]; do
  case $1 in --output=*) out=${1#--output=};; --container-*) echo "$1" >>"$FAKE_SLURM/container";; esac
  shift
done
export SLURM_NODEID=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1
exec "$@" >>"${out//%t/0}" 2>&1
""",
    "scontrol": """
case "$1 $2" in
  "show job") echo "   Command=$FAKE_SUBMITTED" ;;
  "show hostnames") echo head ;;
  requeue*) echo requeued >>"$FAKE_SLURM/requeued" ;;
esac
""",
}


def install(folder):
    """Writes the commands below `folder`. Returns the environment in which they are found."""
    place = folder / "fake-slurm"
    place.mkdir()
    for name, text in COMMANDS.items():
        (place / name).write_text(f"#!/bin/bash\n{text}")
        (place / name).chmod(0o755)
    return os.environ | {"PATH": f"{place}{os.pathsep}{os.environ['PATH']}", "FAKE_SLURM": str(place)}
