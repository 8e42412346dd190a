#!/usr/bin/env bash
# Is tree=auto within 5% (or the noise band) of the best of 12 fixed settings at one row, and no prompt type slower than
# plain decoding by more than 3%? Settings are ranked by replaying recorded acceptance on the measured cost curve; the
# best three, plain decoding and auto are run in turn. Needs a quiet machine; goes on where it was.
#
#     scripts/check_policy.sh runs/eagle3/head spec_bench.jsonl OUT [questions of each of the six groups: 10] [more flags of headstart tune]
set -euo pipefail

head=${1:?the folder of a head} suite=${2:?Spec-Bench, as question.jsonl} out=${3:?a folder} each=${4:-10}
settings=(chain:1 chain:2 chain:3 chain:4 static:0,1 static:0,1,2,0.0 static:0,1,2,0.0,0.1,1.0,0.0.0
  dynamic:2x3x4 dynamic:2x4x6 dynamic:3x3x6 dynamic:4x4x10 dynamic:5x4x16)
mkdir -p "$out"
headstart tune --backbone smollm2-135m --dtype bfloat16 --head "$head" --suite "$suite" --out "$out" --settings "${settings[@]}" \
  --limit $((6 * each)) --runs $((6 * each)) --max-new-tokens 64 --no-save --json "${@:5}" >"$out/found.json"
python "$(dirname "$0")/check_policy.py" "$out/found.json"
