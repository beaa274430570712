#!/usr/bin/env bash
# Table 2, rows Ens_w1, Ens_w3, Ens_w4, and Table 1, large model: N Switch Transformers with 4 experts, N seeds.
#
# Size:      12 layers, width 768; 420 million parameters with 2 members, 840 with 4
# Hardware:  8 GPUs (the paper: V100, 32 GB); GPUS=1, 2, 4 give the same updates more slowly
# Memory:    of each GPU about 6.5 GB, one member at a time (counted: tests.cuda_without_gpu --memory)
# Time:      weeks; 120,000 updates of 192 sequences of 512 tokens per stage and model. SMOKE=1: minutes on a CPU
#
#   MEMBERS=4 recipes/lm/ens_large.sh             # Ens_w1, 4@4
#   WAIT=3 STEPS=3 recipes/lm/ens_large.sh        # Ens_w3 (3x steps)
#   IID=3 recipes/lm/ens_large.sh                 # Table 1: i.i.d., k = 3
#   recipes/lm/ens_large.sh --stage 0 --member 1  # one member of one mega-batch, for a queue
#   recipes/lm/ens_large.sh --stage 0             # tests the stage once all members are there
#   GPUS=4 recipes/lm/ens_large.sh --jobs 2         # two members at the same time, on 4 GPUs each
#   recipes/lm/ens_large.sh --stage 3   # one mega-batch alone; recipes/slurm.sh queues all
#
# The stream: alma-prep-text YOUR_TEXT --out runs/lm/stream --megabatches 4   (the paper: 440 million words each)
# Knobs: see recipes/lm/common.sh; MEMBERS: models in the ensemble (default: 2).
set -euo pipefail
MODEL_SIZE=large
: "${LR:=5e-4}"
: "${WARMUP:=4000}"
: "${MEMBERS:=2}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

alma-stream --learner ens --num-members "$MEMBERS" --run "$(run_folder "ens$MEMBERS")" "${STREAM_OPTIONS[@]}" "$@" \
  -- "${TRAIN[@]}"
