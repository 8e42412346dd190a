#!/usr/bin/env bash
# The measurements behind docs/results.md, part by part, each in a folder of its own under OUT. Needs a quiet machine. What
# is done is skipped, and what was interrupted goes on; `scripts/write_results.py OUT` makes the page of what is there.
#
#   EAGLE3=runs/eagle3/head [EAGLE1=...] [MEDUSA=...] scripts/measure_results.sh SUITES OUT
#
# SUITES   the folder with spec_bench.jsonl (question.jsonl of Spec-Bench), humaneval.jsonl and gsm8k_test.jsonl
#
# PARTS    which, in this order ("trees greedy drawn batches", about 50 minutes); in minutes on two cores without other
#          work, SmolLM2-135M in bf16 (41 tokens a second by `generate`), with all three heads:
#
#   trees      3  tree sizes of EAGLE3 by `headstart tune`, on 12 questions that are measured nowhere else (SETTINGS);
#                 its fastest fixed tree is taken from then on, where TREE names none
#   greedy    33  one answer at a time, temperature 0, all in turn: `generate`, our loop, suffix, prompt lookup,
#                 EAGLE3 (fixed and auto), EAGLE1, MEDUSA, and EAGLE3 with lookup; SPEC + CODE + MATH questions
#   long      17  some of them again with answers of up to LONG tokens: `generate`, EAGLE3 alone and with lookup, suffix,
#                 prompt lookup; SPEC questions
#   drawn     10  temperature 1: `generate`, our loop, EAGLE3 alone and with lookup, MEDUSA; DRAWN questions, first turns
#   batches    6  4 and 8 at once through the engine, beside batches of `generate`; BATCH questions, first turns
#   compiled   4  `generate` with a static cache and torch.compile, and our loop; FEW questions
#   peers      3  (and the peers' own time) PEERS and HEADS in turn with our heads and lookups; FEW questions
#   all480    48  plain against EAGLE3 on ALL questions of Spec-Bench
#   curve      3  the heads of CURVE, on the questions of trees
#   trees_eagle1, trees_medusa   3 each, as trees; before greedy, whose trees they choose
#
#          Minutes are by arithmetic, and go with TOKENS and with the numbers of questions.
#
# TOKENS   of an answer, at most (96)    LONG  in the part long (256)
# SPEC     Spec-Bench questions of each of its six groups (10); CODE, MATH: of HumanEval and GSM8K (20 each)
# DRAWN    of each group for drawn (10); BATCH: for batches (5); FEW: of each group for compiled and peers (2); ALL: in all480 (480)
# TREE     of EAGLE3, where it is fixed; TREE_EAGLE1, TREE_MEDUSA (else what trees_... found, else the usual ones)
# SETTINGS forms that trees compares ("chain:2 ... dynamic:6x4x24"); empty: all that `headstart tune` knows
# PEERS    decoders as module:function, in scripts/ or installed, such as "rivals.economized:lookup" (docs/peers.md)
# HEADS    for peers: heads that other tools trained, as NAME=FOLDER, such as "speculators=runs/speculators/head"; one named
#          headstart is ours, trained as theirs were
# CURVE    heads by the supervised tokens that they were trained on, "250000=runs/quarter/head 500000=runs/half/head"
# THREADS  of everything (2); DTYPE (bfloat16); BACKBONE (smollm2-135m)
#
# A tree once used is kept in OUT/trees/*.txt, so that parts run on different days go together.
set -euo pipefail

