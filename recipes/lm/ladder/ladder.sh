#!/usr/bin/env bash
# The language study at the paper's ratios, on a ladder of sizes: all rows of Tables 1 and 2, and anytime training.
#
# Hardware:  one CPU core and 1 GB of memory; the same command given several times shares the work
# Time:      printed before anything is trained; the main rows of width 16 with three seeds some three hours of a core
#
#   TEXT="wiki.00.txt.xz" recipes/lm/ladder/ladder.sh --width 16            # a second call goes on
#   recipes/lm/ladder/ladder.sh --width 16 --dry-run                        # what is left, and its commands
#   TEXT="wiki.00.txt.xz" recipes/lm/ladder/ladder.sh --width 24 --rows table2 anytime --seeds 1 2 3
#
# Knobs: TEXT (files of text or .xz, a paragraph a line), RUNS (default: runs/lm-ladder); options: --help.
# What is claimed, what would falsify it, and what came out: recipes/lm/ladder/README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source recipes/lib/environment.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec python recipes/ladder.py "$@"
