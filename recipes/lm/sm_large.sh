#!/usr/bin/env bash
# Table 2, rows SM_w1, SM_w3, SM_w4, large model: one Switch Transformer, fine-tuned on one mega-batch after the other.
#
# Size:      12 layers, width 768; 210, 323 and 436 million parameters with 4, 8 and 12 experts
# Hardware:  8 GPUs (the paper: V100, 32 GB); GPUS=1, 2, 4 give the same updates more slowly
# Memory:    of each GPU about 6.5, 9.0 and 11.5 GB with 4, 8 and 12 experts (counted: tests.cuda_without_gpu --memory)
# Time:      weeks; 4 stages of 120,000 updates of 192 sequences of 512 tokens. SMOKE=1: about a minute on a CPU
#
#   EXPERTS=12 recipes/lm/sm_large.sh                 # SM_w1, 12 experts
#   EXPERTS=12 WAIT=4 STEPS=4 recipes/lm/sm_large.sh  # SM_w4 (4x steps)
#   recipes/lm/sm_large.sh --dry-run                  # print the fairseq commands
#   recipes/lm/sm_large.sh --stage 2                  # one mega-batch, for a queue
#   recipes/lm/sm_large.sh --stage 3   # one mega-batch alone; recipes/slurm.sh queues all
#
# The stream: alma-prep-text YOUR_TEXT --out runs/lm/stream --megabatches 4   (the paper: 440 million words each)
# Knobs: see recipes/lm/common.sh.
set -euo pipefail
MODEL_SIZE=large
: "${LR:=5e-4}"
: "${WARMUP:=4000}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

alma-stream --learner sm --run "$(run_folder sm)" "${STREAM_OPTIONS[@]}" "$@" -- "${TRAIN[@]}"
