# Gives a recipe or tests/run.sh a Python with this checkout's package. To be sourced by bash:
#
#   set -euo pipefail
#   source recipes/lib/environment.sh
#
# An active environment that has this checkout's package and the extras is used as it is. Otherwise `.venv` in the
# checkout is made and filled once, with the versions of constraints.txt; again only when setup.py or constraints.txt
# changes. Sourcing it twice, or from several shells at the same time, is safe. An installation that was cut off is
# started anew. Afterwards `python` and all commands come from that environment.
#
# Knobs (environment variables):
#   ALMA_EXTRAS   extras of setup.py that must be there            (default: test,report,sample)
#   ALMA_PYTHON   the Python that makes .venv                      (default: the first suitable of python3, python3.12,
#                                                                   python3.11)
#   ALMA_OWN_VENV 1: use .venv even where another environment with the package is active       (default: 0)
#   ALMA_FAIRSEQ  the distribution of fairseq in .venv: fairseq-fixed, as where ve-fairseq has no wheel (default: as
#                 setup.py says for this machine)
# shellcheck shell=bash

: "${ALMA_EXTRAS:=test,report,sample}"
: "${ALMA_PYTHON:=}"
: "${ALMA_OWN_VENV:=0}"
: "${ALMA_FAIRSEQ:=}"

ALMA_CHECKOUT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
ALMA_VENV=$ALMA_CHECKOUT/.venv
ALMA_UNFINISHED=$ALMA_CHECKOUT/.venv.unfinished # there while an installation is under way, or after it was cut off

alma_say() { echo "environment: $*" >&2; }

# Says why nothing can be installed here, where that is known beforehand.
alma_platform_serves() {
  local libc
  if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
    alma_say "this is bash $BASH_VERSION; the recipes need 4.4 or newer (macOS: brew install bash)"
    return 1
  fi
  case $(uname -sm) in
    Linux*)
      libc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || libc="another C library than glibc"
      case $libc in
        "glibc 2."[0-9] | "glibc 2.1"[0-9] | "glibc 2.2"[0-7] | another*)
          alma_say "this system has $libc; PyTorch has packages for glibc 2.28 and newer (a container of a newer system serves)"
          return 1
          ;;
      esac
      ;;
    Darwin\ x86_64)
      alma_say "PyTorch has had no packages for Macs with Intel processors since 2.3, and 2.6 is needed; use Linux, or a container"
      return 1
      ;;
    MINGW* | MSYS* | CYGWIN*)
      alma_say "Windows is not served; use the Windows Subsystem for Linux"
      return 1
      ;;
  esac
}

# True if the active `python` has this very checkout installed, with what the extras ask for. It looks from the root
# folder, because a Python that stands in the checkout finds the package without any installation.
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

# Prints the Python that can make the environment, or says what is missing.
alma_find_python() {
  local candidate without_venv=
  for candidate in ${ALMA_PYTHON:-python3 python3.12 python3.11}; do
    "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null || continue
    if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
      echo "$candidate"
      return 0
    fi
    without_venv=$candidate
  done
  if [ -n "$without_venv" ]; then
    alma_say "$without_venv lacks the module venv or ensurepip; install it (Debian, Ubuntu: apt install python3-venv)"
  else
    alma_say "no CPython 3.11 or 3.12 found as ${ALMA_PYTHON:-python3, python3.12 or python3.11};" \
      "install one, or name it with ALMA_PYTHON=/path/to/python"
  fi
  return 1
}

# What a finished installation is recognised by; the path is part of it because an environment cannot be moved.
alma_fingerprint() {
  echo "$ALMA_VENV"
  { cat "$ALMA_CHECKOUT/setup.py" "$ALMA_CHECKOUT/constraints.txt" && echo "$ALMA_FAIRSEQ"; } | cksum
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

# Makes .venv where there is none, and anew where this script left it unfinished or finished it elsewhere (a moved
# checkout, a Python that is gone). One that somebody made by hand is never removed.
alma_make_venv() {
  local python
  if [ -d "$ALMA_VENV" ] && [ ! -e "$ALMA_UNFINISHED" ]; then
    if [ ! -f "$ALMA_VENV/alma-complete" ]; then
      "$ALMA_VENV/bin/python" -m pip --version >/dev/null 2>&1 && return 0
      alma_say ".venv is there, but is no virtual environment with pip; move it away, then give the same command again"
      return 1
    fi
    [ "$(head -n 1 "$ALMA_VENV/alma-complete")" = "$ALMA_VENV" ] &&
      "$ALMA_VENV/bin/python" -m pip --version >/dev/null 2>&1 && : >"$ALMA_UNFINISHED" && return 0
  fi
  python=$(alma_find_python) || return 1
  : >"$ALMA_UNFINISHED" && "$python" -m venv --clear "$ALMA_VENV"
}

alma_install() {
  local log=$ALMA_VENV/alma-install.log
  alma_make_venv || return 1
  alma_say "installing fairseq-alma[$ALMA_EXTRAS] into .venv (once; it takes minutes and some GB of disk);" \
    "to watch: tail -f .venv/alma-install.log"
  if ! (alma_pip_install </dev/null >"$log" 2>&1); then
    tail -n 15 "$log" >&2
    alma_say "the installation failed; the lines above say why, all of them are in .venv/alma-install.log;" \
      "correct that, then give the same command again"
    return 1
  fi
  { alma_fingerprint && printf 'extra %s\n' ${ALMA_EXTRAS//,/ }; } >"$ALMA_VENV/alma-complete" || return 1
  rm -f "$ALMA_UNFINISHED"
  alma_say "installed"
}

# Installs the package; another distribution of fairseq replaces the one that setup.py names. fairseq depends on torchaudio,
# which nothing here needs: transformers imports it wherever it is installed, and its build fails next to a CPU build of torch.
alma_pip_install() {
  local pip=("$ALMA_VENV/bin/python" -m pip) options=(--disable-pip-version-check --no-input)
  cd "$ALMA_CHECKOUT" && "${pip[@]}" install "${options[@]}" -c constraints.txt -e ".[$ALMA_EXTRAS]" &&
    alma_pip_uninstall torchaudio || return 1
  [ -z "$ALMA_FAIRSEQ" ] ||
    { alma_pip_uninstall ve-fairseq fairseq-fixed &&
      "${pip[@]}" install "${options[@]}" -c constraints.txt "$ALMA_FAIRSEQ" &&
      alma_pip_uninstall torchaudio; }
}

alma_pip_uninstall() { "$ALMA_VENV/bin/python" -m pip uninstall --yes "$@"; }

# Waits for the lock of file descriptor 9, or ends with 1 where it is taken and there is "-n". The lock is that of this
# shell, which has the descriptor, and stays when Python ends; not every system has the command flock.
alma_lock() {
  "$1" -c 'import fcntl, sys; fcntl.flock(9, fcntl.LOCK_EX | (fcntl.LOCK_NB if sys.argv[1:] else 0))' "${@:2}" 2>/dev/null
}

# Installs under a lock; whoever had to wait for another shell finds the work done.
alma_ensure_venv() {
  local python
  alma_venv_is_complete && return 0
  alma_platform_serves && python=$(alma_find_python) || return 1
  {
    alma_lock "$python" -n || { alma_say "another shell is installing into .venv; waiting for it" && alma_lock "$python"; } ||
      return 1
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
