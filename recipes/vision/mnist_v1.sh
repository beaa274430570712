#!/usr/bin/env bash
# The MNIST study of the paper's first version: 50 mega-batches, FT (sm), MoE and gMoE with hard and soft gates (its
# Figure 3), and on MNIST what its ablations are on CIFAR-10 (section 5.2, Figure 5 left): growth of a tree against a flat
# gate, a mixture that grows against one that keeps its two experts, and against an ensemble of such ones, each trained on one
# stage alone.
#
# Hardware:  two CPU cores (two rows at a time), 4 GB of memory
# Time:      the second call below: some ten minutes
#
#   recipes/vision/mnist_v1.sh
#   EPOCHS=5 recipes/vision/mnist_v1.sh
#
# All mixtures start with two experts in each hidden layer; gMoE grows every 5 mega-batches. Knobs: GATES, hard and soft, and
# those of recipes/vision/common.sh, but for what makes the study: LEARNERS, NUM_EXPERTS, GATE, ARCH, METHOD.
set -euo pipefail
DATASET=mnist MEGABATCHES=50 SIZE_OPTION=--width
: "${RUNS:=runs/mnist-50}"
: "${SIZES:=4}"
: "${WAITS:=1 5 50}"
: "${GATES:=hard soft}"
: "${GROW_EVERY:=5}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NUM_EXPERTS=2
LEARNERS=sm grid
for GATE in $GATES; do
  LEARNERS="moe gmoe" grid
  METHOD=copy LEARNERS=gmoe grid
  ARCH=alma_moe_mlp LEARNERS=gens grid
done
finish
