#!/usr/bin/env bash
# Engine throughput with a head: at 8 rows at least 2.5 times one row at a time, and at every concurrency from 1 to 8 at
# least that of batched `generate` of transformers. Needs a quiet machine; goes on where it was.
#
#     scripts/check_engine.sh runs/eagle3/head spec_bench.jsonl OUT [every K-th question: 10] [more flags of headstart bench]
set -euo pipefail

head=${1:?the folder of a head} suite=${2:?Spec-Bench, as question.jsonl} out=${3:?a folder} every=${4:-10}
headstart bench --backbone smollm2-135m --dtype bfloat16 --head "$head" --tree auto --suite "$suite" --out "$out" \
  --every "$every" --max-new-tokens 64 --concurrency 1,2,3,4,5,6,7,8 --sides generate,engine --stretch 16 "${@:5}"
python - "$out/load_report.json" <<'END'
import json
import sys

runs = {(run["side"], run["load"]): run["tokens_per_second"] for run in json.load(open(sys.argv[1]))["runs"]}
ours, theirs = ({load: speed for (side, load), speed in runs.items() if side == name} for name in ("engine", "generate"))
most, worst = ours["closed:8"] / ours["closed:1"], min(ours, key=lambda load: ours[load] / theirs[load])
print(f"8 rows over one: {most:.2f} (2.5 wanted); least over generate: {ours[worst] / theirs[worst]:.2f} at {worst} (1 wanted)")
sys.exit(most < 2.5 or ours[worst] < theirs[worst])
END
