#!/usr/bin/env bash
# Makes what other decoders need to be measured beside ours (docs/peers.md): heads trained by economize 0.3.2, speculators
# 0.9.0 and SpecForge 0.2.0 on the same conversations, and those of the last two served by vLLM. Each step can be run by
# itself, is not repeated where it is done, and goes on where it was interrupted.
#
#   scripts/compare_peers.sh DIR STEP...
#
# environments      one a trainer; that of economize has headstart, too, and runs `headstart bench --peer`
# rows              CHATS to rows, up to TOKENS of them, and a draft vocabulary of 4,096
# features          hidden states of the rows in the forms of speculators and SpecForge: 9.3 KB a token on disk
# speculators       EAGLE-3 by speculators, EPOCHS at each of RATES
# specforge         EAGLE-3 by SpecForge, the same
# heads             the best of each by held-out accuracy, as DIR/heads/speculators and DIR/heads/specforge
# vllm              both exported and served by vLLM on this CPU, beside our own loop: tokens, accepted drafts by position
# economize-eagle3  EAGLE-3 by economize, in DIR/runs/economize-eagle3/final, for MINUTES or STEPS
# economize-medusa  Medusa by economize, in DIR/runs/economize-medusa/final, the same
# choose            how many tokens a round pay for economize, and in what tree; what is best is in DIR/economize.env
# env               the environment variables that scripts/rivals/economized.py needs, to be sourced
#
# CHATS       files of chats, as data.train of a recipe takes them (shipped)
# TOKENS      of the conversations that are taken (200000), by a hash of each, so that more are a superset
# LENGTH      tokens of a row (576)
# EPOCHS      over the rows (1)      RATES  learning rates ("2e-3")
# STEP        times LENGTH, the tokens of a step (2); where a trainer counts rows, as many as have these on average
# KEPT        checkpoints an epoch (4)
# MINUTES     of economize's trainer (10); STEPS in their place       RATE  its learning rate (its own default)
# PROMPTS     for vllm and choose (12)      ANSWER  tokens of each answer (64)
# THREADS     of each process (2)
# PEERS       where the environments are (DIR/venvs)
# ECONOMIZE   the environment of economize (PEERS/economize)
# see scripts/setup.sh for our own environment, scripts/check_vllm.sh for that of vLLM
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  "" | -h | --help)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"
    exit
    ;;
esac
dir=$1
shift
for one in "$@"; do
  case $one in
    environments | rows | features | speculators | specforge | heads | vllm | economize-eagle3 | economize-medusa | choose | env) ;;
    *)
      echo "compare_peers: there is no step $one; see scripts/compare_peers.sh --help" >&2
      exit 2
      ;;
  esac
done
length=${LENGTH:-576} epochs=${EPOCHS:-1} kept=${KEPT:-4}
. scripts/compare/trainers.sh
economize=${ECONOMIZE:-$peers/economize}
held_out=0.05
say() { printf '\n== %s (%s)\n' "$*" "$(date +%H:%M:%S)"; }
needs() { [ -e "$dir/$1" ] || { echo "compare_peers: there is no $dir/$1; run the step $2 first" >&2; exit 2; }; }
own() { # of our own environment, which is made only where it is used
  [ -n "${ours:-}" ] || { venv=$(scripts/setup.sh fetch) && ours=$(cd "$venv/bin" && pwd); }
}
rows_of_a_step() {
  read -r all tokens < <(sed -E 's/.*"rows": ([0-9]+), "tokens": ([0-9]+),.*/\1 \2/' "$dir/facts.json")
  rows=$(((step * length * all + tokens / 2) / tokens))
  [ "$rows" -gt 0 ] || rows=1
}

step_environments() {
  own
  environments
  if [ ! -e "$economize/made" ]; then
    say "an environment for economize"
    HEADSTART_VENV=$economize scripts/setup.sh fetch,plot
    "$economize/bin/python" -m pip --disable-pip-version-check -q install --no-deps economize==0.3.2
    touch "$economize/made"
  fi
}

step_rows() {
  own
  # shellcheck disable=SC2086
  "$ours/python" scripts/compare_peers.py rows "$dir" "$length" "${TOKENS:-200000}" "$held_out" ${CHATS:-shipped}
}

step_features() {
  own
  needs facts.json rows
  "$ours/python" scripts/compare_peers.py features "$dir" "$length" "$held_out"
}

trained() { # TRAINER: at each rate; what was interrupted goes on
  local rate out
  needs features.done features
  rows_of_a_step
  for rate in ${RATES:-2e-3}; do
    out=$dir/runs/$1/${rate}x$epochs
    [ ! -e "$out/done" ] || continue
    say "$1, lr $rate, $epochs epochs"
    mkdir -p "$out"
    [ ! -e "$out/watch.json" ] || mv "$out/watch.json" "$out/watch.before-$(date +%s).json" # of an interrupted run
    if ! (cd "$out" && set -e && "train_$1" "$rate") >>"$out/log" 2>&1; then
      tail -n 20 "$out/log" | tee "$out/end"
      grep -q "is complete at epoch" "$out/end" || exit 1 # SpecForge, interrupted between its end and ours
    fi
    if ! (cd "$out/out" && "ended_$1"); then # interrupted, both save a checkpoint and may call it success
      echo "compare_peers: $1 did not come to its end; the same command goes on" >&2
      exit 130
    fi
    touch "$out/done"
  done
}

ended_speculators() { [ -e "epoch$((epochs - 1))_end" ]; }
ended_specforge() { # its last step is that of all whole batches
  local last
  last=$(readlink compare-latest)
  [ "${last##*step}" -ge $((epochs * (all / rows))) ]
}

step_speculators() { trained speculators; }
step_specforge() { trained specforge; }

step_heads() {
  own
  "$ours/python" scripts/compare_peers.py heads "$dir" "$length" "$held_out"
}

step_vllm() {
  local one
  for one in speculators specforge; do
    [ -e "$dir/heads/$one" ] || continue
    say "vLLM with the head of $one"
    scripts/check_vllm.sh --eagle3 "$dir/heads/$one" --only eagle3 --out "$dir/vllm/$one" --prompts "${PROMPTS:-12}" \
      --tokens "${ANSWER:-64}" --threads "$threads" || [ $? = 1 ] # a difference is a finding
  done
  own
  "$ours/python" scripts/compare_peers.py speeds "$dir"
}

economized() { # KIND
  needs facts.json rows
  rows_of_a_step
  "$economize/bin/python" "$here/train_economize.py" "$1" "$dir/rows" "$dir/runs/economize-$1" --length "$length" \
    --held-out "$held_out" --rows-a-step "$rows" --threads "$threads" ${STEPS:+--steps "$STEPS"} \
    --minutes "${MINUTES:-10}" ${RATE:+--lr "$RATE"}
}

step_economize-eagle3() { economized eagle3; }
step_economize-medusa() { economized medusa; }

step_choose() {
  . <(step_env)
  "$economize/bin/python" scripts/rivals/choose.py "$dir/economize.env" --prompts "${PROMPTS:-12}" --tokens "${ANSWER:-64}" \
    --threads "$threads"
}

step_env() {
  local one
  for one in eagle3 medusa; do
    [ ! -e "$dir/runs/economize-$one/final" ] || echo "export PEER_ECONOMIZE_${one^^}=$dir/runs/economize-$one/final"
  done
  [ ! -e "$dir/economize.env" ] || cat "$dir/economize.env"
}

for one in "$@"; do
  [ "$one" = env ] || say "step $one"
  "step_$one"
done
