# Runs the rows of a table, JOBS at a time. Sourced by recipes of many runs, after environment.sh.
#
#   table NAME            the rows that follow belong to this table
#   start NAME COMMAND... starts a row once a place is free; its log is $RUNS/NAME.log, its run $RUNS/NAME.
#                         With DRY_RUN=1 it runs the command at once (which has --dry-run among its options)
#   finish                waits for all rows, says which failed, and shows every table
# shellcheck shell=bash disable=SC2153

: "${JOBS:=2}"
TABLE=                # the table whose rows are being started
declare -A TABLE_RUNS # table: its runs
declare -A PIDS       # run: its process
trap 'kill $(jobs -pr) 2>/dev/null || true' EXIT

table() { TABLE=$1; }

start() {
  local name=$1
  shift
  TABLE_RUNS[$TABLE]="${TABLE_RUNS[$TABLE]:-} $RUNS/$name"
  [ -z "${PIDS[$name]:-}" ] || return 0 # a row of two tables
  PIDS[$name]=none
  if [ "$DRY_RUN" = 1 ]; then
    "$@"
    return
  fi
  while (($(jobs -pr | wc -l) >= JOBS)); do sleep 0.5; done
  echo "$(date +%T) $name: $RUNS/$name.log"
  "$@" >>"$RUNS/$name.log" 2>&1 &
  PIDS[$name]=$!
}

finish() {
  local name table status=0
  [ "$DRY_RUN" = 0 ] || return 0
  for name in "${!PIDS[@]}"; do
    wait "${PIDS[$name]}" || { echo "$name failed: $(tail -n 1 "$RUNS/$name.log")" >&2 && status=1; }
  done
  for table in "${!TABLE_RUNS[@]}"; do
    echo "## $table"
    # shellcheck disable=SC2086  # several runs
    alma-report ${TABLE_RUNS[$table]} --out "$RUNS/report/$table" || status=1
  done
  return "$status"
}
