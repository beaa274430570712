#!/usr/bin/env bash
# Train all rows of Tables 1 and 2 at a size for two CPU cores: recipes/lm/table2.sh with the size small.
#
# Text:      the first BYTES of the file TEXT (default: English Wikipedia, which the recipe fetches)
# Hardware:  two CPU cores (two rows at a time), 4 GB of memory
# Time:      about an hour with three seeds
#
#   TEXT=my_text.txt recipes/lm/two_cores.sh           # a second call resumes, or prints the tables again
#   SEEDS=1 UPDATES=50 recipes/lm/two_cores.sh         # faster
#   recipes/lm/two_cores.sh --dry-run                  # print the commands
set -euo pipefail
[ -z "${TEXT:-}" ] || TEXT=$(realpath -e -- "$TEXT") # fails if the file does not exist
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/lib/environment.sh

unset EXPERTS MEMBERS METHOD WAIT IID STEPS SEED # each row sets these settings of table2.sh
: "${RUNS:=runs/lm-two-cores}"          # output folder
: "${TEXT:=corpora/wikipedia-2015.txt}"
: "${BYTES:=6000000}"
: "${SEEDS:=1 2 3}"                     # seeds of the rows without waiting; the other rows use the first seed
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} RUNS STREAM=$RUNS/stream
source recipes/lib/jobs.sh

if [ "$DRY_RUN" = 0 ] && [ ! -e "$STREAM/stream.json" ]; then
  mkdir -p "$RUNS"
  [ -e "$TEXT" ] || python -m data_prep.corpus wikipedia-2015 --text "$TEXT"
  # Without the beginning of a character at the end.
  head -c "$BYTES" "$TEXT" | python -c 'import codecs, sys; text = sys.stdin.buffer.read()
sys.stdout.buffer.write(text[: codecs.utf_8_decode(text, "replace")[1]])' >"$RUNS/text.txt"
  alma-prep-text "$RUNS/text.txt" --out "$STREAM" --megabatches 4 --vocab-size 2000
fi

# row NAME LEARNER KNOB=VALUE...: start a row when fewer than JOBS are running.
row() {
  local name=$1 learner=$2
  shift 2
  ROW_RUNS=$RUNS/$name start "$name" env "$@" bash recipes/lm/table2.sh "$learner" small "${OPTIONS[@]}"
}

first=${SEEDS%% *}
for seed in $SEEDS; do
  suffix=$([ "$seed" = 1 ] || echo "-seed$seed")
  table table2
  for experts in 4 8 12; do row "sm-small-$experts-w1$suffix" sm EXPERTS="$experts" SEED="$seed"; done
  row "gens-small-4-w1$suffix" gens SEED="$seed"
  row "gmoe-small-4-copy-w1$suffix" gmoe SEED="$seed"
  row "ens-small-4@2-w1$suffix" ens SEED="$seed"
  table table1
  row "ens-small-4@2-w1$suffix" ens SEED="$seed"
  for k in 3 4; do row "ens-small-4@2-iid$k$suffix" ens IID="$k" SEED="$seed"; done
done
table table2
suffix=$([ "$first" = 1 ] || echo "-seed$first")
for steps in 1 3; do
  times=$([ "$steps" = 1 ] || echo "-x$steps")
  row "sm-small-8-w3$times$suffix" sm EXPERTS=8 WAIT=3 STEPS="$steps" SEED="$first"
  row "ens-small-4@2-w3$times$suffix" ens WAIT=3 STEPS="$steps" SEED="$first"
done
for steps in 1 4; do
  times=$([ "$steps" = 1 ] || echo "-x$steps")
  row "sm-small-12-w4$times$suffix" sm EXPERTS=12 WAIT=4 STEPS="$steps" SEED="$first"
  row "ens-small-4@2-w4$times$suffix" ens WAIT=4 STEPS="$steps" SEED="$first"
done
row "ens-small-4@4-w1$suffix" ens MEMBERS=4 SEED="$first"
finish
