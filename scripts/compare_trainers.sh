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

mkdir -p "${1:-build/compare}"
dir=$(cd "${1:-build/compare}" && pwd)
here=$PWD/scripts/compare
peers=${PEERS:-$dir/venvs}
threads=${THREADS:-2}
step=${STEP:-2}
torch=${HEADSTART_TORCH:-torch==2.13.0}
export OMP_NUM_THREADS=$threads
venv=$(scripts/setup.sh fetch)
ours=$(cd "$venv/bin" && pwd)
say() { printf '\n== %s\n' "$*"; }

# environment NAME PACKAGES... -- PACKAGES THAT COME WITHOUT THEIR DEPENDENCIES...
environment() {
  local name=$1 all=() pip
  shift
  [ ! -e "$peers/$name/made" ] || return 0
  say "an environment for $name"
  "$ours/python" -m venv "$peers/$name"
  pip=("$peers/$name/bin/python" -m pip --disable-pip-version-check -q install)
  while [ "$1" != -- ]; do
    all+=("$1")
    shift
  done
  shift
  "${pip[@]}" "$torch"
  "${pip[@]}" "$torch" "${all[@]}"
  "${pip[@]}" --no-deps "$@"
  touch "$peers/$name/made"
}

environment speculators 'transformers>=5.0,<=5.19' accelerate 'datasets>=4,<=5.1' 'tqdm<=4.70.1' 'numpy<=2.4.6' aiohttp \
  click httpx huggingface-hub 'loguru<=0.7.3' 'openai>=2' protobuf psutil pydantic pydantic-settings rich safetensors \
  typer tensorboard -- speculators==0.9.0 hs-connectors==0.9.0
environment specforge transformers==5.8.1 'numpy<=2.4.6' datasets tqdm accelerate pydantic psutil pyyaml safetensors \
  requests tensorboard openai-harmony yunchang -- specforge==0.2.0 triton

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

train_speculators() { # the head of the paper: without the norms that are its default
  local rows
  rows=$(find "$dir/speculators/hidden_states" -name '*.safetensors' | wc -l)
  "$peers/speculators/bin/python" "$here/watch.py" watch.json "$threads" "$here/run_speculators.py" \
    --verifier-name-or-path "$dir/backbone" --speculator-type eagle3 --draft-arch llama --num-layers 1 \
    --target-layer-ids 2 15 27 --draft-vocab-size 4096 --d2t-path "$dir/d2t.npy" --t2d-path "$dir/t2d.npy" \
    --no-norm-before-residual --no-norm-before-fc --no-norm-output --data-path "$dir/speculators/data" \
    --hidden-states-path "$dir/speculators/hidden_states" --on-missing raise --num-workers 0 --total-seq-len $((step * 576)) \
    --train-data-ratio "$(awk "BEGIN { printf \"%.6f\", ($rows - 0.5) / $rows }")" --draft-attn-impl sdpa \
    --loss-implementation eager --ttt-steps 3 --ttt-step-loss-decay 0.8 --optimizer adamw --lr "$1" --weight-decay 0 \
    --scheduler-type cosine --scheduler-warmup-ratio 0.1 --epochs 1 --log-freq 1000000 --save-path out --log-dir logs
}

train_specforge() { # with its lean teacher, and sdpa, as its default attention is for GPUs
  cat >run.yaml <<EOF
model: {target_model_path: $dir/backbone, draft_model_config: $dir/specforge.json, vocab_mapping_path: $dir/maps.pt}
data: {hidden_states_path: $dir/specforge, max_length: 576, dataloader_num_workers: 0, cache_dir: $PWD/cache}
training: {strategy: eagle3, num_epochs: 1, batch_size: $step, fsdp_sharding: NO_SHARD, learning_rate: $1, warmup_ratio: 0.1,
  ttt_length: 3, attention_backend: sdpa, compact_teacher: true}
output_dir: $PWD/out
run_id: compare
EOF
  SPECFORGE_DEVICE=cpu "$peers/specforge/bin/python" "$here/watch.py" watch.json "$threads" "$here/run_specforge.py" \
    train --config run.yaml
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
