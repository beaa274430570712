# Settings of the small tables, and how their rows are run. Sourced by the recipes beside it.
#
# Knobs (environment variables):
#   TEXT         files of text or .xz, separated by spaces; documents separated by empty lines
#                (default: corpora/wikipedia-2015.articles.txt, which `python -m data_prep.corpus
#                wikipedia-2015 --text corpora/wikipedia-2015.articles.txt` writes)
#   WORDS        how much of it, from its beginning                              (default: 1,000,000)
#   RUNS         everything is written under this folder                         (default: runs/lm-cpu)
#   STREAM       prepared from TEXT unless it is there                           (default: $RUNS/stream)
#   VOCAB        vocabulary size in tokens                                       (default: 2000)
#   UPDATES      per mega-batch and model                                        (default: 250)
#   BATCH, SAMPLE   sequences per update, tokens per sequence                    (default: 16, 128)
#   LR, WARMUP, DROPOUT                                                          (default: 0.003, 25, 0)
#   BASE, LARGE  the two sizes, as options of alma_switch_lm
#   SIZES        which of them                                                   (default: base large)
#   SEEDS        of the rows that the findings rest on; all other rows have the first of them   (default: 1 2 3)
#   LARGE_SEEDS  the same for the large size                                     (default: 1)
#   JOBS         rows at a time                                                  (default: 2)
#   OMP_NUM_THREADS   of each; two rows with a thread each are faster than one with two         (default: 1)
# shellcheck shell=bash disable=SC2153
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source recipes/lib/environment.sh
source recipes/lib/jobs.sh

: "${TEXT:=corpora/wikipedia-2015.articles.txt}"
: "${WORDS:=1000000}"
: "${RUNS:=runs/lm-cpu}"
: "${STREAM:=$RUNS/stream}"
: "${VOCAB:=2000}"
: "${UPDATES:=250}"
: "${BATCH:=16}"
: "${SAMPLE:=128}"
: "${LR:=0.003}"
: "${WARMUP:=25}"
: "${DROPOUT:=0}"
: "${BASE:=--decoder-layers 2 --decoder-embed-dim 64 --decoder-ffn-embed-dim 256 --decoder-attention-heads 4}"
: "${LARGE:=--decoder-layers 4 --decoder-embed-dim 96 --decoder-ffn-embed-dim 384 --decoder-attention-heads 4}"
: "${SIZES:=base large}"
: "${SEEDS:=1 2 3}"
: "${LARGE_SEEDS:=1}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

OPTIONS=("$@") # of alma-stream
DRY_RUN=0
case " $* " in *" --dry-run "*) DRY_RUN=1 ;; esac

# The first documents, WORDS or a few more in all. awk reads on to the end, because xz complains where a pipe breaks.
if [ "$DRY_RUN" = 0 ] && [ ! -e "$STREAM/stream.json" ]; then
  for file in $TEXT; do
    [ -f "$file" ] || { echo "TEXT: no file $file; recipes/lm/cpu/settings.sh says how to get the text" >&2; exit 2; }
  done
  mkdir -p "$RUNS"
  # shellcheck disable=SC2086  # several files
  xz --decompress --stdout --force --quiet -- $TEXT |
    awk -v limit="$WORDS" 'done { next } { words += NF; print } /^$/ && words >= limit { done = 1 }' >"$RUNS/text.txt"
  alma-prep-text "$RUNS/text.txt" --out "$STREAM" --megabatches 4 --vocab-size "$VOCAB" \
    --valid-bytes 120000 --test-bytes 240000 --no-decontaminate --workers "$JOBS" # as the records that are kept
fi

# seeds_of SIZE: the seeds of the rows that the findings rest on.
seeds_of() { if [ "$1" = large ]; then echo "$LARGE_SEEDS"; else echo "$SEEDS"; fi; }

# first_seed_of SIZE: the seed of all other rows.
first_seed_of() { seeds_of "$1" | cut -d' ' -f1; }

# row NAME SIZE SEED STEPS EXPERTS OPTION...: starts one row of the current table, once a place is free.
#   STEPS    times UPDATES per stage
#   EXPERTS  in each Switch layer; -: the learner says
#   OPTION   of alma-stream
row() {
  local name=$1-$2-seed$3 size=$2 seed=$3 updates=$((UPDATES * $4)) experts=$5 shape
  shift 5
  if [ "$size" = base ]; then shape=$BASE; else shape=$LARGE; fi
  local -a model
  read -ra model <<<"--arch alma_switch_lm $shape"
  [ "$experts" = - ] || model+=(--num-experts "$experts")
  local -a command=(
    alma-stream --stream "$STREAM" --megabatches 4 --run "$RUNS/$name" --seed "$seed" --save-every "$updates"
    "$@" "${OPTIONS[@]}" --
    "${model[@]}" --dropout "$DROPOUT" --tokens-per-sample "$SAMPLE"
    --criterion alma_switch_cross_entropy
    --optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-8 --clip-norm 1.0
    --lr "$LR" --lr-scheduler polynomial_decay --warmup-updates "$WARMUP"
    --total-num-update "$updates" --max-update "$updates"
    --batch-size "$BATCH" --num-workers 0 --cpu
  )
  start "$name" "${command[@]}"
}
