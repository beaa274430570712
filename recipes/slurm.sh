#!/usr/bin/env bash
# Queue a run of alma-stream as a chain of SLURM jobs, one job for each stage. A job depends on the previous job (afterok).
#
# Usage:     STAGES=50 SBATCH="--partition=gpu --gpus=1 --time=60" recipes/slurm.sh --stream STREAM --run RUN ... [-- ...]
# Resume:    run the same command again; complete stages are skipped, and a requeued job resumes its stage.
# Members:   MEMBERS=4 also queues a job for each member of an ensemble (gens: new member of a stage), before the stage's job.
# Dry run:   DRY_RUN=1 prints the calls of sbatch.
# Hardware:  as SBATCH requests. Time: the sum over all stages; --time in SBATCH limits one stage. All jobs have --requeue.
set -euo pipefail

: "${STAGES:?number of stages: mega-batches of the stream divided by --wait}"
: "${FIRST:=0}"      # the first stage to queue
: "${MEMBERS:=0}"    # members of an ensemble, one job each; 0: one job for each stage
: "${SBATCH:=}"      # additional options of sbatch
: "${LOGS:=slurm}"   # folder for the logs of the jobs
: "${DRY_RUN:=0}"
[[ $STAGES =~ ^[1-9][0-9]*$ ]] || { echo "STAGES=$STAGES: expected a number of stages" >&2; exit 2; }

own=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  own+=("$1")
  shift
done
[ "$DRY_RUN" = 1 ] || mkdir -p "$LOGS"

# submit NAME AFTER ARGUMENTS...: queue alma-stream with the arguments, after the jobs AFTER (ids joined by colons); print
# the job id.
submit() {
  local name=$1 after=$2 wrapped=exec quote="'\\''" word
  shift 2
  # shellcheck disable=SC2206  # several options
  local call=(sbatch --parsable --requeue --job-name "$name" --output "$LOGS/$name-%j.log" $SBATCH)
  [ -z "$after" ] || call+=(--dependency "afterok:$after" --kill-on-invalid-dep=yes)
  for word in alma-stream "$@"; do wrapped+=" '${word//"'"/$quote}'"; done # sh may not read the $'…' of printf %q
  call+=(--wrap "$wrapped")
  if [ "$DRY_RUN" = 1 ]; then
    printf '%q ' "${call[@]}" >&2
    echo >&2
    echo "$name"
  else
    "${call[@]}" | cut -d ';' -f 1
  fi
}

jobs=() # the job of a stage uses the members that other jobs trained
((MEMBERS == 0)) || jobs=(--jobs 1)
new=0 # number of the first member of stage 1; each stage of gens has new members
[[ " ${own[*]} " != *" --learner"[\ =]"gens "* ]] || new=$MEMBERS
before=
for ((stage = FIRST; stage < STAGES; stage++)); do
  after=$before
  for ((member = stage * new; member < stage * new + MEMBERS; member++)); do
    job=$(submit "stage-$stage-member-$member" "$before" "${own[@]}" --stage "$stage" --member "$member" "$@")
    after=${after:+$after:}$job
  done
  before=$(submit "stage-$stage" "$after" "${own[@]}" --stage "$stage" ${jobs[@]+"${jobs[@]}"} "$@")
done
[ "$DRY_RUN" = 1 ] || echo "queued up to stage $((STAGES - 1)); logs in $LOGS"
