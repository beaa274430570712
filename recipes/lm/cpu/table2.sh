#!/usr/bin/env bash
# Table 2 in small: SM, Ens, gEns and gMoE with waiting 1, 3 and 4, two sizes of model.
#
# Hardware:  two CPU cores (two rows at a time), 4 GB of memory
# Time:      about 90 minutes with the defaults
#
#   TEXT="wiki.00.txt.xz" recipes/lm/cpu/table2.sh    # a second call goes on, or shows the table again
#   recipes/lm/cpu/table2.sh --dry-run                # print the commands
#   SIZES=base SEEDS=1 recipes/lm/cpu/table2.sh       # fewer rows
#
# Knobs: see recipes/lm/cpu/settings.sh; the rows are in recipes/lm/cpu/rows.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
source recipes/lm/cpu/rows.sh

table2_rows
finish
