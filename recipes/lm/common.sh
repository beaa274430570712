# Settings that the language experiments share. Sourced by the recipes beside it, after they have set MODEL_SIZE, and
# GROWS=1 where the learner says how many experts there are.
# Source: the paper (v5), section 5 and appendix B.2; the rows of Tables 1 and 2.
#
# Knobs (environment variables), beside those of each recipe:
#   STREAM     the stream: 4 mega-batches of text, 50,000 tokens            (default: runs/lm/stream)
#   RUNS       runs go under this folder                                    (default: runs/lm)
#   EXPERTS    experts in each Switch layer; the paper: 4, 8, 12            (default: 4)
#   WAIT       mega-batches gathered before an update; the paper: 1, 3, 4   (default: 1)
#   IID        k, instead of WAIT: i.i.d. on the first k mega-batches, as in Table 1; not for growing learners
#   STEPS      times 120,000 updates per stage; the paper: 1, and 3 for WAIT=3, 4 for WAIT=4   (default: 1)
#   GPUS       processes, one for each device; 192 sequences make an update on 1, 2, 4 or 8   (default: 8)
#   LOCAL_BATCH   sequences that a device computes at a time, and thus capacity's; less takes less memory  (default: 8)
#   LR, WARMUP, DROPOUT   the paper tuned them on the validation set: 2e-4 to 5e-3, 500 to 4000 updates
#   PRECISION  bf16 (products; weights in fp32) or fp32; the paper does not say   (default: bf16)
#   SEED       of the run                                                   (default: 1)
#   SMOKE      1: the same commands at a size that a CPU runs in about a minute, on text that pip installs
#
# Options of alma-stream (--dry-run, --stage N, --replay, ...) are passed on.
# shellcheck shell=bash
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/lib/environment.sh

: "${SMOKE:=0}"
: "${STREAM:=runs/lm/stream}"
: "${RUNS:=runs/lm}"
: "${EXPERTS:=4}"
: "${WAIT:=1}"
: "${STEPS:=1}"
: "${IID:=}"
: "${GROWS:=0}"
: "${GPUS:=$([ "$SMOKE" = 1 ] && echo 1 || echo 8)}"
: "${LOCAL_BATCH:=8}"
: "${LR:=1e-3}"
: "${WARMUP:=2000}"
: "${DROPOUT:=0.1}"
: "${PRECISION:=bf16}"
: "${SEED:=1}"

MEGABATCHES=4
UPDATES=$((120000 * STEPS))
GLOBAL_BATCH=192
TOKENS_PER_SAMPLE=512
SAVE_EVERY=2000
SIZE=(--arch "alma_switch_lm_$MODEL_SIZE")

for knob in GPUS LOCAL_BATCH; do
  [[ ${!knob} =~ ^[1-9][0-9]{0,3}$ ]] || { echo "$knob=${!knob}: a whole number of at least 1 is needed" >&2 && exit 2; }
done

# Small in everything; learns nothing worth reading.
if [ "$SMOKE" = 1 ]; then
  RUNS=$RUNS/smoke
  MEGABATCHES=$((WAIT > 1 ? WAIT : ${IID:-2}))
  STREAM=$RUNS/stream-$MEGABATCHES
  UPDATES=$((4 * STEPS)) WARMUP=2 LOCAL_BATCH=1 GLOBAL_BATCH=4 TOKENS_PER_SAMPLE=32 SAVE_EVERY=2 PRECISION=fp32
  SIZE+=(--decoder-layers 2 --decoder-embed-dim 32 --decoder-ffn-embed-dim 64 --decoder-attention-heads 2 --cpu)
fi

if ((GLOBAL_BATCH % (LOCAL_BATCH * GPUS))); then
  echo "GPUS=$GPUS: $GLOBAL_BATCH sequences cannot be dealt to them in batches of $LOCAL_BATCH; give GPUS=1, 2, 4 or 8" \
    "(GPUS times LOCAL_BATCH must divide $GLOBAL_BATCH)" >&2
  exit 2
fi

if [ "$SMOKE" = 1 ]; then
  mkdir -p "$RUNS"
  python -m data_prep.corpus kjv --text "$RUNS/kjv.txt"
  alma-prep-text "$RUNS/kjv.txt" --out "$STREAM" \
    --megabatches "$MEGABATCHES" --vocab-size 1000 --valid-bytes 6000 --test-bytes 12000
fi

STREAM_OPTIONS=(--stream "$STREAM" --megabatches "$MEGABATCHES" --seed "$SEED" --save-every "$SAVE_EVERY")
((GPUS == 1)) || STREAM_OPTIONS+=(--num-procs "$GPUS")
if [ -n "$IID" ]; then STREAM_OPTIONS+=(--iid "$IID"); else STREAM_OPTIONS+=(--wait "$WAIT" --drop-rest); fi
MODEL=("${SIZE[@]}")
[ "$GROWS" = 1 ] || MODEL+=(--num-experts "$EXPERTS")
MODEL+=(--capacity-factor 1.0 --balance-loss-weight 0.01 --dropout "$DROPOUT")
CRITERION=(--criterion alma_switch_cross_entropy)
OPTIMIZER=(--optimizer fused_adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-8)
SCHEDULE=(--lr "$LR" --lr-scheduler polynomial_decay --warmup-updates "$WARMUP"
  --total-num-update "$UPDATES" --max-update "$UPDATES")
DATA=(--tokens-per-sample "$TOKENS_PER_SAMPLE" --batch-size "$LOCAL_BATCH"
  --update-freq "$((GLOBAL_BATCH / LOCAL_BATCH))")
[ "$PRECISION" = fp32 ] || DATA+=(--autocast "$PRECISION")
TRAIN=("${MODEL[@]}" "${CRITERION[@]}" "${OPTIMIZER[@]}" "${SCHEDULE[@]}" "${DATA[@]}")

# Names a run after its row of Table 2, for instance runs/lm/sm-base-8-w3-x3.
run_folder() {
  local name=$1-$MODEL_SIZE-${EXPERTS//,/-}
  if [ -n "$IID" ]; then name+=-iid$IID; else name+=-w$WAIT; fi
  ((STEPS == 1)) || name+=-x$STEPS
  ((SEED == 1)) || name+=-seed$SEED
  echo "$RUNS/$name"
}
