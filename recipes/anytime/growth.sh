#!/usr/bin/env bash
# Does growth pay, once the schedule's noise is gone? A mixture that is split from 4 to 16 experts while it is trained on
# (optimizer carried on, average tested) against fixed ones: the smallest, one of equal summed memory, the largest.
#
# Hardware:  one CPU core, 2 GB of memory
# Time:      a run of two minutes on a core of its own; two for each pilot, then twenty
#
#   TEXT="wiki.00.txt.xz" recipes/anytime/growth.sh       # first the pilots; a second call goes on, or shows the tables
#   PILOTS="markov:32:16:2000" recipes/anytime/growth.sh  # one regime alone
#   recipes/anytime/growth.sh --dry-run                   # print the commands, as if the first pilot told enough
#
# A pilot trains 4 and 16 experts on all of the data with one seed. The first regime in which 16 end with a perplexity
# lower by GAIN is taken; if there is none, it says so and ends.
#
# Knobs: PILOTS, a list of SOURCE:SYMBOLS:WIDTH:UPDATES (source wiki, which is TEXT, or markov, markov_text.py with so many
# words; width of an expert; updates per mega-batch), EMBED (width of the model, default 32), GAIN (percent, default 8), GROW
# (experts of each stage), EQUAL (their mean), others see recipes/anytime/common.sh.
set -euo pipefail
REGIME=growth
: "${PILOTS:=wiki:0:16:2000 markov:16:16:1000 markov:32:16:2000}"
: "${GAIN:=8}"
: "${GROW:=4,8,12,16}"
: "${EQUAL:=10}"
: "${ROOT:=${RUNS:-runs/anytime/growth}}"
: "${SEEDS:=2 3 4 5}"
: "${EMBED:=32}"
export LRS=${LRS:-0.01} SEEDS GROW
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$HERE/../.."
IFS=: read -r SOURCE SYMBOLS WIDTH UPDATES <<<"${PILOT:-none:::}"

OPTIONS=("$@") # of alma-stream
DRY_RUN=0
case " $* " in *" --dry-run "*) DRY_RUN=1 ;; esac

# regime PILOT PART: runs one part of one regime, in a process of its own, as common.sh prepares the stream at once.
regime() { PILOT=$1 PART=$2 RUNS=$ROOT/${1//:/-} ROOT=$ROOT bash "$HERE/growth.sh" "${OPTIONS[@]}"; }

if [ -z "${PILOT:-}" ]; then
  for pilot in $PILOTS; do
    regime "$pilot" pilot
    verdict=found
    if [ "$DRY_RUN" = 0 ] || [ -e "$ROOT/${pilot//:/-}/verdict" ]; then verdict=$(cat "$ROOT/${pilot//:/-}/verdict"); fi
    if [ "$verdict" = found ]; then
      regime "$pilot" study
      exit
    fi
  done
  echo "none of the regimes $PILOTS has 16 experts ahead of 4 by $GAIN %" && exit
fi

: "${WORDS:=$((UPDATES * 4 * 560 + 16000))}"
export SIZE="--decoder-layers 2 --decoder-embed-dim $EMBED --decoder-ffn-embed-dim $WIDTH --decoder-attention-heads 4 \
--moe-freq 1 --capacity-factor 2"
if [ "$SOURCE" = markov ]; then
  WORDS=$((UPDATES * 4 * 1100 + 16000))
  TEXT=$RUNS/markov.txt
  if [ "$DRY_RUN" = 0 ] && [ ! -e "$TEXT" ]; then
    mkdir -p "$RUNS"
    python3 "$HERE/markov_text.py" --symbols "$SYMBOLS" --words "$WORDS" >"$TEXT.tmp"
    mv "$TEXT.tmp" "$TEXT"
  fi
  case $TEXT in /*) ;; *) TEXT=$PWD/$TEXT ;; esac
fi
source "$HERE/common.sh"
table growth
if [ "$PART" = pilot ]; then
  for experts in 4 16; do EXPERTS=$experts row "iid-$experts" "$LRS" 0 constant --iid "$MEGABATCHES" --ema-half-life 1/16; done
  [ "$DRY_RUN" = 0 ] || exit 0
  settle
  all_done
  python - "$RUNS" "$LRS" "$GAIN" <<'PYTHON' | tee -a "$ROOT/pilots.txt"
import json, pathlib, sys

root, lr, least = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
records = [root / f"iid-{experts}-lr{lr}-seed0" / "stage-000" / "stage.json" for experts in (4, 16)]
if not all(record.exists() for record in records):
    sys.exit(f"{root}: the pilot has not ended; give the same command again when it has")
small, large = (json.loads(record.read_text())["test"]["ppl"] for record in records)
gain = 100 * (1 - large / small)
(root / "verdict").write_text("found" if gain >= least else "not found")
print(f"{root.name}: perplexity {small:.2f} with 4 experts, {large:.2f} with 16, {gain:+.1f} %")
PYTHON
  exit
fi
for seed in "$TUNE_SEED" $SEEDS; do
  for name in fixed-4 "fixed-$EQUAL" fixed-16 grow; do arm "$name" "$LRS" "$seed"; done
done
finish
[ "$DRY_RUN" = 0 ] || exit 0
for name in fixed-4 "fixed-$EQUAL" fixed-16; do
  echo "## differences from $name"
  python recipes/arms.py --runs "$RUNS" --seed "$TUNE_SEED" --against "$name"
done
