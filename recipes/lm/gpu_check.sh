#!/usr/bin/env bash
# Tries what has run on no GPU yet, on a real one, and prints one verdict a line: exit status 0 if all is well.
#
# Hardware:  one GPU; two or more for the last lines
# Time:      not known yet, ten minutes by guess
#
#   bash recipes/lm/gpu_check.sh            # logs in runs/gpu-check
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/lib/environment.sh

: "${OUT:=runs/gpu-check}"
: "${UPDATES:=50}"
mkdir -p "$OUT"
failed=0

# check NAME COMMAND...: run it, and say what became of it.
check() {
  local name=$1 log="$OUT/${1// /-}.log"
  shift
  if "$@" >"$log" 2>&1; then echo "ok      $name"; else echo "FAILED  $name: $(tail -n 1 "$log")" && failed=1; fi
}

# train NAME OPTION...: a small run of a growing mixture; what stands before -- goes to alma-stream.
train() {
  local name=$1
  shift
  alma-stream --stream "$OUT/stream" --learner gmoe --grow-schedule 4,8 --wait 2 --run "$OUT/runs/$name" "$@" \
    --arch alma_switch_lm_tiny --criterion alma_switch_cross_entropy --lr 0.002 --clip-norm 1.0 --update-freq 2 \
    --max-update "$UPDATES" --batch-size 16 --tokens-per-sample 128 --dropout 0
}

python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "no GPU was found")'
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
python -m data_prep.corpus kjv --text "$OUT/kjv.txt"
alma-prep-text "$OUT/kjv.txt" --out "$OUT/stream" --megabatches 4 --vocab-size 2000 --valid-words 10000 --test-words 30000

check "numbers of kernels" python -m pytest -q -m gpu tests/moe
check "programs on the device" python -m pytest -q tests/cuda_without_gpu
check "adam fp32" train adam -- --optimizer adam
check "fused_adam fp32" train fused -- --optimizer fused_adam
check "fused_adam bf16" train bf16 -- --optimizer fused_adam --autocast bf16
check "saves in the background" train saves --save-every 10 -- --optimizer fused_adam --autocast bf16 --save-in-background
check "layers computed twice" train twice -- --optimizer fused_adam --autocast bf16 --checkpoint-activations
check "compiled bf16" train compiled -- --optimizer fused_adam --autocast bf16 --compile
check "the CPU beside a GPU" train cpu -- --optimizer adam --cpu
if ((gpus > 1)); then
  check "two GPUs" train two --num-procs 2 -- --optimizer fused_adam --autocast bf16
  check "expert parallel" train experts --num-procs 2 -- --optimizer fused_adam --autocast bf16 --expert-parallel
  check "fully shard" train shard --num-procs 2 -- --optimizer fused_adam --autocast bf16 --fully-shard
  check "fully shard fp32" train shard32 --num-procs 2 -- --optimizer fused_adam --fully-shard
fi
check "speed" python recipes/benchmarks/lm_speed.py --sizes base
check "one table" alma-report "$OUT"/runs/* --out "$OUT/report"
exit "$failed"
