#!/usr/bin/env bash
# The main job in small: text to a stream of 4 mega-batches, a Switch Transformer with 4 experts (SM) trained on one
# after the other with fairseq-train, tested after each with fairseq-eval-lm, and the table of perplexity at the end.
#
# Text:      the King James Version, 0.8 million words, which pip installs
# Hardware:  two CPU cores, 2 GB of memory
# Time:      about 4 minutes after installing (the first call makes .venv where no environment with the package is active)
#
#   bash recipes/quickstart.sh              # all of it; a second call goes on, or shows the table again
#   bash recipes/quickstart.sh --dry-run    # print the fairseq commands (after preparing the text)
#   bash recipes/quickstart.sh --stage 0    # one mega-batch
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/lib/environment.sh

: "${OUT:=runs/quickstart}" # everything is written under this folder
: "${UPDATES:=120}"         # per mega-batch
: "${SEED:=1}"

mkdir -p "$OUT"
python -m data_prep.kjv "$OUT/kjv.txt"
alma-prep-text "$OUT/kjv.txt" --out "$OUT/stream" \
  --megabatches 4 --vocab-size 2000 --valid-words 20000 --test-words 40000 --seed "$SEED"

MODEL=(--arch alma_switch_lm_tiny --num-experts 4 --tokens-per-sample 128)
CRITERION=(--criterion alma_switch_cross_entropy)
OPTIMIZER=(--optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-8 --clip-norm 1.0)
SCHEDULE=(--lr 0.003 --lr-scheduler polynomial_decay --warmup-updates 15
  --total-num-update "$UPDATES" --max-update "$UPDATES")
DATA=(--batch-size 16 --num-workers 0 --cpu)

alma-stream --stream "$OUT/stream" --learner sm --wait 1 --seed "$SEED" --run "$OUT/sm" --save-every 50 "$@" -- \
  "${MODEL[@]}" "${CRITERION[@]}" "${OPTIMIZER[@]}" "${SCHEDULE[@]}" "${DATA[@]}"

case " $* " in *" --dry-run "*) exit ;; esac
alma-report "$OUT/sm" --out "$OUT/report"
