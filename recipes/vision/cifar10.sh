#!/usr/bin/env bash
# CIFAR-10 in 100 mega-batches: Figure 2 (CER against compute and size) and the upper half of Figure 3 (error over time).
#
# Hardware:  GPU=1 JOBS=1: one GPU. SIZES=4 LEARNERS="sm ens": two CPU cores
# Time:      second command: 2 hours and a quarter on one busy core; not measured on a GPU
#
#   GPU=1 JOBS=1 recipes/vision/cifar10.sh                                        # the full grid, all sizes
#   SIZES=4 WAITS="10 100" LEARNERS="sm ens" SEEDS=1 EPOCHS=30 recipes/vision/cifar10.sh
#
# Knobs: see recipes/vision/common.sh.
set -euo pipefail
DATASET=cifar10 MEGABATCHES=100 SIZE_OPTION=--channels
: "${LEARNERS:=sm ens umix gens gmoe firefly}"
: "${SIZES:=4 8 16 32 64}"
: "${WAITS:=2 10 100}"
: "${GROW_EVERY:=10}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

grid
finish
