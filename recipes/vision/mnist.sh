#!/usr/bin/env bash
# MNIST in 500 mega-batches: Figure 7 (CER against compute and size) and the lower half of Figure 3 (error over time).
#
# Hardware:  two CPU cores (two rows at a time), 4 GB of memory
# Time:      about six hours (three seeds of a row take 1 to 9 minutes at width 4, 2 to 25 at width 64)
#
#   recipes/vision/mnist.sh                               # fetches MNIST into corpora/mnist
#   SOURCE=FOLDER recipes/vision/mnist.sh                 # a folder with the four files
#   LEARNERS=sm SIZES=64 WAITS="1 25" recipes/vision/mnist.sh
#   recipes/vision/mnist.sh --dry-run                     # print the commands; nothing is fetched
#
# The paper's grid is SIZES="4 8 16 32 64" WAITS="1 10 25 50 500". gMoE grows every 50 arrivals, to at most 10 experts,
# for every waiting time. Knobs: see recipes/vision/common.sh.
set -euo pipefail
DATASET=mnist MEGABATCHES=500 SIZE_OPTION=--width
: "${LEARNERS:=sm ens gens umix gmoe moe bagging vote}"
: "${PRESETS:=paper released-code}"
: "${SIZES:=4 64}"
: "${WAITS:=1 10 25 50 500}"
: "${GROW_EVERY:=50}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

grid
finish
