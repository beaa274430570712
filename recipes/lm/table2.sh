#!/usr/bin/env bash
# Train one row of the paper's Tables 1 and 2: one learner on a stream of 4 mega-batches of text.
#
#   recipes/lm/table2.sh {sm,ens,gens,gmoe} {base,large,small} [options of alma-stream]
#   EXPERTS=8 recipes/lm/table2.sh sm base                   # SM_w1 with 8 experts
#   EXPERTS=8 WAIT=3 STEPS=3 recipes/lm/table2.sh sm base    # SM_w3 (3x steps)
#   MEMBERS=4 recipes/lm/table2.sh ens large --jobs 2        # Ens_w1, 4@4, two members at the same time
#   IID=3 recipes/lm/table2.sh ens base                      # Table 1: i.i.d., k = 3
#   METHOD=split recipes/lm/table2.sh gmoe base --stage 2    # smooth growth; one stage, for a queue
#   recipes/lm/table2.sh gmoe base --dry-run                 # print the commands
#
# Stream:    alma-prep-text YOUR_TEXT --preset paper --out runs/lm/stream --megabatches 4   (the paper: 440 million words each)
# Size:      base: 6 layers, width 512, 65 to 116 million parameters with 4 to 12 experts; large: 12 layers, width 768
#            small: 2 layers, width 64, for two CPU cores (recipes/lm/two_cores.sh)
# Hardware:  base, large: 8 GPUs (the paper: V100, 32 GB); GPUS=1, 2 or 4 computes the same updates more slowly
# Time:      base: days, large: weeks; 120,000 updates of 192 sequences of 512 tokens for each stage and model
# Source:    the paper (v5), section 5 and appendix B.2; the authors tuned LR (2e-4 to 5e-3), WARMUP (500 to 4000), DROPOUT
set -euo pipefail
LEARNER=${1:-} SIZE=${2:-}
case $LEARNER-$SIZE in
  sm-base | ens-base | gens-base | gmoe-base | sm-large | ens-large | gens-large | gmoe-large | \
    sm-small | ens-small | gens-small | gmoe-small) shift 2 ;;
  *) echo "usage: $0 {sm,ens,gens,gmoe} {base,large,small} [options of alma-stream]" >&2 && exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/lib/environment.sh

: "${STREAM:=runs/lm/stream}" # 4 mega-batches; a vocabulary of 50,000 in the paper
: "${RUNS:=runs/lm}"          # folder for the runs
: "${EXPERTS:=4}"             # experts of each Switch layer; the paper: 4, 8, 12; gmoe: growth to 6, 8, 12
: "${MEMBERS:=2}"             # number of models of ens
: "${METHOD:=copy}"           # growth method of gmoe: copy, split or scratch
: "${WAIT:=1}"                # mega-batches gathered before an update; the paper: 1, 3, 4
: "${IID:=}"                  # k, instead of WAIT: i.i.d. on the first k mega-batches (Table 1)
: "${STEPS:=1}"               # factor of the updates of a stage; the paper: 1, and 3 with WAIT=3, 4 with WAIT=4
: "${SEED:=1}"
if [ "$SIZE" = small ]; then
  : "${GPUS:=1}" "${LOCAL_BATCH:=16}" "${UPDATES:=250}" "${LR:=0.003}" "${WARMUP:=25}" "${DROPOUT:=0}" "${PRECISION:=fp32}"
  MODEL=(--arch alma_switch_lm --decoder-layers 2 --decoder-embed-dim 64 --decoder-ffn-embed-dim 256
    --decoder-attention-heads 4 --cpu)
  GLOBAL_BATCH=16 TOKENS=128
else
  : "${GPUS:=8}"        # processes, one for each device
  : "${LOCAL_BATCH:=8}" # sequences per device and batch; fewer sequences need less memory
  : "${UPDATES:=120000}" "${DROPOUT:=0.1}" "${PRECISION:=bf16}" # bf16 or fp32; the paper does not name its precision
  if [ "$SIZE" = large ]; then : "${LR:=5e-4}" "${WARMUP:=4000}"; else : "${LR:=1e-3}" "${WARMUP:=2000}"; fi
  MODEL=(--arch "alma_switch_lm_$SIZE")
  GLOBAL_BATCH=192 TOKENS=512
fi
if [[ ! $GPUS$LOCAL_BATCH =~ ^[1-9][0-9]*$ ]] || ((GLOBAL_BATCH % (LOCAL_BATCH * GPUS))); then
  echo "GPUS=$GPUS LOCAL_BATCH=$LOCAL_BATCH: their product must divide $GLOBAL_BATCH, the number of sequences per update" >&2
  exit 2
fi
UPDATES=$((UPDATES * STEPS))

name=$LEARNER-$SIZE-$EXPERTS
how=(--learner "$LEARNER" --stream "$STREAM" --megabatches 4 --seed "$SEED")
case $LEARNER in
  ens) how+=(--num-members "$MEMBERS") name+=@$MEMBERS ;;
  gmoe) how+=(--grow-schedule "$EXPERTS,6,8,12" --grow-method "$METHOD") name+=-$METHOD ;;
esac
[ "$LEARNER" = gmoe ] || MODEL+=(--num-experts "$EXPERTS")
if [ -n "$IID" ]; then how+=(--iid "$IID") name+=-iid$IID; else how+=(--wait "$WAIT" --drop-rest) name+=-w$WAIT; fi
((STEPS == 1)) || name+=-x$STEPS
((SEED == 1)) || name+=-seed$SEED
((GPUS == 1)) || how+=(--num-procs "$GPUS")
[ "$PRECISION" = fp32 ] || MODEL+=(--autocast "$PRECISION")

TRAIN=("${MODEL[@]}" --dropout "$DROPOUT" --capacity-factor 1.0 --balance-loss-weight 0.01
  --criterion alma_switch_cross_entropy
  --optimizer fused_adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-8
  --lr "$LR" --lr-scheduler polynomial_decay --warmup-updates "$WARMUP"
  --total-num-update "$UPDATES" --max-update "$UPDATES"
  --tokens-per-sample "$TOKENS" --batch-size "$LOCAL_BATCH" --update-freq "$((GLOBAL_BATCH / LOCAL_BATCH))")
exec alma-stream "${how[@]}" --run "$RUNS/$name" "$@" -- "${TRAIN[@]}"
