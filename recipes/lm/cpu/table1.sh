#!/usr/bin/env bash
# Table 1 in small: i.i.d. against sequential learning, Ens 4@2.
#
# Hardware:  two CPU cores (two rows at a time), 4 GB of memory
# Time:      about 25 minutes with the defaults
#
#   TEXT="wiki.00.txt.xz" recipes/lm/cpu/table1.sh    # a second call goes on, or shows the table again
#   recipes/lm/cpu/table1.sh --dry-run                # print the commands
#   SIZES=base SEEDS=1 recipes/lm/cpu/table1.sh       # fewer rows
#
# Knobs: see recipes/lm/cpu/settings.sh; the rows are in recipes/lm/cpu/rows.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
source recipes/lm/cpu/rows.sh

table1_rows
finish
