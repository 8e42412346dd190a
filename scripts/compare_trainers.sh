#!/usr/bin/env bash
# Trains the same EAGLE-3 head with headstart, speculators 0.9.0 and SpecForge 0.2.0 on this CPU, one after the other, and
# prints tokens a second, peak memory and held-out accuracy side by side.
#
#   scripts/compare_trainers.sh [DIR]     where everything is kept (build/compare); what is there already is not repeated
#
# Same backbone (SmolLM2-135M), rows, cached features, draft vocabulary of 4,096, three unrolled steps, AdamW, tokens a
# step and number of threads; each trainer at each of three learning rates, and the best of them counts.
#
# ROWS      chats to train on, held-out ones included (112; about 512 tokens each)
# STEP      rows of a step (2)
# RATES     learning rates ("5e-4 1e-3 2e-3")
# TRAINERS  which ("headstart speculators specforge")
# THREADS   of each trainer (2)
# PEERS     where the environments of the two others are (DIR/venvs)
# see scripts/setup.sh for those of our own
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  -h | --help)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"
    exit
    ;;
esac

dir=${1:-build/compare} length=576 epochs=1 kept=0
. scripts/compare/trainers.sh
rows=$step
venv=$(scripts/setup.sh fetch)
ours=$(cd "$venv/bin" && pwd)
say() { printf '\n== %s\n' "$*"; }

environments

if [ ! -e "$dir/facts.json" ]; then
  say "rows and features"
  "$ours/python" scripts/compare_trainers.py prepare "$dir" "${ROWS:-112}"
  "$ours/headstart" data cache --backbone smollm2-135m --input "$dir/rows" --max-length 576 --dtype bfloat16 \
    --out "$dir/features"
fi

train_headstart() { # the same split, and features of the same backbone in bf16
  printf 'backbone: smollm2-135m\nrun: run\n' >recipe.yaml
  "$ours/python" "$here/watch.py" watch.json "$threads" headstart train recipe.yaml data.train="[$dir/rows]" \
    data.held_out=0.12 data.max_length=576 data.cache="$dir/features" draft_vocab=4096 loss.depths=3 batch.rows="$step" \
    optim.name=adamw optim.lr="$1" optim.warmup=0.1 optim.final=0 precision.backbone=bfloat16 evaluate.every=null \
    evaluate.rows=0 evaluate.prompts=0 save.every=1000000
}

for rate in ${RATES:-5e-4 1e-3 2e-3}; do
  for trainer in ${TRAINERS:-headstart speculators specforge}; do # in turns, so that a busy hour is everybody's
    out=$dir/runs/$trainer/$rate
    [ ! -e "$out/done" ] || continue
    say "$trainer, lr $rate"
    rm -rf "$out"
    mkdir -p "$out"
    if ! (cd "$out" && set -e && "train_$trainer" "$rate") >"$out/log" 2>&1; then
      tail -n 20 "$out/log"
      exit 1
    fi
    touch "$out/done"
  done
done

say "the table"
"$ours/python" scripts/compare_trainers.py table "$dir"
