#!/usr/bin/env bash
# MNIST in 500 mega-batches, width 4, waiting 1, where the paper's way ends with an error of one half: does the mean of the
# weights at the ends of stages, which predicts while training goes on from the weights themselves, mend it? Controls:
# an average that forgets, and stages that begin with half of the weights (shrink and perturb).
#
# Hardware:  one CPU core, 2 GB of memory
# Time:      about ten minutes a row of three seeds, which are trained side by side; four rows for each preset
#
#   SOURCE=FOLDER recipes/vision/mnist_averages.sh        # a second call goes on, or shows the table again
#   VARIANTS="plain mean" PRESETS="paper released-code" recipes/vision/mnist_averages.sh
#
# Knobs: VARIANTS, of plain mean half-life shrink; others see recipes/vision/common.sh. recipes/anytime/README.md has
# what would falsify it, and what came out.
set -euo pipefail
DATASET=mnist MEGABATCHES=500 SIZE_OPTION=--width GROW_EVERY=50
: "${LEARNERS:=sm}"
: "${PRESETS:=paper}"
: "${SIZES:=4}"
: "${WAITS:=1}"
: "${VARIANTS:=plain mean half-life shrink}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

given=("${OPTIONS[@]}")
for variant in $VARIANTS; do
  case $variant in
    plain) own=() VARIANT= ;; # the row of mnist.sh
    mean) own=(--stage-average mean) VARIANT=mean ;;
    half-life) own=(--stage-average 1/8) VARIANT=half-life ;;
    shrink) own=(--shrink-perturb 0.5) VARIANT=shrink ;;
    *) echo "VARIANTS: no variant $variant; choose from plain, mean, half-life, shrink" >&2 && exit 2 ;;
  esac
  OPTIONS=("${own[@]}" "${given[@]}")
  grid
done
finish
