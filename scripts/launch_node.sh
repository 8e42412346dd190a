#!/usr/bin/env bash
# Trains on one machine: one process for each GPU, by accelerate launch.
#
#   scripts/launch_node.sh [options] RECIPE [key=value ...]
#
# --config NAME    how the run is laid out: gpu, gpus, zero1, zero2, zero3 or fsdp (configs/accelerate-NAME.json), or
#                  the path of an accelerate config (gpus; gpu where there is one process)
# --processes N    how many processes (as many as there are GPUs)
# --port N         port that the processes meet at; 0: a free one (0)
# --cpu            on the processor, to try it out (2 processes)
# --check          load everything, run one step, print what the run would be
# --dry-run        print the command, and run nothing
#
# ACCELERATE   the accelerate to start with (that of .venv, else the one on the path)
set -euo pipefail
. "$(dirname "$0")/launch_common.sh"

config='' processes='' port=0 cpu='' dry='' check=''
read_options 'config processes port' 'cpu check' "$@"
[[ $port =~ ^[0-9]+$ ]] || fail "--port is $port, no number"

count_processes 2
if [ -z "$config" ]; then
  if [ "$processes" = 1 ]; then config=gpu; else config=gpus; fi
fi
options=(--num_processes "$processes" --num_cpu_threads_per_process "$threads")
[ "$processes" = 1 ] || options+=(--main_process_port "$port")
[ -z "$cpu" ] || [ "$processes" != 1 ] || [ "$config" != gpu ] || options+=(--cpu)
launch "${options[@]}" -m headstart train "${rest[@]}" ${check:+--check}
