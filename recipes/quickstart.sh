#!/usr/bin/env bash
# The package in two minutes: text becomes a stream of 4 mega-batches, and learners train on one after the other. At the
# end: test perplexity after each mega-batch as a table and a figure, and text that a model wrote. The learners: one model
# (sm), an ensemble of two (ens), a mixture that grows from 2 to 8 experts (gmoe), and one model that is trained once, on
# everything, when the last mega-batch has arrived (retrain).
#
# Text:      the King James Version, 4.3 MB, which pip installs
# Hardware:  two CPU cores, 3 GB of memory
# Time:      about two minutes after installing (the first call makes .venv unless an environment with the package is active)
#
#   bash recipes/quickstart.sh              # a second call resumes, or prints the table again
#   bash recipes/quickstart.sh --dry-run    # print the commands
#   LEARNERS=sm bash recipes/quickstart.sh  # one learner
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/lib/environment.sh

: "${RUNS:=runs/quickstart}"            # folder for everything that is written
: "${LEARNERS:=ens gmoe sm retrain}"    # the longest first
: "${UPDATES:=120}"                     # for each mega-batch and model
: "${SEED:=1}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # two runs with a thread each are faster than one with two
OPTIONS=("$@") # of alma-stream
DRY_RUN=0
case " $* " in *" --dry-run "*) DRY_RUN=1 ;; esac
source recipes/lib/jobs.sh

if [ "$DRY_RUN" = 0 ]; then
  mkdir -p "$RUNS"
  python -m data_prep.corpus kjv --text "$RUNS/kjv.txt"
  alma-prep-text "$RUNS/kjv.txt" --out "$RUNS/stream" --megabatches 4 --vocab-size 2000 --seed "$SEED"
fi

table report
for learner in $LEARNERS; do
  updates=$UPDATES experts=(--num-experts 2)
  case $learner in
    sm) how=(--learner sm) ;;
    ens) how=(--learner ens --num-members 2) ;;
    gmoe) how=(--learner gmoe --grow-schedule 2,4,6,8) experts=() ;;
    retrain) how=(--learner sm --wait 4) updates=$((2 * UPDATES)) ;;
    *) echo "LEARNERS: no learner $learner; choose from sm, ens, gmoe and retrain" >&2 && exit 2 ;;
  esac
  start "$learner" alma-stream --stream "$RUNS/stream" --megabatches 4 "${how[@]}" --seed "$SEED" --run "$RUNS/$learner" \
    "${OPTIONS[@]}" -- --arch alma_transformer_lm_tiny "${experts[@]}" --tokens-per-sample 128 --batch-size 16 \
    --max-update "$updates"
done
finish
[ "$DRY_RUN" = 1 ] || for learner in $LEARNERS; do
  python - "$RUNS/$learner" <<'PYTHON'
import sys
import fairseq_alma

text = fairseq_alma.load_model(sys.argv[1]).generate("And God said", max_new_tokens=40, seed=1, top_k=20)
print(f"\n{sys.argv[1]} writes: {text}\n")
PYTHON
  break
done
[ "$DRY_RUN" = 1 ] || echo "all on one page: $RUNS/report/report/index.html; the figure: $RUNS/report/report/figures/curve.png"
