#!/usr/bin/env bash
# Sets up the virtual environment that the other scripts use. Does nothing where it is up to date.
#
#   scripts/setup.sh [EXTRAS]      EXTRAS as in pyproject.toml, such as dev or fetch,plot; last line out: its folder
#
# HEADSTART_VENV    the folder of the environment (.venv)
# HEADSTART_TORCH   which torch (torch==2.13.0); an environment that has a torch already keeps it
# PYTHON            which Python, 3.11 or newer (the first one found)
set -euo pipefail
cd "$(dirname "$0")/.."

extras=${1:-fetch,plot}
venv=${HEADSTART_VENV:-.venv}
# an exact version, because an open range may bring several GB for a GPU that is not there
torch=${HEADSTART_TORCH:-torch==2.13.0}

say() { printf 'setup: %s\n' "$*" >&2; }

good_python() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  local one
  for one in ${PYTHON:+"$PYTHON"} python3.12 python3.13 python3.11 python3 python; do
    if good_python "$one"; then echo "$one"; return; fi
  done
  say "no Python 3.11 or newer that can make virtual environments was found."
  say "Install one (on Debian and Ubuntu: python3 and python3-venv), or name it: PYTHON=/path/to/python $0"
  exit 2
}

stamp() { cat pyproject.toml scripts/setup.sh | cksum; "$venv/bin/python" -V; echo "$torch $PWD"; }

if ! "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
  python=$(find_python)
  say "a virtual environment in $venv, by $("$python" -V)"
  "$python" -m venv --clear "$venv"
fi
made="$venv/setup-$(tr -c 'a-z0-9\n' '-' <<<"$extras").stamp"
if [ "$(stamp)" != "$(cat "$made" 2>/dev/null)" ]; then
  pip=("$venv/bin/python" -m pip --disable-pip-version-check -qq) # errors alone are worth reading
  if ! "$venv/bin/python" -c 'import torch' >/dev/null 2>&1; then
    say "installing $torch"
    "${pip[@]}" install "$torch"
  fi
  # a torch that is there is named again, so that nothing else replaces it
  held=$("$venv/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))')
  say "installing headstart[$extras] from this checkout"
  "${pip[@]}" install "$held" -e ".[$extras]"
  stamp >"$made"
fi
"$venv/bin/python" - >&2 <<'EOF'
import torch
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print(f"setup: torch {torch.__version__}, {gpu}, {torch.get_num_threads()} threads")
EOF
echo "$venv"
