#!/usr/bin/env bash
# Sets up and runs everything that has to pass: ruff, mypy --strict, pytest.
#
#   scripts/test.sh [--quick] [pytest arguments]
#
# --quick   use the environment as it is. Slow tests: scripts/test_slow.sh
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${HEADSTART_VENV:-.venv}
if [ "${1:-}" = --quick ] && [ -x "$venv/bin/pytest" ]; then
  shift
else
  [ "${1:-}" != --quick ] || shift
  venv=$(scripts/setup.sh dev,deepspeed,tensorboard,wandb) # DeepSpeed's tests need a C++ compiler, too, and skip by name without one
fi
bin=$(cd "$venv/bin" && pwd)

failed=()
step() {
  local name=$1
  shift
  echo "== $name"
  "$@" || failed+=("$name")
}

step ruff "$bin/ruff" check .
"$bin/python" scripts/type_layout.py
step mypy "$bin/mypy"
# a test is made for one thread: the cores are used by files of tests side by side
step pytest "$bin/python" -m pytest -n logical --maxprocesses 4 --dist loadfile "$@"

if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
echo "all passed"
