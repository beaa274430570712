#!/usr/bin/env bash
# Table 2, row gMoE_w1, base model: one Switch Transformer that gets more experts before each mega-batch.
#
# Size:      6 layers, width 512; 65, 78, 91 and 116 million parameters in the four stages
# Hardware:  8 GPUs (the paper: V100, 32 GB); GPUS=1, 2, 4 give the same updates more slowly
# Memory:    of each GPU about 2.6, 3.1 and 3.7 GB with 4, 8 and 12 experts (counted: tests.cuda_without_gpu --memory)
# Time:      days; 120,000 updates of 192 sequences of 512 tokens per stage and model. SMOKE=1: minutes on a CPU
#
#   recipes/lm/gmoe_base.sh               # gMoE_w1, as in the paper
#   METHOD=split recipes/lm/gmoe_base.sh  # the smooth growth step
#   recipes/lm/gmoe_base.sh --dry-run     # print the commands, alma-grow among them
#   recipes/lm/gmoe_base.sh --stage 2     # one mega-batch, for a queue
#   recipes/lm/gmoe_base.sh --stage 3   # one mega-batch alone; recipes/slurm.sh queues all
#
# The stream: alma-prep-text YOUR_TEXT --out runs/lm/stream --megabatches 4   (the paper: 440 million words each)
# Knobs: see recipes/lm/common.sh; EXPERTS: in each stage (default: 4,6,8,12);
# METHOD: copy, split or scratch, as alma-grow --method (default: copy).
set -euo pipefail
MODEL_SIZE=base
: "${EXPERTS:=4,6,8,12}"
: "${METHOD:=copy}"
GROWS=1
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ "$SMOKE" = 0 ] || EXPERTS=$(cut -d, -f"1-$MEGABATCHES" <<<"$EXPERTS")

alma-stream --learner gmoe --grow-schedule "$EXPERTS" --grow-method "$METHOD" --run "$(run_folder "gmoe-$METHOD")" \
  "${STREAM_OPTIONS[@]}" "$@" -- "${TRAIN[@]}"
