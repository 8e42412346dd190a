#!/usr/bin/env bash
# The slow tests: several processes, real backbones. Half an hour on two cores.
#
#   scripts/test_slow.sh [pytest arguments]      such as tests/test_distributed.py
set -euo pipefail
exec "$(dirname "$0")/test.sh" -m slow "$@"
