#!/usr/bin/env bash
# Engine throughput with a head: at 8 rows at least 2.5 times one row at a time, and at every concurrency from 1 to 8 at
# least that of batched `generate` of transformers. Needs a quiet machine; goes on where it was.
#
#     scripts/check_engine.sh runs/eagle3/head spec_bench.jsonl OUT.jsonl [questions: 48] [more flags of check_engine.py]
set -euo pipefail

head=${1:?the folder of a head} suite=${2:?Spec-Bench, as question.jsonl} out=${3:?a file} limit=${4:-48}
python "$(dirname "$0")/check_engine.py" --head "$head" --suite "$suite" --out "$out" --limit "$limit" "${@:5}"
