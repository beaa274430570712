#!/usr/bin/env bash
# The MNIST study of the paper's first version: 50 mega-batches, FT (sm), MoE and gMoE with hard and soft gates
# (Figure 3), and the CIFAR-10 ablations (section 5.2, Figure 5 left) on MNIST: growth of a tree against a flat gate; a
# growing mixture against a mixture that keeps two experts, and against an ensemble of such mixtures, each trained on one
# stage.
#
# Hardware:  two CPU cores (two rows at a time), 4 GB of memory
# Time:      second command: about ten minutes
#
#   recipes/vision/mnist_v1.sh
#   EPOCHS=5 recipes/vision/mnist_v1.sh
#
# All mixtures start with two experts in each hidden layer; gMoE grows every 5 mega-batches. Knobs: GATES (hard, soft)
# and the knobs of recipes/vision/common.sh, except LEARNERS, NUM_EXPERTS, GATE, ARCH and METHOD, which are fixed.
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
