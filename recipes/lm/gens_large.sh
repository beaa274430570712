#!/usr/bin/env bash
# Table 2, row gEns_w1, large model: a new Switch Transformer with 4 experts for each mega-batch, all of them predict.
#
# Size:      12 layers, width 768; 210, 420, 630 and 840 million parameters after the four mega-batches
# Hardware:  8 GPUs (the paper: V100, 32 GB); GPUS=1, 2, 4 give the same updates more slowly
# Memory:    of each GPU about 6.5 GB, the new member alone (counted: tests.cuda_without_gpu --memory)
# Time:      weeks; 120,000 updates of 192 sequences of 512 tokens per stage and model. SMOKE=1: minutes on a CPU
#
#   recipes/lm/gens_large.sh                  # gEns_w1
#   recipes/lm/gens_large.sh --init previous  # new members start from the last one
#   recipes/lm/gens_large.sh --dry-run        # print the commands
#   recipes/lm/gens_large.sh --stage 2        # one mega-batch, for a queue
#   recipes/lm/gens_large.sh --stage 3   # one mega-batch alone; recipes/slurm.sh queues all
#
# The stream: alma-prep-text YOUR_TEXT --out runs/lm/stream --megabatches 4   (the paper: 440 million words each)
# Knobs: see recipes/lm/common.sh.
set -euo pipefail
MODEL_SIZE=large
: "${LR:=5e-4}"
: "${WARMUP:=4000}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

alma-stream --learner gens --run "$(run_folder gens)" "${STREAM_OPTIONS[@]}" "$@" -- "${TRAIN[@]}"
