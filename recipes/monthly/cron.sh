#!/usr/bin/env bash
# Example for cron: train a model on the text of the last month, once a month at night:
#
#   0 3 1 * * /path/to/recipes/monthly/cron.sh /data/model /data/inbox
#
# Expects INBOX/YEAR-MONTH/ with the text of a month. The next call resumes a call that was killed or
# that filled the disk. The script skips a month that the model has already seen. MODEL.log contains the output.
set -euo pipefail

MODEL=${1:?folder of the model} INBOX=${2:?folder with a folder for each month}
MODEL=${MODEL%/} # MODEL.lock and MODEL.log are next to the folder
: "${MONTH:=$(date -d "$(date +%Y-%m-01) -1 day" +%Y-%m)}" # the last month
: "${BUDGET:=3}"                                           # passes through the text of a month
exec 9>"$MODEL.lock"
flock -n 9 || exit 0 # the call of the previous month is still running
status=0
update() { alma-update "$MODEL" "$1" --budget "$BUDGET" >>"$MODEL.log" 2>&1 || status=$?; }
for text in "$INBOX"/????-??; do
    if [[ ${text##*/} < $MONTH ]]; then update "$text"; fi # a month that an earlier call missed
done
update "$INBOX/$MONTH"
exit "$status"