if [ $# -ne 2 ]; then
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"
  [ "${1:-}" = -h ] || [ "${1:-}" = --help ] && exit 0 || exit 2
fi
scripts=$(cd "$(dirname "$0")" && pwd)
suites=$(cd "$1" && pwd)
mkdir -p "$2/heads" "$2/suites" "$2/trees"
out=$(cd "$2" && pwd)
fail() { echo "measure_results: $*" >&2 && exit 2; }
export PYTHONPATH=$scripts${PYTHONPATH:+:$PYTHONPATH}
tokens=${TOKENS:-96} threads=${THREADS:-2}
export OMP_NUM_THREADS=$threads
common=(--backbone "${BACKBONE:-smollm2-135m}" --dtype "${DTYPE:-bfloat16}")
every() { echo $((80 / $1)); } # Spec-Bench has 80 questions of each group, one group after the other

link() { # VARIABLE FOLDER NAME: a head, as heads/NAME
  [ -e "$2/config.json" ] || fail "$1: $2 holds no config.json"
  ln -sfn "$(cd "$2" && pwd)" "$out/heads/$3"
}

[ -n "${EAGLE3:-}" ] || fail "EAGLE3 has to name the folder of a head"
for kind in EAGLE3 EAGLE1 MEDUSA; do
  [ -z "${!kind:-}" ] || link "$kind" "${!kind}" "${kind,,}"
done
others=() curve=()
for pair in ${HEADS:-}; do
  link HEADS "${pair#*=}" "${pair%%=*}"
  others+=("${pair%%=*}")
done
for pair in ${CURVE:-}; do
  [[ ${pair%%=*} =~ ^[0-9]+$ ]] || fail "CURVE: ${pair%%=*} is no number of tokens"
  link CURVE "${pair#*=}" "curve-${pair%%=*}"
  curve+=("heads/curve-${pair%%=*}")
done
for name in spec_bench humaneval gsm8k_test; do
  [ -e "$suites/$name.jsonl" ] || fail "$suites/$name.jsonl is missing"
  ln -sfn "$suites/$name.jsonl" "$out/suites/$name.jsonl"
done
cd "$out" # so that commands in reports name no folder of this machine
awk 'NR % 40 == 4' suites/spec_bench.jsonl >suites/other.jsonl # asked in no part with results, as NR % n is 1 there

# part NAME COMMAND...: once; the same command again is skipped
part() {
  local folder=$1
  shift
  local told="${*/#tuned/headstart tune}"
  [ "$(cat "$folder/done" 2>/dev/null)" != "$told" ] || return 0
  printf '\n== %s (%s)\n%s\n' "$folder" "$(date +%H:%M)" "$told"
  mkdir -p "$folder"
  "$@"
  echo "$told" >"$folder/done"
}

# tree KIND [NAME]: the tree of a head, as asked for, or found before; written down when first used
tree() {
  local file=trees/$1.txt found=${2:-}
  if [ -z "$found" ] && [ ! -e "$file" ] && [ -e "trees/$1/found.json" ]; then
    found=$(python -P -c '
import json, sys
runs = json.load(open(sys.argv[1]))["runs"]
fixed = {name: sum(one["tokens"] for one in some) / sum(one["seconds"] for one in some) for name, some in runs.items()}
print(max((name for name in fixed if name not in ("none", "auto")), key=fixed.get))' "trees/$1/found.json")
  fi
  if [ -e "$file" ] && [ -n "$found" ] && [ "$found" != "$(cat "$file")" ]; then
    fail "heads/$1: the parts that are there were measured with $(cat "$file"), not $found; take another OUT"
  fi
  [ -e "$file" ] || echo "${found:-dynamic:3x3x6}" >"$file"
  cat "$file"
}

# choose KIND SETTINGS...
choose() {
  local kind=$1
  shift
  [ -e "heads/$kind" ] || return 0
  tuned() { headstart tune "$@" >"trees/$kind/found.part" && mv "trees/$kind/found.part" "trees/$kind/found.json"; }
  part "trees/$kind" tuned "${common[@]}" --head "heads/$kind" --suite suites/other.jsonl --out "trees/$kind/tune" \
    ${1:+--settings "$@"} --limit 12 --runs 12 --confirm 3 --rows 1 --max-new-tokens 64 --no-save --json
}

# sides: of the heads that are given
sides() {
  local found
  fixed=$(tree eagle3 "${TREE:-}")
  main=(--head heads/eagle3 --tree "$fixed")
  heads=("hybrid:heads/eagle3@auto")
  if [ -e heads/eagle1 ]; then
    found=$(tree eagle1 "${TREE_EAGLE1:-}")
    heads+=("heads/eagle1@$found")
  fi
  if [ -e heads/medusa ]; then
    found=$(tree medusa "${TREE_MEDUSA:-}")
    heads+=("heads/medusa@$found")
  fi
}

bench() { part "$1" headstart bench "${common[@]}" --threads "$threads" --max-new-tokens "$tokens" --out "$@"; }
spec() { bench "$1" --suite suites/spec_bench.jsonl --every "$(every "$2")" "${@:3}"; }
other() { # FOLDER SUITE QUESTIONS: as many as are asked, spread over the file
  local rows
  rows=$(wc -l <"suites/$2.jsonl")
  bench "$1" --suite "suites/$2.jsonl" --every "$((rows > $3 ? rows / $3 : 1))" --limit "$3" "${@:4}"
}

for name in ${PARTS:-trees greedy drawn batches}; do
  case $name in
    trees* | compiled) ;;
    *) sides ;;
  esac
  case $name in
    trees)
      choose eagle3 ${SETTINGS-chain:2 chain:3 chain:4 dynamic:2x3x4 dynamic:3x3x6 dynamic:3x4x8 dynamic:4x4x10 \
        dynamic:5x4x12 dynamic:5x4x16 dynamic:6x4x20 dynamic:6x4x24}
      ;;
    trees_eagle1) choose eagle1 ;;
    trees_medusa) choose medusa ;;
    greedy)
      all=("${main[@]}" --also heads/eagle3@auto "${heads[@]}" none suffix lookup)
      spec greedy/spec_bench "${SPEC:-10}" "${all[@]}"
      other greedy/humaneval humaneval "${CODE:-20}" "${all[@]}"
      other greedy/gsm8k gsm8k_test "${MATH:-20}" "${all[@]}"
      ;;
    long)
      tokens=${LONG:-256} spec long/spec_bench "${SPEC:-10}" --head heads/eagle3 --tree auto --also "${heads[0]}" suffix lookup
      ;;
    drawn)
      some=("${heads[0]}")
      [ ! -e heads/medusa ] || some+=("${heads[${#heads[@]} - 1]}")
      spec drawn/spec_bench "${DRAWN:-10}" "${main[@]}" --also "${some[@]}" --temperature 1 --concurrency 1 \
        --sides generate,engine --stretch 6
      ;;
    batches)
      spec batches/spec_bench "${BATCH:-5}" --head heads/eagle3 --tree auto --also "heads/eagle3@$fixed" \
        --concurrency 4,8 --sides generate,plain,engine --stretch 16
      ;;
    compiled) spec compiled/spec_bench "${FEW:-2}" --head none --also peer:rivals.compiled:generate ;;
    peers)
      [ -n "${PEERS:-}${HEADS:-}" ] || fail "peers: PEERS names no function, and HEADS no head"
      for one in ${others[@]+"${others[@]}"}; do heads+=("heads/$one@$fixed"); done
      for one in ${PEERS:-}; do heads+=("peer:$one"); done
      spec peers/spec_bench "${FEW:-2}" "${main[@]}" --also heads/eagle3@auto suffix lookup "${heads[@]}"
      ;;
    curve)
      [ -n "${CURVE:-}" ] || fail "curve: CURVE names no head"
      more=()
      for one in "${curve[@]:1}"; do more+=("$one@$fixed"); done
      bench curve --suite suites/other.jsonl --head "${curve[0]}" --tree "$fixed" ${more[@]+--also "${more[@]}"}
      ;;
    all480) bench all480/spec_bench --suite suites/spec_bench.jsonl --limit "${ALL:-480}" "${main[@]}" ;;
    *) fail "there is no part $name; --help lists them" ;;
  esac
done
