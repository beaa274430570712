# Runs the rows of a table, JOBS at a time. Sourced by recipes of many runs, after environment.sh.
#
#   table NAME            the rows that follow belong to this table
#   start NAME COMMAND... starts a row once a place is free; its log is $RUNS/NAME.log, its run $RUNS/NAME.
#                         ROW_RUNS, where set, names the runs of that one command.
#                         With DRY_RUN=1 it runs the command at once (which then only prints: it has --dry-run)
#   settle                waits for all rows
#   all_done              says which of them failed, with status 1
#   finish                waits for all rows, says which failed, and shows every table
# shellcheck shell=bash disable=SC2153

: "${JOBS:=2}"
TABLE=                # the table whose rows are being started
declare -A TABLE_RUNS # table: its runs
declare -A PIDS       # run: its process
declare -A OUTCOMES   # run: done or failed, once it has ended
trap 'kill $(jobs -pr) 2>/dev/null || true' EXIT

table() { TABLE=$1; }

start() {
  local name=$1
  shift
  TABLE_RUNS[$TABLE]="${TABLE_RUNS[$TABLE]:-} ${ROW_RUNS:-$RUNS/$name}"
  [ -z "${PIDS[$name]:-}" ] || return 0 # a row of two tables
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

# Notes how the rows ended that have: bash forgets it of a job that nobody waits for until many others have ended.
reap() {
  local name running
  running=" $(jobs -pr | tr '\n' ' ') "
  for name in "${!PIDS[@]}"; do
    case $running in *" ${PIDS[$name]} "*) continue ;; esac
    [ -n "${OUTCOMES[$name]:-}" ] || { wait "${PIDS[$name]}" && OUTCOMES[$name]=done || OUTCOMES[$name]=failed; }
  done
}

# Waits until all rows have ended, and knows how: one may end between the two looks at them.
settle() {
  while reap && [ -n "$(jobs -pr)" ]; do sleep 0.5; done
  reap
}

# Says which of the rows that have ended failed; status 1 if any did.
all_done() {
  local name status=0
  for name in "${!PIDS[@]}"; do
    [ "${OUTCOMES[$name]}" = done ] || { echo "$name failed: $(tail -n 1 "$RUNS/$name.log")" >&2 && status=1; }
  done
  return "$status"
}

finish() {
  local table status=0
  [ "$DRY_RUN" = 0 ] || return 0
  settle
  all_done || status=1
  for table in "${!TABLE_RUNS[@]}"; do
    echo "## $table"
    # shellcheck disable=SC2086  # several runs
    alma-report ${TABLE_RUNS[$table]} --out "$RUNS/report/$table" || status=1
  done
  return "$status"
}
