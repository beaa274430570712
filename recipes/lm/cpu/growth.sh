#!/usr/bin/env bash
# Growth by copies against growth by splits: the perplexity right after each step, and at the end.
#
# Hardware:  two CPU cores (two rows at a time), 4 GB of memory
# Time:      about 20 minutes with the defaults (estimated from single stages)
#
#   TEXT="wiki.00.txt.xz" recipes/lm/cpu/growth.sh    # a second call goes on, or shows the table again
#   recipes/lm/cpu/growth.sh --dry-run                # print the commands
#   SIZES=base SEEDS=1 recipes/lm/cpu/growth.sh       # fewer rows
#
# Knobs: see recipes/lm/cpu/settings.sh; the rows are in recipes/lm/cpu/rows.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
source recipes/lm/cpu/rows.sh

growth_rows
finish
