#!/usr/bin/env bash
# MNIST with and without replay, at the waiting times for which replay is affordable.
#
# Hardware:  two CPU cores (two rows at a time), 4 GB of memory
# Time:      LEARNERS=sm: 15 minutes; with ens about an hour (estimated)
#
#   recipes/vision/mnist_replay.sh
#
# Knobs: see recipes/vision/common.sh.
set -euo pipefail
DATASET=mnist MEGABATCHES=500 SIZE_OPTION=--width
: "${LEARNERS:=sm ens}"
: "${SIZES:=4 64}"
: "${WAITS:=50}"
: "${REPLAY:=0 1}"
: "${GROW_EVERY:=50}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

grid
finish
