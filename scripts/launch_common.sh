#!/usr/bin/env bash
# What launch_node.sh, launch_nodes.sh and launch_slurm.sh have in common; they source it.
scripts=$(cd "$(dirname "$0")" && pwd)
threads=${OMP_NUM_THREADS:-1} # of each process

fail() { echo "$(basename "$0" .sh): $*; see $0 --help" >&2; exit 2; }

# read_options VALUED FLAGS ARGUMENTS...: sets the variable of each option, by its name (`dry` for --dry-run, which all
# of them take, as they do --help); the recipe and what follows it are `rest`
read_options() {
  local valued=" $1 " flags=" dry-run${2:+ $2} " name
  shift 2
  while [[ ${1:-} == -* ]]; do
    name=${1#--}
    if [ "$1" = -h ] || [ "$1" = --help ]; then
      sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0" # the comment at the top of the script
      exit
    elif [[ $1 == --* && $valued == *" $name "* ]]; then
      [ $# -gt 1 ] || fail "$1 needs a value"
      if [ "$name" = sbatch ]; then sbatch+=("$2"); else printf -v "$name" %s "$2"; fi
      shift
    elif [[ $1 == --* && $flags == *" $name "* ]]; then
      printf -v "${name%-run}" yes
    else
      fail "unknown option $1"
    fi
    shift
  done
  [ $# -gt 0 ] || fail "a recipe is missing"
  rest=("$@")
}

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
