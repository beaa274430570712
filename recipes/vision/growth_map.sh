#!/usr/bin/env bash
# The map of MNIST digits by expert after each of three growth steps, side by side: Figure 8 of the paper's first version.
#
# Hardware:  one CPU core
# Time:      EPOCHS=20: three minutes
#
#   EPOCHS=20 recipes/vision/growth_map.sh               # the picture: runs/mnist-4/growth_map.png
#
# gMoE with hard gates starts with two experts and grows at each of the three arrivals that follow the first.
# Knobs: see recipes/vision/common.sh; the learner is gmoe, and the picture is that of the first of SEEDS.
set -euo pipefail
DATASET=mnist MEGABATCHES=4 SIZE_OPTION=--width
: "${RUNS:=runs/mnist-4}"
: "${SIZES:=32}"
: "${WAITS:=1}"
: "${SEEDS:=1}"
: "${GROW_EVERY:=1}"
: "${GATE:=hard}"
: "${NUM_EXPERTS:=2}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

OPTIONS+=(--keep-checkpoints)
LEARNERS=gmoe grid
finish
[ "$DRY_RUN" = 1 ] || python recipes/vision/growth_map.py "$RUNS"/gmoe-*/"seed-${SEEDS%% *}" --out "$RUNS/growth_map.png"
