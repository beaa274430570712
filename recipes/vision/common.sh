# What the recipes of the image study share: the stream, a row, and the grid of learners, sizes and waiting times.
# Sourced by the recipes beside it, after they have set DATASET, MEGABATCHES, SIZE_OPTION and the defaults of a grid.
# Source: the paper (v5), section 5, appendices B.1 and C; all other settings are the defaults of alma-stream.
#
# Knobs (environment variables):
#   SOURCE    folder of the published files; fetched into it where they are missing   (default: corpora/$DATASET)
#   RUNS      everything is written under this folder                                 (default: runs/$DATASET)
#   LEARNERS  sm, ens, umix, gens, gmoe, moe, bagging; of VGG networks also firefly
#   SIZES     neurons or channels of each layer
#   WAITS     mega-batches gathered before an update
#   REPLAY    1: train on all mega-batches so far; "0 1": both                        (default: 0)
#   SEEDS     of SM, and of the order of the stream; all others have the first        (default: 1 2 3)
#   EPOCHS    of each stage                                                           (default: 100, the paper's)
#   GROW_EVERY  arrivals between two growth steps of gmoe and firefly
#   GPU       1: train on the GPU where there is one; small networks are faster without           (default: 0)
#   JOBS      rows at a time                                                          (default: 2)
#   OMP_NUM_THREADS   of each; two rows with a thread each are faster than one with two           (default: 1)
#
# A second call resumes, or shows the table again. --dry-run prints the commands; the stream must be there.
# shellcheck shell=bash disable=SC2153
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/lib/environment.sh
source recipes/lib/jobs.sh

: "${SOURCE:=corpora/$DATASET}"
: "${RUNS:=runs/$DATASET}"
: "${REPLAY:=0}"
: "${SEEDS:=1 2 3}"
: "${EPOCHS:=100}"
: "${GPU:=0}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

OPTIONS=("$@") # of alma-stream
DRY_RUN=0
case " $* " in *" --dry-run "*) DRY_RUN=1 ;; esac

# stream_of SEED: prepares the stream in that order unless it is there, and names it.
stream_of() {
  local stream=$RUNS/stream-seed$1
  if [ ! -e "$stream/stream.json" ]; then
    python -m "data_prep.$DATASET" --source "$SOURCE" --out "$stream" --megabatches "$MEGABATCHES" --seed "$1" >&2
  fi
  echo "$stream"
}

# row LEARNER SIZE WAIT REPLAY SEED OPTION...: starts one run.
row() {
  local learner=$1 size=$2 wait=$3 replay=$4 seed=$5 stream name
  shift 5
  name=$learner-$size-w$wait-seed$seed
  local -a replaying=()
  if [ "$replay" = 1 ]; then name=$learner-$size-w$wait-replay-seed$seed replaying=(--replay); fi
  stream=$(stream_of "$seed")
  local -a command=(
    alma-stream --stream "$stream" --learner "$learner" --wait "$wait" "${replaying[@]}" --seed "$seed"
    --run "$RUNS/$name" "$@" "${OPTIONS[@]}" -- "$SIZE_OPTION" "$size" --max-epoch "$EPOCHS"
  )
  [ "$GPU" = 1 ] || command+=(--cpu)
  start "$name" "${command[@]}"
}

# grid: all rows of LEARNERS, SIZES, WAITS and REPLAY.
grid() {
  local learner size wait replay seed
  mkdir -p "$RUNS"
  table "$DATASET"
  for size in $SIZES; do
    for wait in $WAITS; do
      for replay in $REPLAY; do
        for learner in $LEARNERS; do
          local seeds=${SEEDS%% *}
          local -a growth=()
          case $learner in
            sm) seeds=$SEEDS ;;
            gmoe | firefly) growth=(--grow-every "$GROW_EVERY") ;;
          esac
          for seed in $seeds; do row "$learner" "$size" "$wait" "$replay" "$seed" "${growth[@]}"; done
        done
      done
    done
  done
}
