# Provide recipes and tests/run.sh with a Python environment that has this checkout's package. Source it from bash:
#
#   set -euo pipefail
#   source recipes/lib/environment.sh
#
# The script uses the active environment if it contains this checkout's package and the extras. Otherwise the script creates
# `.venv` in the checkout and installs the versions of constraints.txt, and installs them again only when setup.py or
# constraints.txt changes. Several shells may source the script at the same time; an interrupted installation starts again.
# Afterwards `python` and all commands come from the chosen environment.
#
#   ALMA_EXTRAS   required extras of setup.py              (default: test,report,sample)
#   ALMA_PYTHON   Python that creates .venv                (default: the first suitable of python3, python3.12, python3.11)
#   ALMA_OWN_VENV 1: use .venv even if another environment with the package is active       (default: 0)
# shellcheck shell=bash

case " $* " in # the arguments of the recipe
  *" --help "* | *" -h "*) # print the comment at the beginning of the recipe
    (cd "${OLDPWD:-.}" && sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0")
    exit 0
    ;;
esac

: "${ALMA_EXTRAS:=test,report,sample}"
: "${ALMA_PYTHON:=}"
: "${ALMA_OWN_VENV:=0}"

ALMA_CHECKOUT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
ALMA_VENV=$ALMA_CHECKOUT/.venv
ALMA_UNFINISHED=$ALMA_CHECKOUT/.venv.unfinished # exists during an installation, and after an interrupted one

alma_log() { echo "environment: $*" >&2; }

# Return 0 if this checkout and the extras are installed for the active `python`. Python runs in the root folder, because in
# the checkout it finds the package without an installation.
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

# Print a Python that can create the environment, or an error on standard error.
alma_find_python() {
  local candidate
  for candidate in ${ALMA_PYTHON:-python3 python3.12 python3.11}; do
    "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null || continue
    if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
      echo "$candidate"
      return 0
    fi
    alma_log "$candidate lacks the module venv or ensurepip; install this module (Debian, Ubuntu: apt install python3-venv)"
    return 1
  done
  alma_log "no CPython 3.11 or 3.12 found as ${ALMA_PYTHON:-python3, python3.12 or python3.11};" \
    "install one of these versions, or set ALMA_PYTHON=/path/to/python"
  return 1
}

# Print the fingerprint of a complete installation; it includes the path because an environment cannot be moved.
alma_fingerprint() {
  echo "$ALMA_VENV"
  cat "$ALMA_CHECKOUT/setup.py" "$ALMA_CHECKOUT/constraints.txt" | cksum
}

# Return 0 if .venv was installed from the current setup.py and constraints.txt, with all extras.
alma_venv_is_complete() {
  local extra
  [ -f "$ALMA_VENV/alma-complete" ] && [ ! -e "$ALMA_UNFINISHED" ] || return 1
  [ "$(head -n 2 "$ALMA_VENV/alma-complete")" = "$(alma_fingerprint)" ] || return 1
  for extra in ${ALMA_EXTRAS//,/ }; do
    grep -qx "extra $extra" "$ALMA_VENV/alma-complete" || return 1
  done
  "$ALMA_VENV/bin/python" -c '' 2>/dev/null
}

# Create .venv if it is missing, incomplete, or unusable (a moved checkout, a removed Python). An environment that was not
# created by this script is never removed.
alma_make_venv() {
  local python
  if [ -d "$ALMA_VENV" ] && [ ! -e "$ALMA_UNFINISHED" ]; then
    if [ ! -f "$ALMA_VENV/alma-created" ]; then
      "$ALMA_VENV/bin/python" -m pip --version >/dev/null 2>&1 && return 0
      alma_log ".venv: expected a virtual environment with pip; move this folder away, then run the same command again"
      return 1
    fi
    [ "$(head -n 1 "$ALMA_VENV/alma-complete")" = "$ALMA_VENV" ] &&
      "$ALMA_VENV/bin/python" -m pip --version >/dev/null 2>&1 && : >"$ALMA_UNFINISHED" && return 0
    if [ -L "$ALMA_VENV" ]; then # --clear would empty the environment of another checkout
      alma_log ".venv: a link to an environment that is not usable here; remove the link, then run the same command again"
      return 1
    fi
  fi
  python=$(alma_find_python) || return 1
  : >"$ALMA_UNFINISHED" && "$python" -m venv --clear "$ALMA_VENV" && : >"$ALMA_VENV/alma-created"
}

alma_install() {
  local log=$ALMA_VENV/alma-install.log pip=("$ALMA_VENV/bin/python" -m pip) start=$SECONDS
  alma_make_venv || return 1
  alma_log "installing fairseq-alma[$ALMA_EXTRAS] into .venv (once; minutes, and about 2 GB of disk);" \
    "to watch: tail -f .venv/alma-install.log"
  if ! (cd "$ALMA_CHECKOUT" && "${pip[@]}" install --disable-pip-version-check --no-input --no-compile \
    -c constraints.txt -e ".[$ALMA_EXTRAS]" </dev/null >"$log" 2>&1); then
    tail -n 15 "$log" >&2
    alma_log "the installation failed; see the lines above, or .venv/alma-install.log for the full log;" \
      "fix the cause, then run the same command again"
    return 1
  fi
  # fairseq requires torchaudio, but this package does not use it. transformers imports an installed torchaudio, and its
  # build fails with a CPU build of torch.
  "${pip[@]}" uninstall --yes torchaudio >>"$log" 2>&1 || return 1
  # pip compiles to bytecode in one process. This uses all cores; some files are for other versions and do not compile.
  "$ALMA_VENV/bin/python" -m compileall -q -j 0 "$ALMA_VENV/lib" >>"$log" 2>&1 || true
  { alma_fingerprint && printf 'extra %s\n' ${ALMA_EXTRAS//,/ }; } >"$ALMA_VENV/alma-complete" || return 1
  rm -f "$ALMA_UNFINISHED"
  alma_log "installed in $((SECONDS - start)) s, $(du -sm "$ALMA_VENV" | cut -f1) MB"
}

# Wait for the lock of file descriptor 9. The lock belongs to the descriptor of this shell and remains when Python exits. Not
# every system has the command flock.
alma_lock() { "$1" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' 2>/dev/null; }

# Install under a lock; a shell that waited for another shell finds a complete installation.
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
