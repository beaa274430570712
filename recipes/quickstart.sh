#!/usr/bin/env bash
# The package in small: text to a stream of 4 mega-batches, four learners trained on one after the other with
# fairseq-train and tested after each with fairseq-eval-lm, and the table and a picture of perplexity at the end. The
# learners: a Switch Transformer with 4 experts (SM), an ensemble of two (Ens), an ensemble that grows by a model per
# mega-batch (gEns), and a Switch Transformer that grows from 4 to 12 experts (gMoE).
#
# Text:      the King James Version, 0.8 million words, which pip installs
# Hardware:  two CPU cores, 3 GB of memory; a GPU where there is one
# Time:      within 10 minutes after installing (the first call makes .venv where no environment with the package is
#            active)
#
#   bash recipes/quickstart.sh              # all of it; a second call resumes, or shows the table again
#   bash recipes/quickstart.sh --dry-run    # print the commands (after preparing the text)
#   LEARNERS=sm bash recipes/quickstart.sh  # one learner
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/lib/environment.sh

: "${OUT:=runs/quickstart}"          # everything is written under this folder
: "${LEARNERS:=ens gens gmoe sm}"    # the longest first
: "${UPDATES:=100}"                  # per mega-batch and model
: "${SEED:=1}"
: "${JOBS:=2}"                       # learners at a time
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # two small runs with a thread each are faster than one with two

mkdir -p "$OUT"
python -m data_prep.corpus kjv --text "$OUT/kjv.txt"
alma-prep-text "$OUT/kjv.txt" --out "$OUT/stream" \
  --megabatches 4 --vocab-size 2000 --valid-bytes 60000 --test-bytes 180000 --seed "$SEED"

MODEL=(--arch alma_switch_lm_tiny --decoder-layers 2 --tokens-per-sample 128 --dropout 0)
CRITERION=(--criterion alma_switch_cross_entropy)
OPTIMIZER=(--optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-8 --clip-norm 1.0)
SCHEDULE=(--lr 0.003 --lr-scheduler polynomial_decay --warmup-updates 15
  --total-num-update "$UPDATES" --max-update "$UPDATES")
DATA=(--batch-size 16 --num-workers 0) # and --cpu, to leave a GPU alone
TRAIN=("${MODEL[@]}" "${CRITERION[@]}" "${OPTIMIZER[@]}" "${SCHEDULE[@]}" "${DATA[@]}")

# learn NAME OPTION...: one learner through the stream.
learn() {
  local learner=$1 how=() experts=(--num-experts 4)
  shift
  case $learner in
    ens) how=(--num-members 2) ;;
    gmoe) how=(--grow-schedule 4,6,8,12) experts=() ;;
  esac
  exec alma-stream --stream "$OUT/stream" --learner "$learner" "${how[@]}" --wait 1 --seed "$SEED" \
    --run "$OUT/$learner" --save-every 50 "$@" -- "${TRAIN[@]}" "${experts[@]}"
}

case " $* " in *" --dry-run "*)
  for learner in $LEARNERS; do (learn "$learner" "$@"); done
  exit
  ;;
esac

trap 'kill $(jobs -pr) 2>/dev/null || true' EXIT
declare -A PIDS
for learner in $LEARNERS; do
  while (($(jobs -pr | wc -l) >= JOBS)); do sleep 0.5; done
  echo "$learner: what it is doing is in $OUT/$learner.log"
  learn "$learner" "$@" > >(sed -u "s/^/$learner: /") 2>>"$OUT/$learner.log" &
  PIDS[$learner]=$!
done
status=0 runs=()
for learner in $LEARNERS; do
  wait "${PIDS[$learner]}" || { echo "$learner failed: $(tail -n 1 "$OUT/$learner.log")" >&2 && status=1; }
  runs+=("$OUT/$learner")
done
((status == 0)) || exit "$status"
alma-report "${runs[@]}" --out "$OUT/report"
echo "all of it on one page: $OUT/report/index.html; the perplexity over time: $OUT/report/figures/anytime-curve.png"
