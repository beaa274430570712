# Settings of the anytime experiments, and how their arms are run. Sourced by the recipes beside it, which set REGIME,
# WORDS and ARMS first.
#
# Knobs (environment variables):
#   TEXT         files of text or .xz, separated by spaces, one paragraph per line
#                (default: corpora/wikipedia-2015.articles.txt, which `python -m data_prep.corpus
#                wikipedia-2015 --text corpora/wikipedia-2015.articles.txt` writes)
#   SKIP         words of it that are passed over, for text that nothing was tuned on   (default: 0)
#   RUNS         everything is written under this folder                         (default: runs/anytime/$REGIME)
#   VOCAB        vocabulary size in tokens                                       (default: 1000)
#   MEGABATCHES  of the stream                                                   (default: 4)
#   DEALS        1: each seed has the text dealt anew, with that seed; else all seeds learn from one stream   (default: 0)
#   HOLDOUT      words held out of each mega-batch; where given, slices of all are tested after each stage   (default: none)
#   UPDATES      per mega-batch                                                  (default: 100)
#   BATCH, SAMPLE   sequences per update, tokens per sequence                    (default: 8, 128)
#   WARMUP       updates: of each stage in the paper's way, of the stream where it is carried on   (default: 10)
#   LRS          learning rates to choose from, the same for all arms            (default: 0.01 0.025)
#   TUNE_SEED    the seed with which each arm tries all of them; the lowest mean loss on valid is taken   (default: 1)
#   SEEDS        the others, with the chosen rate                                (default: 2 3)
#   SIZE         options of alma_switch_lm
#   EXPERTS      of each Switch layer                                            (default: 4)
#   JOBS         runs at a time                                                  (default: 1)
#
# Options of alma-stream (--dry-run, --stage N, --slurm, ...) are passed on; after --slurm or --stage the same call goes on
# from what has ended. An oracle is a run for each arrival: with --stage N that of arrival N alone.
# shellcheck shell=bash disable=SC2153
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/lib/environment.sh
: "${JOBS:=1}"
source recipes/lib/jobs.sh

: "${TEXT:=corpora/wikipedia-2015.articles.txt}"
: "${SKIP:=0}"
: "${RUNS:=runs/anytime/$REGIME}"
: "${VOCAB:=1000}"
: "${MEGABATCHES:=4}"
: "${DEALS:=0}"
: "${HOLDOUT:=}"
: "${UPDATES:=100}"
: "${BATCH:=8}"
: "${SAMPLE:=128}"
: "${WARMUP:=10}"
: "${EXPERTS:=4}"
: "${LRS:=0.01 0.025}"
: "${TUNE_SEED:=1}"
: "${SEEDS:=2 3}"
: "${SIZE:=--decoder-layers 2 --decoder-embed-dim 64 --decoder-ffn-embed-dim 256 --decoder-attention-heads 4}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

OPTIONS=("$@") # of alma-stream
DRY_RUN=0
case " $* " in *" --dry-run "*) DRY_RUN=1 ;; esac
STAGE=       # N of --stage N
ONE_STAGE=() # OPTIONS without it, for runs that have one stage
last=
for word in "$@"; do
  case $last,$word in
  --stage,*) STAGE=$word ;;
  *,--stage) ;;
  *,--stage=*) STAGE=${word#*=} ;;
  *) ONE_STAGE+=("$word") ;;
  esac
  last=$word
done

# Paragraphs are dealt to the mega-batches one by one, so that these are exchangeable.
if [ "$DRY_RUN" = 0 ] && [ ! -e "$RUNS/text.txt" ]; then
  for file in $TEXT; do
    [ -f "$file" ] || { echo "TEXT: no file $file; recipes/anytime/common.sh says how to get the text" >&2; exit 2; }
  done
  mkdir -p "$RUNS"
  # shellcheck disable=SC2086  # several files
  xz --decompress --stdout --force --quiet -- $TEXT |
    awk -v skip="$SKIP" -v limit="$WORDS" '{ seen += NF } seen > skip && words < limit { words += NF; print }' \
      >"$RUNS/text.tmp"
  mv "$RUNS/text.tmp" "$RUNS/text.txt"
fi

# stream_of SEED: prepares the stream unless it is there, and names it.
stream_of() {
  local stream=$RUNS/stream seed=1
  [ "$DEALS" = 0 ] || stream=$RUNS/stream-seed$1 seed=$1
  if [ "$DRY_RUN" = 0 ] && [ ! -e "$stream/stream.json" ]; then
    alma-prep-text "$RUNS/text.txt" --format lines --out "$stream" --megabatches "$MEGABATCHES" --vocab-size "$VOCAB" \
      --valid-words 6000 --test-words 10000 --no-decontaminate ${HOLDOUT:+--holdout-words "$HOLDOUT"} \
      --workers 1 --seed "$seed" >&2 || return # set -e ends at $( )
  fi
  echo "$stream"
}

