#!/usr/bin/env bash
# Regime R: about 16 passes over small mega-batches, as the paper made about 20. Here repetition overfits besides.
#
# Hardware:  one CPU core, 2 GB of memory
# Time:      an hour on a core of its own (estimated)
#
#   TEXT="wiki.00.txt.xz" recipes/anytime/many_passes.sh    # a second call goes on, or shows the tables again
#   recipes/anytime/many_passes.sh --dry-run                # print the commands of the first seed
#
# Knobs: see recipes/anytime/common.sh.
set -euo pipefail
REGIME=many-passes
: "${WORDS:=28500}"
: "${ARMS:=paper ema oracle oracle-ema}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

experiment
