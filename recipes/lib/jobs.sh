# Run the rows of a table, JOBS at a time. Recipes with several runs source it after environment.sh.
#
#   table NAME            assign the following rows to this table
#   start NAME COMMAND... start a row when fewer than JOBS rows are running; the log is $RUNS/NAME.log, the run $RUNS/NAME
#                         (or the runs in ROW_RUNS, one in each line). With DRY_RUN=1, run the command (with --dry-run)
#   settle                wait for all rows
#   all_done              print the rows that failed; status 1 if there are any
#   finish                wait for all rows, print the rows that failed, and show every table
#
# It also sets OPTIONS (arguments of the recipe, which are options of alma-stream), and DRY_RUN=1 if they have --dry-run.
# shellcheck shell=bash disable=SC2153,SC2034

: "${JOBS:=2}"
OPTIONS=("$@")
DRY_RUN=0
case " $* " in *" --dry-run "*) DRY_RUN=1 ;; esac
TABLE=                # table of the rows that start next
declare -A TABLE_RUNS # runs by table
declare -A PIDS       # process by row
declare -A OUTCOMES   # done or failed, by row that has ended
trap 'kill $(jobs -pr) 2>/dev/null || true' EXIT

table() { TABLE=$1; }

start() {
  local name=$1 before=${TABLE_RUNS[$TABLE]:-}
  shift
  TABLE_RUNS[$TABLE]=${before:+$before$'\n'}${ROW_RUNS:-$RUNS/$name}
  [ -z "${PIDS[$name]:-}" ] || return 0 # the row has started for another table
  if [ "$DRY_RUN" = 1 ]; then
    PIDS[$name]=none
    "$@"
    return
  fi
  while reap && (($(jobs -pr | wc -l) >= JOBS)); do sleep 0.5; done
  echo "$(date +%T) $name: $RUNS/$name.log"
  "$@" >>"$RUNS/$name.log" 2>&1 &
  PIDS[$name]=$!
}

# Record the exit status of rows that have ended; bash forgets the status of a job once many later jobs have ended.
reap() {
  local name running
  running=" $(jobs -pr | tr '\n' ' ') "
  for name in "${!PIDS[@]}"; do
    case $running in *" ${PIDS[$name]} "*) continue ;; esac
    [ -n "${OUTCOMES[$name]:-}" ] || { wait "${PIDS[$name]}" && OUTCOMES[$name]=done || OUTCOMES[$name]=failed; }
  done
}

# Wait for all rows and record their exit status. A row may end after the first reap, hence the second call.
settle() {
  while reap && [ -n "$(jobs -pr)" ]; do sleep 0.5; done
  reap
}

# Print the rows that failed; status 1 if there are any.
all_done() {
  local name status=0
  for name in "${!PIDS[@]}"; do
    [ "${OUTCOMES[$name]}" = done ] || { echo "$name failed: $(tail -n 1 "$RUNS/$name.log")" >&2 && status=1; }
  done
  return "$status"
}

finish() {
  local table runs status=0
  [ "$DRY_RUN" = 0 ] || return 0
  settle
  all_done || status=1
  for table in "${!TABLE_RUNS[@]}"; do
    echo "## $table"
    mapfile -t runs <<<"${TABLE_RUNS[$table]}"
    alma-report "${runs[@]}" --out "$RUNS/report/$table" || status=1
  done
  return "$status"
}