# row ARM LR SEED SCHEDULE OPTION...: starts one run, once a place is free.
#   SCHEDULE   decay: warm up and decay to zero within the stage; constant: warm up once
#   OPTION     of alma-stream; behind a word "--" those of fairseq-train
row() {
  local arm=$1 lr=$2 seed=$3 schedule=$4 own=(${HOLDOUT:+--matrix}) train=() stream
  stream=$(stream_of "$3")
  shift 4
  while [ $# -gt 0 ] && [ "$1" != -- ]; do own+=("$1") && shift; done
  [ $# -eq 0 ] || { shift && train=("$@"); }
  local rates=(--lr "$lr" --warmup-updates "$WARMUP" --max-update "$UPDATES")
  if [ "$schedule" = decay ]; then
    rates+=(--lr-scheduler polynomial_decay --total-num-update "$UPDATES")
  else
    rates+=(--lr-scheduler fixed)
  fi
  local -a size experts=()
  read -ra size <<<"$SIZE"
  case " ${own[*]} " in *" gmoe "*) ;; *) experts=(--num-experts "$EXPERTS") ;; esac
  local -a options=("${OPTIONS[@]}")
  case " ${own[*]} " in *" --iid "*) options=("${ONE_STAGE[@]}") ;; esac
  start "$arm-lr$lr-seed$seed" alma-stream --stream "$stream" --megabatches "$MEGABATCHES" \
    --run "$RUNS/$arm-lr$lr-seed$seed" --seed "$seed" --save-every 1000 "${own[@]}" "${options[@]}" -- \
    --arch alma_switch_lm "${size[@]}" "${experts[@]}" --dropout 0 --tokens-per-sample "$SAMPLE" \
    --criterion alma_switch_cross_entropy \
    --optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-8 --clip-norm 1.0 "${rates[@]}" \
    --batch-size "$BATCH" --num-workers 0 --cpu "${train[@]}"
}

# asked ARRIVAL: whether its stage is to be run.
asked() { [ -z "$STAGE" ] || [ "$STAGE" = "$1" ]; }

# retrained NAME LR SEED SCHEDULE OPTION...: the runs of an oracle, but for its first, which is a stage of another arm.
retrained() {
  local k
  for ((k = 2; k <= MEGABATCHES; k++)); do
    asked $((k - 1)) || continue
    row "$1-k$k" "$2" "$3" "$4" --iid "$k" "${@:5}"
  done
}

# arm NAME LR SEED: the runs of one arm.
arm() {
  local -a ema=(constant --carry-optimizer --ema-half-life 1/16) regular=(-- --weight-decay 0.1 --dropout 0.1)
  case $1 in
  oracle)
    retrained "$@" decay
    ! asked 0 || row paper "$2" "$3" decay --stage 0 # the oracle of the first arrival
    ;;
  paper) row paper "$2" "$3" decay ;;
  rewarm) row rewarm "$2" "$3" decay --rewarm one-schedule ;;
  oracle-ema)
    retrained "$@" constant --ema-half-life 1/16
    ! asked 0 || row ema "$2" "$3" constant --carry-optimizer --ema-half-life 1/16 --stage 0 # the oracle of the first arrival
    ;;
  ema) row ema "$2" "$3" "${ema[@]}" ;;
  ema-8 | ema-32) row "$1" "$2" "$3" constant --carry-optimizer --ema-half-life "1/${1#ema-}" ;;
  ema-replay) row ema-replay "$2" "$3" "${ema[@]}" --replay-share 0.5 ;;
  ema-least-seen) row ema-least-seen "$2" "$3" "${ema[@]}" --replay-share 0.5 --replay-order least-seen ;;
  ema-wd) row ema-wd "$2" "$3" "${ema[@]}" "${regular[@]}" ;;
  oracle-ema-wd)
    retrained "$@" constant --ema-half-life 1/16 "${regular[@]}"
    ! asked 0 || row ema-wd "$2" "$3" "${ema[@]}" --stage 0 "${regular[@]}"
    ;;
  best-wd) row best-wd "$2" "$3" decay --best-checkpoint --save-every 10 "${regular[@]}" ;;
  best-wd-replay) row best-wd-replay "$2" "$3" decay --replay --best-checkpoint --save-every 10 "${regular[@]}" ;;
  ema-wd-replay) row ema-wd-replay "$2" "$3" "${ema[@]}" --replay "${regular[@]}" ;;
  oracle-best-wd)
    retrained "$@" decay --best-checkpoint --save-every 10 "${regular[@]}"
    ! asked 0 || row best-wd "$2" "$3" decay --best-checkpoint --save-every 10 --stage 0 "${regular[@]}"
    ;;
  fixed-*) EXPERTS=${1#fixed-} row "$1" "$2" "$3" "${ema[@]}" ;;
  grow) row grow "$2" "$3" "${ema[@]}" --learner gmoe --grow-schedule "$GROW" --grow-method split ;;
  branch) row branch "$2" "$3" constant --carry-optimizer --branch-decay 0.2 ;;
  wsd-20) row wsd-20 "$2" "$3" constant --carry-optimizer --branch-share 0.2 ;;
  wsd-s) row wsd-s "$2" "$3" constant --carry-optimizer --branch-decay 0.2 --branch-continue ;;
  *) echo "ARMS: no arm $1; recipes/anytime/common.sh has them" >&2 && return 2 ;;
  esac
}

# experiment: all arms with all rates for the first seed, then each with its best rate for the others.
experiment() {
  local name lr seed
  table "$REGIME"
  for name in $ARMS; do
    for lr in $LRS; do arm "$name" "$lr" "$TUNE_SEED"; done
  done
  [ "$DRY_RUN" = 0 ] || return 0
  settle
  all_done || return 1
  for seed in $SEEDS; do
    for name in $ARMS; do
      lr=$(python recipes/arms.py --runs "$RUNS" --best-lr "$name" --seed "$TUNE_SEED")
      arm "$name" "$lr" "$seed"
    done
  done
  settle
  all_done || return 1
  python recipes/arms.py --runs "$RUNS" --seed "$TUNE_SEED"
}
