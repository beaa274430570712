#!/usr/bin/env bash
# EMNIST in 50 mega-batches, as in the appendix of the paper's first version.
#
# Hardware:  two CPU cores (two rows at a time), 6 GB of memory
# Time:      hours with the defaults (not measured); EPOCHS=10 takes a tenth
#
#   recipes/vision/emnist.sh                              # fetches the balanced split of EMNIST into corpora/emnist
#   LEARNERS="sm gmoe" SIZES=32 recipes/vision/emnist.sh
#
# Knobs: see recipes/vision/common.sh.
set -euo pipefail
DATASET=emnist MEGABATCHES=50 SIZE_OPTION=--width
: "${LEARNERS:=sm moe gmoe}"
: "${SIZES:=4 8 32}"
: "${WAITS:=1 5 50}"
: "${GROW_EVERY:=5}"
: "${GATE:=hard}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

grid
finish
