# Gives a recipe or tests/run.sh a Python with this checkout's package. To be sourced by bash:
#
#   set -euo pipefail
#   source recipes/lib/environment.sh
#
# An active environment that has this checkout's package and the extras is used. Otherwise `.venv` in the checkout is made
# and filled once, with the versions of constraints.txt; again only when setup.py or constraints.txt changes. Sourcing it
# twice, or from several shells at the same time, is safe; an installation that was cut off starts again. Afterwards
# `python` and all commands come from that environment.
#
#   ALMA_EXTRAS   extras of setup.py that must be there    (default: test,report,sample)
#   ALMA_PYTHON   the Python that makes .venv              (default: the first suitable of python3, python3.12, python3.11)
#   ALMA_OWN_VENV 1: use .venv even if another environment with the package is active       (default: 0)
# shellcheck shell=bash

: "${ALMA_EXTRAS:=test,report,sample}"
: "${ALMA_PYTHON:=}"
: "${ALMA_OWN_VENV:=0}"

ALMA_CHECKOUT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
ALMA_VENV=$ALMA_CHECKOUT/.venv
ALMA_UNFINISHED=$ALMA_CHECKOUT/.venv.unfinished # exists while an installation is under way, or after it was cut off

alma_log() { echo "environment: $*" >&2; }

# True if the active `python` has this very checkout installed, with what the extras need. It looks from the root folder,
# because a Python in the checkout finds the package without any installation.
alma_active_python_serves() {
  command -v python >/dev/null || return 1
  (cd / && python - "$ALMA_CHECKOUT" "$ALMA_EXTRAS" 2>/dev/null) <<'PYTHON'
import importlib.metadata, importlib.util, os, re, sys

checkout, extras = sys.argv[1], sys.argv[2].split(",")
package = importlib.util.find_spec("fairseq_alma")
if package is None or os.path.dirname(os.path.dirname(os.path.realpath(package.origin))) != checkout:
    sys.exit(1)
for requirement in importlib.metadata.requires("fairseq-alma"):
    extra = re.search(r"extra == [\"'](.+?)[\"']", requirement)
    if extra and extra[1] in extras:
        importlib.metadata.version(re.match(r"[\w.-]+", requirement)[0])
PYTHON
}

# Prints the Python that can make the environment, or what is missing on standard error.
alma_find_python() {
  local candidate
  for candidate in ${ALMA_PYTHON:-python3 python3.12 python3.11}; do
    "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null || continue
    if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
      echo "$candidate"
      return 0
    fi
    alma_log "$candidate lacks the module venv or ensurepip; install it (Debian, Ubuntu: apt install python3-venv)"
    return 1
  done
  alma_log "no CPython 3.11 or 3.12 found as ${ALMA_PYTHON:-python3, python3.12 or python3.11};" \
    "install one, or name it with ALMA_PYTHON=/path/to/python"
  return 1
}

# What a finished installation is recognised by; the path is part of it because an environment cannot be moved.
alma_fingerprint() {
  echo "$ALMA_VENV"
  cat "$ALMA_CHECKOUT/setup.py" "$ALMA_CHECKOUT/constraints.txt" | cksum
}

# True if .venv was filled from the present setup.py and constraints.txt, with all the extras.
alma_venv_is_complete() {
  local extra
  [ -f "$ALMA_VENV/alma-complete" ] && [ ! -e "$ALMA_UNFINISHED" ] || return 1
  [ "$(head -n 2 "$ALMA_VENV/alma-complete")" = "$(alma_fingerprint)" ] || return 1
  for extra in ${ALMA_EXTRAS//,/ }; do
    grep -qx "extra $extra" "$ALMA_VENV/alma-complete" || return 1
  done
  "$ALMA_VENV/bin/python" -c '' 2>/dev/null
}

# Makes .venv if there is none, and again if this script left it unfinished or finished it elsewhere (a moved checkout, a
# Python that is gone). One that somebody made by hand is never removed.
alma_make_venv() {
  local python
  if [ -d "$ALMA_VENV" ] && [ ! -e "$ALMA_UNFINISHED" ]; then
    if [ ! -f "$ALMA_VENV/alma-complete" ]; then
      "$ALMA_VENV/bin/python" -m pip --version >/dev/null 2>&1 && return 0
      alma_log ".venv exists, but is no virtual environment with pip; move it away, then run the same command again"
      return 1
    fi
    [ "$(head -n 1 "$ALMA_VENV/alma-complete")" = "$ALMA_VENV" ] &&
      "$ALMA_VENV/bin/python" -m pip --version >/dev/null 2>&1 && : >"$ALMA_UNFINISHED" && return 0
  fi
  python=$(alma_find_python) || return 1
  : >"$ALMA_UNFINISHED" && "$python" -m venv --clear "$ALMA_VENV"
}

alma_install() {
  local log=$ALMA_VENV/alma-install.log pip=("$ALMA_VENV/bin/python" -m pip) start=$SECONDS
  alma_make_venv || return 1
  alma_log "installing fairseq-alma[$ALMA_EXTRAS] into .venv (once; minutes, and about 2 GB of disk);" \
    "to watch: tail -f .venv/alma-install.log"
  if ! (cd "$ALMA_CHECKOUT" && "${pip[@]}" install --disable-pip-version-check --no-input -c constraints.txt \
    -e ".[$ALMA_EXTRAS]" </dev/null >"$log" 2>&1); then
    tail -n 15 "$log" >&2
    alma_log "the installation failed; the reason is above, the full log in .venv/alma-install.log;" \
      "correct that, then run the same command again"
    return 1
  fi
  # fairseq requires torchaudio, which nothing here needs: transformers imports it wherever it is installed, and its build
  # fails next to a CPU build of torch.
  "${pip[@]}" uninstall --yes torchaudio >>"$log" 2>&1 || return 1
  { alma_fingerprint && printf 'extra %s\n' ${ALMA_EXTRAS//,/ }; } >"$ALMA_VENV/alma-complete" || return 1
  rm -f "$ALMA_UNFINISHED"
  alma_log "installed in $((SECONDS - start)) s, $(du -sm "$ALMA_VENV" | cut -f1) MB"
}

# Waits for the lock of file descriptor 9. It belongs to this shell, which has the descriptor, and stays when Python ends;
# not every system has the command flock.
alma_lock() { "$1" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' 2>/dev/null; }

# Installs under a lock; a shell that had to wait for another one finds the work done.
alma_ensure_venv() {
  local python
  alma_venv_is_complete && return 0
  python=$(alma_find_python) || return 1
  {
    alma_lock "$python" || return 1
    alma_venv_is_complete || alma_install
  } 9>"$ALMA_CHECKOUT/.venv.lock"
}

alma_use_environment() {
  if [ "$ALMA_OWN_VENV" != 1 ] && alma_active_python_serves; then
    return 0
  fi
  alma_ensure_venv || return 1
  unset PYTHONHOME
  export VIRTUAL_ENV=$ALMA_VENV PATH=$ALMA_VENV/bin:$PATH
  hash -r
}

alma_use_environment || return 1
