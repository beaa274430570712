#!/usr/bin/env bash
# Table 2, row gEns_w1, base model: a new Switch Transformer with 4 experts for each mega-batch, all of them predict.
#
# Size:      6 layers, width 512; 65, 130, 195 and 260 million parameters after the four mega-batches
# Hardware:  8 GPUs (the paper: V100, 32 GB); GPUS=1, 2, 4 give the same updates more slowly
# Memory:    of each GPU about 2.6 GB, the new member alone (counted: tests.cuda_without_gpu --memory)
# Time:      days; 120,000 updates of 192 sequences of 512 tokens per stage and model. SMOKE=1: minutes on a CPU
#
#   recipes/lm/gens_base.sh                  # gEns_w1
#   recipes/lm/gens_base.sh --init previous  # new members start from the last one
#   recipes/lm/gens_base.sh --dry-run        # print the commands
#   recipes/lm/gens_base.sh --stage 2        # one mega-batch, for a queue
#   recipes/lm/gens_base.sh --stage 3   # one mega-batch alone; recipes/slurm.sh queues all
#
# The stream: alma-prep-text YOUR_TEXT --out runs/lm/stream --megabatches 4   (the paper: 440 million words each)
# Knobs: see recipes/lm/common.sh.
set -euo pipefail
MODEL_SIZE=base
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

alma-stream --learner gens --run "$(run_folder gens)" "${STREAM_OPTIONS[@]}" "$@" -- "${TRAIN[@]}"
