#!/usr/bin/env bash
# Submits a run to Slurm: scripts/launch_nodes.sh on each machine of a job. Near its time limit the job is told, saves,
# and ends; submitted again, it goes on.
#
#   scripts/launch_slurm.sh --nodes N [options] RECIPE [key=value ...]
#
# --nodes N        how many machines (2)
# --processes N    GPUs of each machine, and so processes (8)
# --config NAME    as for scripts/launch_nodes.sh; with one machine as for scripts/launch_node.sh
# --port N         a free port on the first machine (29500)
# --time T         time limit, as Slurm writes it (24:00:00)
# --name NAME      of the job (headstart)
# --sbatch OPTION  an option of your own for sbatch, such as --sbatch --partition=gpu; may be repeated
# --dry-run        print the command, and submit nothing
set -euo pipefail
. "$(dirname "$0")/launch_common.sh"

nodes=2 processes=8 config='' port=29500 time=24:00:00 name=headstart dry='' sbatch=()
read_options 'nodes processes config port time name sbatch' '' "$@"
for one in nodes processes port; do
  [[ ${!one} =~ ^[1-9][0-9]*$ ]] || fail "--$one is ${!one}, no number above 0"
done

start=("$scripts/launch_node.sh" --processes "$processes")
[ "$nodes" = 1 ] || start=("$scripts/launch_nodes.sh" --nodes "$nodes" --port "$port" --processes "$processes")
[ -z "$config" ] || start+=(--config "$config")
# the first machine is known once the job runs, and the rank of each on that machine (launch_nodes.sh reads it)
line=$(printf '%q ' srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 "${start[@]}")
[ "$nodes" = 1 ] || line+='--address "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)" '
line+=$(printf '%q ' "${rest[@]}")
command=(sbatch --job-name="$name" --nodes="$nodes" --ntasks-per-node=1 --gpus-per-node="$processes" --time="$time"
  --signal=TERM@120 ${sbatch[@]+"${sbatch[@]}"} --wrap="exec $line")
if [ "$dry" ]; then
  printf '%q ' "${command[@]}"
  echo
  exit
fi
exec "${command[@]}"
