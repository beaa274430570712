#!/usr/bin/env bash
# Runs the tests, and before that installs what they need into .venv unless an environment with it is active.
# Usage: bash tests/run.sh [--all] [pytest options]      e.g. bash tests/run.sh tests/moe -k capacity
# Without --all, what is marked as slow is left out: longer runs of what a shorter one tests too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tests=(-m "not slow")
if [[ ${1:-} == --all ]]; then
  tests=()
  shift
fi
source recipes/lib/environment.sh
# A worker for each core, each file by one worker, the longest files first (tests/conftest.py); -n 0 among the options
# runs everything in one process.
exec python -m pytest -n auto --dist loadfile --no-loadscope-reorder ${tests[@]+"${tests[@]}"} "$@"
