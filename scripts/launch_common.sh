#!/usr/bin/env bash
# What launch_node.sh, launch_nodes.sh and launch_slurm.sh have in common; they source it.
scripts=$(cd "$(dirname "$0")" && pwd)
threads=${OMP_NUM_THREADS:-1} # of each process

fail() { echo "$(basename "$0" .sh): $*; see $0 --help" >&2; exit 2; }

# count_processes N: fills in how many processes a machine has, by its GPUs, or N on the processor
count_processes() {
  if [ -z "$processes" ]; then
    if [ "$cpu" ]; then processes=$1; else processes=$( (nvidia-smi -L 2>/dev/null || true) | grep -c . || true); fi
  fi
  [[ $processes =~ ^[1-9][0-9]*$ ]] || fail "no GPU was found (processes: $processes); name a number with --processes, or try --cpu"
}

# launch OPTIONS OF ACCELERATE...: starts headstart train by it with the config, or prints the command of a dry run
launch() {
  local configs accelerate file=$config environment=() command
  configs=$(dirname "$scripts")/configs
  [ -f "$file" ] || file=$configs/accelerate-$config.json
  [ -f "$file" ] || fail "no config $config in $configs, and no such file"

  accelerate=${ACCELERATE:-$(dirname "$scripts")/.venv/bin/accelerate}
  [ -x "$accelerate" ] || accelerate=accelerate
  if [ "$cpu" ]; then
    # DeepSpeed has a switch of its own, and accelerate forgets DeepSpeed where it is told of the processor
    environment=(ACCELERATE_USE_CPU=true "OMP_NUM_THREADS=$threads")
    if grep -qi deepspeed "$file"; then environment=(DS_ACCELERATOR=cpu "OMP_NUM_THREADS=$threads"); fi
  fi
  command=("$accelerate" launch --config_file "$file" "$@")
  if [ "$dry" ]; then
    printf '%q ' ${environment[@]+"${environment[@]}"} "${command[@]}"
    echo
    exit
  fi
  exec env ${environment[@]+"${environment[@]}"} "${command[@]}"
}
