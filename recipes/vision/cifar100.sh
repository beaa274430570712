#!/usr/bin/env bash
# CIFAR-100 in 50 mega-batches, as in the appendix of the paper's first version.
#
# Hardware:  GPU=1 JOBS=1: one GPU
# Time:      about a day (not measured)
#
#   GPU=1 JOBS=1 recipes/vision/cifar100.sh
#   LEARNERS=sm SIZES=4 WAITS=10 SEEDS=1 EPOCHS=2 recipes/vision/cifar100.sh
#
# Knobs: see recipes/vision/common.sh.
set -euo pipefail
DATASET=cifar100 MEGABATCHES=50 SIZE_OPTION=--channels
: "${LEARNERS:=sm moe gmoe firefly}"
: "${SIZES:=4 16 32}"
: "${WAITS:=1 5 50}"
: "${GROW_EVERY:=5}"
: "${EPOCHS:=200}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

grid
finish
