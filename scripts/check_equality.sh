#!/usr/bin/env bash
# The large proof of equality: every question of a suite in fp32, greedily, and every fourth one at temperature 1, too.
# It goes on where it was.
#
#     scripts/check_equality.sh runs/eagle3/head spec_bench.jsonl equality.jsonl [more flags of headstart verify]
set -euo pipefail

head=${1:?the folder of a head} suite=${2:?a file of questions} out=${3:?where finished answers are kept}
questions=$(grep -c . "$suite")
headstart verify --backbone smollm2-135m --head "$head" --tree dynamic:3x3x6 --suite "$suite" --out "$out" \
  --limit "$questions" --draws $((questions / 4)) --max-new-tokens 64 "${@:4}"
