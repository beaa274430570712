#!/usr/bin/env bash
# CIFAR-10 with and without replay: Figure 4 (waiting time 10) and Figure 8 (waiting times 2 and 10).
#
# Hardware:  GPU=1 JOBS=1: one GPU
# Time:      days (not measured): a run with replay and waiting time 10 trains on 5.5 times as many images
#
#   GPU=1 JOBS=1 recipes/vision/cifar10_replay.sh
#   SIZES=4 WAITS=10 LEARNERS=sm SEEDS=1 EPOCHS=2 recipes/vision/cifar10_replay.sh
#
# Knobs: see recipes/vision/common.sh.
set -euo pipefail
DATASET=cifar10 MEGABATCHES=100 SIZE_OPTION=--channels
: "${LEARNERS:=sm ens umix gens gmoe firefly}"
: "${SIZES:=4 16 64}"
: "${WAITS:=2 10}"
: "${REPLAY:=0 1}"
: "${SEEDS:=1}"
: "${GROW_EVERY:=10}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

grid
finish
