#!/usr/bin/env bash
# Table 2, row gMoE_w1, large model: one Switch Transformer that gets more experts before each mega-batch.
#
# Size:      12 layers, width 768; 210, 266, 323 and 436 million parameters in the four stages
# Hardware:  8 GPUs (the paper: V100, 32 GB); GPUS=1, 2, 4 give the same updates more slowly
# Memory:    of each GPU about 6.5, 9.0 and 11.5 GB with 4, 8 and 12 experts (counted: tests.cuda_without_gpu --memory)
# Time:      weeks; 120,000 updates of 192 sequences of 512 tokens per stage and model. SMOKE=1: minutes on a CPU
#
#   recipes/lm/gmoe_large.sh               # gMoE_w1, as in the paper
#   METHOD=split recipes/lm/gmoe_large.sh  # the smooth growth step
#   recipes/lm/gmoe_large.sh --dry-run     # print the commands, alma-grow among them
#   recipes/lm/gmoe_large.sh --stage 2     # one mega-batch, for a queue
#   recipes/lm/gmoe_large.sh --stage 3   # one mega-batch alone; recipes/slurm.sh queues all
#
# The stream: alma-prep-text YOUR_TEXT --out runs/lm/stream --megabatches 4   (the paper: 440 million words each)
# Knobs: see recipes/lm/common.sh; EXPERTS: in each stage (default: 4,6,8,12);
# METHOD: copy, split or scratch, as alma-grow --method (default: copy).
set -euo pipefail
MODEL_SIZE=large
: "${LR:=5e-4}"
: "${WARMUP:=4000}"
: "${EXPERTS:=4,6,8,12}"
: "${METHOD:=copy}"
GROWS=1
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ "$SMOKE" = 0 ] || EXPERTS=$(cut -d, -f"1-$MEGABATCHES" <<<"$EXPERTS")

alma-stream --learner gmoe --grow-schedule "$EXPERTS" --grow-method "$METHOD" --run "$(run_folder "gmoe-$METHOD")" \
  "${STREAM_OPTIONS[@]}" "$@" -- "${TRAIN[@]}"
