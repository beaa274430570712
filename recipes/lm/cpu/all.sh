#!/usr/bin/env bash
# All small tables: Table 1, Table 2, and growth by copies against growth by splits.
#
# Hardware:  two CPU cores (two rows at a time), 4 GB of memory
# Time:      about two hours with the defaults (two and a half on cores that other work shared)
#
#   TEXT="wiki.00.txt.xz" recipes/lm/cpu/all.sh    # a second call goes on, or shows the table again
#   recipes/lm/cpu/all.sh --dry-run                # print the commands
#   SIZES=base SEEDS=1 recipes/lm/cpu/all.sh       # fewer rows
#
# Knobs: see recipes/lm/cpu/settings.sh; the rows are in recipes/lm/cpu/rows.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
source recipes/lm/cpu/rows.sh

table2_rows
table1_rows
growth_rows
finish
