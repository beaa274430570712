#!/usr/bin/env bash
# Runs the tests, and before that installs what they need into .venv unless an environment with it is active.
# Usage: bash tests/run.sh [pytest options]      e.g. bash tests/run.sh tests/modules -k capacity
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/lib/environment.sh
# A worker for each core, each file by one worker; -n 0 among the options runs everything in one process.
exec python -m pytest -n auto --dist loadfile "$@"
