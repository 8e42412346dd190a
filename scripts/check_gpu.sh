#!/usr/bin/env bash
# Checks headstart on a GPU, in eight minutes and without network: scripts/check_gpu.sh --help
#
# PYTHON          the Python to use; without it that of scripts/setup.sh (.venv), and python3 where there is none
# HEADSTART_VENV  the folder of that environment (.venv)
set -euo pipefail
scripts=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$scripts")

venv=${HEADSTART_VENV:-.venv}
case $venv in /*) ;; *) venv=$root/$venv ;; esac
python=${PYTHON:-}
if [ -z "$python" ]; then
  if [ -x "$venv/bin/python" ]; then python=$venv/bin/python; else python=python3; fi
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "check_gpu: $python is no Python of 3.11 or newer; run scripts/setup.sh, or name one: PYTHON=/path/to/python" >&2
  exit 2
fi
if [ -z "${HEADSTART_TEST_DATA:-}" ] && [ -d "$root/../shared/data" ]; then
  HEADSTART_TEST_DATA=$(cd "$root/../shared/data" && pwd)
  export HEADSTART_TEST_DATA
fi
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 # nothing here needs the network
exec "$python" "$scripts/check_gpu.py" "$@"
