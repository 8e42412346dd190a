#!/usr/bin/env bash
# Trains on several machines: run it on each of them, with the same arguments but --rank. The recipe, its data and the
# folder of the run have to lie on a disk that all of them see.
#
#   scripts/launch_nodes.sh --nodes N --rank R --address HOST [options] RECIPE [key=value ...]
#
# --nodes N        how many machines (2)
# --rank R         which of them this is, from 0 ($SLURM_NODEID, else 0)
# --address HOST   name or address of machine 0, as the others reach it (127.0.0.1, which is this machine alone)
# --port N         a free port on machine 0 (29500)
# --config NAME    how the run is laid out: nodes, zero1, zero2, zero3 or fsdp (configs/accelerate-NAME.json), or the
#                  path of an accelerate config (nodes)
# --processes N    processes on each machine (as many as it has GPUs)
# --cpu            on the processor, to try it out (1 process on each machine)
# --check          load everything, run one step, print what the run would be
# --dry-run        print the command, and run nothing
#
# ACCELERATE   the accelerate to start with (that of .venv, else the one on the path)
set -euo pipefail
. "$(dirname "$0")/launch_common.sh"

nodes=2 rank=${SLURM_NODEID:-0} address=127.0.0.1 port=29500 config=nodes processes='' cpu='' dry='' check=''
read_options 'nodes rank address port config processes' 'cpu check' "$@"
[[ $nodes =~ ^[1-9][0-9]*$ && $nodes -gt 1 ]] || fail "--nodes is $nodes; 2 or more, and scripts/launch_node.sh for one"
[[ $rank =~ ^[0-9]+$ && $rank -lt $nodes ]] || fail "--rank is $rank; 0 to $((nodes - 1)) of $nodes machines"
[[ $port =~ ^[1-9][0-9]*$ ]] || fail "--port is $port, no port"

count_processes 1
launch --num_machines "$nodes" --machine_rank "$rank" --main_process_ip "$address" --main_process_port "$port" \
  --num_processes $((nodes * processes)) --num_cpu_threads_per_process "$threads" \
  -m headstart train "${rest[@]}" ${check:+--check}
