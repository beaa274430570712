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
: "${PASSES:=0.4}"                     # over each mega-batch, for each model
: "${SEED:=1}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # two runs with a thread each are faster than one with two
OPTIONS=("$@") # of alma-stream
DRY_RUN=0
case " $* " in *" --dry-run "*) DRY_RUN=1 ;; esac
source recipes/lib/jobs.sh

mkdir -p "$RUNS"
python -m data_prep.corpus kjv --text "$RUNS/kjv.txt"
alma-prep-text "$RUNS/kjv.txt" --out "$RUNS/stream" --megabatches 4 --vocab-size 2000 --seed "$SEED"

table report
for learner in $LEARNERS; do
  case $learner in
    sm) how=(--learner sm) ;;
    ens) how=(--learner ens --num-members 2) ;;
    gmoe) how=(--learner gmoe --grow-schedule 2,4,6,8) ;;
    retrain) how=(--learner sm --wait 4) ;;
    *) echo "LEARNERS: no learner $learner; choose from sm, ens, gmoe and retrain" >&2 && exit 2 ;;
  esac
  # No options after -- are needed: alma-stream chooses model, optimizer and length, and prints them.
  start "$learner" alma-stream --stream "$RUNS/stream" "${how[@]}" --size 350k --passes "$PASSES" --seed "$SEED" \
    --run "$RUNS/$learner" "${OPTIONS[@]}"
done
[ "$DRY_RUN" = 0 ] || exit 0
settle
sampled=${LEARNERS##* }
case " $LEARNERS " in *" gmoe "*) sampled=gmoe ;; esac
python -W ignore -c '
import sys
from pathlib import Path
import fairseq_alma

run = Path(sys.argv[1])
text = fairseq_alma.load_model(run).generate("And God said", max_new_tokens=60, seed=1, top_k=20)
(run / "sample.txt").write_text(text)
print(f"{run} writes: {text}\n")' "$RUNS/$sampled" 2>>"$RUNS/$sampled.log"
finish
echo "all on one page: $RUNS/report/report/index.html; the figure: $RUNS/report/report/figures/curve.png"
