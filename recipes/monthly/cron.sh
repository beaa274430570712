#!/usr/bin/env bash
# An example for cron: teach a model the text of the month that has ended. Once a month, at night:
#
#   0 3 1 * * /path/to/recipes/monthly/cron.sh /data/model /data/inbox
#
# Expects INBOX/YEAR-MONTH/ with the text of a month. A call that was killed, or that ran into a full disk, resumes with
# the next one; a month that the model has already does nothing. What it prints is in MODEL.log.
set -euo pipefail

MODEL=${1:?folder of the model} INBOX=${2:?folder with a folder for each month}
: "${MONTH:=$(date -d "$(date +%Y-%m-01) -1 day" +%Y-%m)}" # the month that has ended
: "${BUDGET:=3}"                                           # passes that an arrival may cost
exec 9>"$MODEL.lock"
flock -n 9 || exit 0 # the call of the month before still runs
alma-update "$MODEL" "$INBOX/$MONTH" --budget "$BUDGET" >>"$MODEL.log" 2>&1
