#!/usr/bin/env bash
# From a fresh machine to a trained head that speeds up a real model: sets up, fetches SmolLM2-135M, trains an EAGLE-3
# head for a few minutes on conversations that the model wrote itself, and shows plain and drafted answers side by side.
#
#   scripts/quickstart.sh [key=value ...]     settings of configs/quickstart.yaml that are to be otherwise
#   scripts/quickstart.sh --shipped           trains nothing: shows the head that comes with headstart, in two minutes
#
# Needs Python 3.11 or newer, 2 GB of memory and 3 GB of disk; no GPU. Run it again and it goes on where it was.
#
# HEADSTART_CACHE   where the backbone is kept (~/.cache/headstart)
# HEADSTART_RUN     the folder of the run (runs/quickstart)
# see scripts/setup.sh for those of the environment
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  -h | --help)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"
    exit
    ;;
esac

run=${HEADSTART_RUN:-runs/quickstart}
shipped=heads/shipped/smollm2-135m-eagle3 # trained for longer, by configs/smollm2-eagle3.yaml
venv=$(scripts/setup.sh fetch,plot)
headstart="$venv/bin/headstart"
say() { printf '\n== %s\n' "$*"; }

say "the backbone"
"$headstart" fetch smollm2-135m

# show HEAD OUT [flags]: plain and drafted answers in bf16, then 20 prompts that no recipe trains on
show() {
  local pair=(--backbone smollm2-135m --head "$1" "${@:3}")
  say "plain and drafted, side by side"
  for prompt in \
    "Can you explain how a bicycle stays upright while it moves?" \
    "Please write a short Python function that counts the vowels in a text."; do
    printf '\n> %s\n' "$prompt"
    "$headstart" generate "${pair[@]}" --dtype bfloat16 --temperature 0 --max-new-tokens 120 --compare "$prompt"
  done
  say "20 prompts that were not trained on: speed in bf16"
  measure bfloat16 "$2" "${pair[@]}"
}
measure() { "$headstart" bench --restart --dtype "$1" --suite shipped --limit 20 --max-new-tokens 64 --out "$2" "${@:3}"; }

if [ "${1:-}" = --shipped ]; then
  show "hybrid:$shipped" runs/shipped/bench-bf16 # with lookup, which costs next to nothing
  exit
fi

say "training an EAGLE-3 head (configs/quickstart.yaml)"
"$headstart" train configs/quickstart.yaml "run=$run" "$@"

head=$run/head
tree=(--tree dynamic:2x3x4) # a small one suits a young head
show "$head" "$run/bench-bf16" "${tree[@]}"
say "the same prompts: equality in fp32"
measure float32 "$run/bench-fp32" --backbone smollm2-135m --head "$head" "${tree[@]}"

cat <<END

The head is in $head. Next:
  $headstart generate --backbone smollm2-135m --head $head "Why is the sky blue?"
  $headstart train configs/smollm2-eagle3.yaml      a longer run; its head: $shipped
  $headstart --help
END
