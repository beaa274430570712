#!/usr/bin/env bash
# Waiting at a size for a CPU: the tiny Switch Transformer (SM, 4 experts) through 4 mega-batches of Wikipedia text,
# updated after every 1, 2 and 4 of them, with the same number of updates in all.
#
# Size:      4 layers, width 128; 2.6 million parameters with 8,000 tokens of vocabulary
# Hardware:  two CPU cores (two runs side by side, a thread each), 4 GB of memory
# Time:      about 35 minutes with the default of 200 updates of 4,096 tokens per mega-batch
#
#   TEXT="wiki.00.txt wiki.01.txt" recipes/lm/cpu/sm_waits.sh    # any text; a second call goes on
#   recipes/lm/cpu/sm_waits.sh --dry-run                         # print the fairseq commands
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source recipes/lib/environment.sh

# Files or folders, separated by spaces; python -m data_prep.corpus wikipedia-2015 --text FILE writes this one.
: "${TEXT:=corpora/wikipedia-2015.articles.txt}"
: "${RUNS:=runs/sm-tiny-waits}"        # everything is written under this folder
: "${STREAM:=$RUNS/stream}"            # prepared from TEXT unless it is there
: "${UPDATES:=200}"                    # per mega-batch
: "${SEED:=1}"
: "${JOBS:=2}" # runs side by side

DRY_RUN=0
case " $* " in *" --dry-run "*) DRY_RUN=1 ;; esac
if [ "$DRY_RUN" = 0 ] && [ ! -e "$STREAM/stream.json" ]; then
  mkdir -p "$(dirname "$STREAM")"
  # shellcheck disable=SC2086  # several files
  alma-prep-text $TEXT --out "$STREAM" \
    --megabatches 4 --vocab-size 8000 --valid-bytes 180000 --test-bytes 360000 --no-decontaminate --seed "$SEED" # as its table
fi

run_wait() {
  local wait=$1 updates=$((UPDATES * $1))
  shift
  alma-stream --stream "$STREAM" --megabatches 4 --learner sm --wait "$wait" --seed "$SEED" --run "$RUNS/sm-w$wait" "$@" -- \
    --arch alma_switch_lm_tiny --num-experts 4 --tokens-per-sample 256 --dropout 0.0 \
    --criterion alma_switch_cross_entropy \
    --optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-8 --clip-norm 1.0 \
    --lr 0.003 --lr-scheduler polynomial_decay --warmup-updates 40 --total-num-update "$updates" --max-update "$updates" \
    --batch-size 16 --num-workers 0 --cpu
}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # two small runs with a thread each are faster than one with two
for wait in 4 1 2; do
  while (($(jobs -rp | wc -l) >= JOBS)); do wait -n; done
  run_wait "$wait" "$@" &
done
while (($(jobs -rp | wc -l) > 0)); do wait -n; done
[ "$DRY_RUN" = 0 ] || exit 0
alma-report "$RUNS/sm-w1" "$RUNS/sm-w2" "$RUNS/sm-w4" --out "$RUNS/report"
echo "the perplexity over time as a picture: $RUNS/report/figures/anytime-curve.png"
