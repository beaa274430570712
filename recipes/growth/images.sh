#!/usr/bin/env bash
# MNIST in four mega-batches: networks that get wider, deeper, or both on the way, beside fixed ones and gMoE; error over
# training FLOPs. Fully connected ones first, then VGG networks, which Firefly grows too.
#
# Hardware:  one CPU core, 1 GB of memory
# Time:      half a minute a run, 27 runs with three seeds; of VGG networks, also 27, a minute, with Firefly up to two
#
#   SOURCE=FOLDER recipes/growth/images.sh          # the folder with the four files of MNIST; a second call goes on
#   SEEDS=1 ROWS="small wider" recipes/growth/images.sh
#   ROWS="vgg-small firefly firefly-deeper" VGG_EPOCHS=4 recipes/growth/images.sh
#
# What would falsify what is claimed, and what came out: recipes/growth/README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/lib/environment.sh

: "${RUNS:=runs/growth-images}" # everything is written under this folder
: "${SEEDS:=1 2 3}"
: "${EPOCHS:=10}"
: "${VGG_EPOCHS:=2}" # of the rows of VGG networks
ROWS_OF_MLP="small middle large deep wider wider-late deeper both gmoe"
ROWS_OF_VGG="vgg-small vgg-middle vgg-large vgg-wider vgg-wider-late firefly firefly-deeper firefly-both vgg-gmoe"
: "${ROWS:=$ROWS_OF_MLP $ROWS_OF_VGG}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
OPTIONS=("$@") # of alma-stream
DRY_RUN=0
case " $* " in *" --dry-run "*) DRY_RUN=1 ;; esac
source recipes/lib/jobs.sh

mkdir -p "$RUNS"
[ -e "$RUNS/stream/stream.json" ] ||
  alma-prep-images mnist --source "${SOURCE:?the folder with the files of MNIST}" --out "$RUNS/stream" --megabatches 4
table report
for seed in $SEEDS; do
  for row in $ROWS; do
    size=() epochs=$EPOCHS
    case $row in vgg-* | firefly*) epochs=$VGG_EPOCHS size=(--batch-size 64) ;; esac
    case $row in
      small) own=(--learner sm) size=(--width 16) ;;
      middle) own=(--learner sm) size=(--width 64) ;;
      large) own=(--learner sm) size=(--width 128) ;;
      deep) own=(--learner sm) size=(--width 16 --hidden-layers 4) ;;
      wider) own=(--learner grow --grow-schedule width=16,128,128,128) ;;
      wider-late) own=(--learner grow --grow-schedule width=16,16,128,128) ;;
      deeper) own=(--learner grow --grow-schedule "width=16,16,16,16 hidden-layers=2,2,4,4") ;;
      both) own=(--learner grow --grow-schedule "width=16,16,128,128 hidden-layers=2,2,4,4") ;;
      gmoe) own=(--learner gmoe) size=(--width 16) ;;
      vgg-small) own=(--learner sm) size+=(--arch alma_vgg --channels 4) ;;
      vgg-middle) own=(--learner sm) size+=(--arch alma_vgg --channels 6) ;;
      vgg-large) own=(--learner sm) size+=(--arch alma_vgg --channels 8) ;;
      vgg-wider) own=(--learner grow --grow-schedule channels=4,8,8,8) size+=(--arch alma_vgg) ;;
      vgg-wider-late) own=(--learner grow --grow-schedule channels=4,4,8,8) size+=(--arch alma_vgg) ;;
      firefly) own=(--learner firefly) size+=(--channels 4) ;;
      firefly-deeper) own=(--learner firefly --grow-in depth) size+=(--channels 4) ;;
      firefly-both) own=(--learner firefly --grow-in both) size+=(--channels 4) ;;
      vgg-gmoe) own=(--learner gmoe) size+=(--arch alma_moe_vgg --channels 4) ;;
      *) echo "ROWS: no row $row" >&2 && exit 2 ;;
    esac
    start "$row-seed$seed" alma-stream --stream "$RUNS/stream" "${own[@]}" --seed "$seed" --run "$RUNS/$row-seed$seed" \
      "${OPTIONS[@]}" -- "${size[@]}" --max-epoch "$epochs"
  done
done
finish
