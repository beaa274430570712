# Shared code of the image recipes: the stream, a row, and the grid of learners, sizes and waiting times. The recipes in this
# folder source this file after they have set DATASET, MEGABATCHES, SIZE_OPTION and the defaults of a grid.
# Source: the paper (v5), section 5, appendices B.1 and C; all other settings are the defaults of alma-stream.
#
# Knobs (environment variables):
#   SOURCE    folder of the published files; missing files are fetched                (default: corpora/$DATASET)
#   RUNS      output folder                                                           (default: runs/$DATASET)
#   LEARNERS  sm, ens, vote (ens with a majority vote), umix, gens, gmoe, moe, bagging; for VGG networks also firefly
#   SIZES     neurons or channels of each layer
#   WAITS     mega-batches gathered before an update
#   REPLAY    1: train on all mega-batches so far; "0 1": run both                       (default: 0)
#   PRESETS   paper, released-code: settings that differ between the paper's text and its code    (default: paper)
#   SEEDS     seeds of the initial weights and the batches                            (default: 1 2 3)
#   ORDER     seed of the order of the stream, one for all runs                       (default: 1)
#   GROW_EVERY, GATE, NUM_EXPERTS   if set, options --grow-every (gmoe, firefly), --gate and --num-experts (mixtures)
#   ARCH      architecture instead of the learner's default: gens with alma_moe_mlp is an ensemble of mixtures
#   EPOCHS    epochs of each stage                                                    (default: 100, as in the paper)
#   GPU       1: train on a GPU; small networks train faster on a CPU                 (default: 0)
#   JOBS      number of rows that run at the same time                                (default: 2)
#   OMP_NUM_THREADS   threads of each row; two rows at a time with one thread each are fastest   (default: 1)
#
# One process trains all seeds of a row if the learner allows it. A run is $RUNS/LEARNER-SIZE-wWAIT-PRESET/seed-N; the name
# also has `-replay` and the values of GROW_EVERY, ARCH, GATE, NUM_EXPERTS and METHOD that are set. A second call resumes, or
# shows the table again. --dry-run prints the commands of all stages, or without a stream the commands of alma-stream;
# --dry-run fetches and writes nothing.
# shellcheck shell=bash disable=SC2153
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/lib/environment.sh
source recipes/lib/jobs.sh

: "${SOURCE:=corpora/$DATASET}"
: "${RUNS:=runs/$DATASET}"
: "${REPLAY:=0}"
: "${SEEDS:=1 2 3}"
: "${ORDER:=1}"
: "${PRESETS:=paper}"
: "${GATE:=}"
: "${NUM_EXPERTS:=}"
: "${METHOD:=}"
: "${ARCH:=}"
: "${EPOCHS:=100}"
: "${GPU:=0}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

STREAM=$RUNS/stream-seed$ORDER
HAS_STREAM=1
[ -e "$STREAM/stream.json" ] || HAS_STREAM=0

# printed WORD...: print a command without the word --dry-run.
printed() {
  local word
  local -a words=()
  for word in "$@"; do [ "$word" = --dry-run ] || words+=("$(printf %q "$word")"); done
  echo "${words[*]}"
}

if [ "$HAS_STREAM" = 0 ]; then
  prepare=(python -m data_prep.corpus "$DATASET" --source "$SOURCE" --out "$STREAM" --megabatches "$MEGABATCHES")
  prepare+=(--seed "$ORDER")
  if [ "$DRY_RUN" = 1 ]; then printed "${prepare[@]}"; else "${prepare[@]}" >&2; fi
fi

# row LEARNER SIZE WAIT REPLAY PRESET: start one row with all seeds.
row() {
  local learner=$1 size=$2 wait=$3 replay=$4 preset=$5 name seed
  local kind=${learner/vote/ens}
  name=$learner-$size-w$wait-$preset
  local -a command=(alma-stream --stream "$STREAM" --learner "$kind" --wait "$wait" --preset "$preset")
  local -a training=("$SIZE_OPTION" "$size" --max-epoch "$EPOCHS")
  if [ "$replay" = 1 ]; then name+=-replay command+=(--replay); fi
  case $learner in gmoe | firefly) name+=-g$GROW_EVERY command+=(--grow-every "$GROW_EVERY") ;; esac
  if [ -n "$ARCH" ]; then name+=-$ARCH training+=(--arch "$ARCH"); fi
  case $learner$ARCH in
    gmoe | moe | *_moe_*)
      if [ -n "$GATE" ]; then name+=-$GATE training+=(--gate "$GATE"); fi
      if [ -n "$NUM_EXPERTS" ]; then name+=-e$NUM_EXPERTS training+=(--num-experts "$NUM_EXPERTS"); fi
      ;;
  esac
  if [ "$learner" = vote ]; then command+=(--combine vote); fi
  if [ "$learner" = gmoe ] && [ -n "$METHOD" ]; then name+=-$METHOD command+=(--grow-method "$METHOD"); fi
  [ "$GPU" = 1 ] || training+=(--cpu)
  case $learner in
    sm | ens | gens | bagging | vote) run_of "$name" $SEEDS ;;
    *) for seed in $SEEDS; do run_of "$name/seed-$seed" "$seed"; done ;;
  esac
}

# run_of NAME SEED...: start one process with the command that `row` has composed.
run_of() {
  local name=$1 run=$RUNS/${1%%/*}
  shift
  ROW_RUNS=$(printf '%s\n' "${@/#/$run/seed-}")
  [ $# -gt 1 ] || run=$run/seed-$1
  [ "$DRY_RUN" = 1 ] || mkdir -p "$(dirname "$run")"
  local -a words=("${command[@]}" --seed "$@" --run "$run" "${OPTIONS[@]}" -- "${training[@]}")
  if [ "$DRY_RUN" = 1 ] && [ "$HAS_STREAM" = 0 ]; then words=(printed "${words[@]}"); fi
  start "$name" "${words[@]}"
}

# grid: start all rows of LEARNERS, SIZES, WAITS, REPLAY and PRESETS.
grid() {
  local learner size wait replay preset
  [ "$DRY_RUN" = 1 ] || mkdir -p "$RUNS"
  table "$DATASET"
  for size in $SIZES; do
    for wait in $WAITS; do
      for replay in $REPLAY; do
        for preset in $PRESETS; do
          for learner in $LEARNERS; do row "$learner" "$size" "$wait" "$replay" "$preset"; done
        done
      done
    done
  done
}
