#!/usr/bin/env bash
# The ablations of the paper's first version on CIFAR-10 (section 5.2, Figure 5 left): growth of a tree against a flat
# gate, and a mixture that grows every 2 mega-batches against a mixture that keeps two experts. Soft gates, no waiting.
#
# Hardware:  GPU=1 JOBS=1: one GPU; otherwise two CPU cores
# Time:      hours on two CPU cores (not measured)
#
#   GPU=1 JOBS=1 recipes/vision/cifar10_ablations.sh
#   recipes/vision/mnist_v1.sh                            # the same on MNIST, for two cores
#
# Knobs: see recipes/vision/common.sh; LEARNERS, NUM_EXPERTS, GATE and METHOD are fixed.
set -euo pipefail
DATASET=cifar10 MEGABATCHES=50 SIZE_OPTION=--channels
: "${RUNS:=runs/cifar10-50}"
: "${SIZES:=8}"
: "${WAITS:=1}"
: "${EPOCHS:=200}"
: "${GROW_EVERY:=2}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

GATE=soft NUM_EXPERTS=2
LEARNERS="moe gmoe" grid
METHOD=copy LEARNERS=gmoe grid
finish
