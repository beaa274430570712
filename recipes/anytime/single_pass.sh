#!/usr/bin/env bash
# Regime S: at most one pass over each mega-batch. What does sequential training lose against retraining by its schedule
# alone, and how much of that do a carried optimizer and an average, or a branch, bring back at every arrival?
#
# Hardware:  one CPU core, 2 GB of memory
# Time:      an hour on a core of its own (estimated)
#
#   TEXT="wiki.00.txt.xz" recipes/anytime/single_pass.sh    # a second call goes on, or shows the tables again
#   recipes/anytime/single_pass.sh --dry-run                # print the commands of the first seed
#
# Knobs: see recipes/anytime/common.sh.
set -euo pipefail
REGIME=single-pass
: "${WORDS:=220000}"
: "${ARMS:=paper ema oracle oracle-ema branch}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

experiment
