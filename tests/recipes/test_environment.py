"""``recipes/lib/environment.sh`` installs once, again after changes, and reports missing requirements.

A stand-in replaces Python: it logs the requested installations and needs no network. All other commands are real.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STAND_IN = f"""#!/usr/bin/env bash
case "$*" in
  "-m venv --clear "*) rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; echo "venv" >>"$STAND_IN_LOG" ;;
  "-m pip --version") ;;
  "-m pip uninstall "*) echo "uninstall ${{*: -1}}" >>"$STAND_IN_LOG" ;;
  "-m pip install "*) sleep "${{STAND_IN_SECONDS:-0}}"; echo "install ${{*: -1}}" >>"$STAND_IN_LOG"
    echo "no such package" ; exit "${{STAND_IN_STATUS:-0}}" ;;
  *version_info*) exit "${{STAND_IN_UNSUITABLE:-0}}" ;;
  *ensurepip*) exit "${{STAND_IN_WITHOUT_VENV:-0}}" ;;
  *) exec {sys.executable} "$@" ;;
esac
"""
USE = 'set -euo pipefail; source recipes/lib/environment.sh; echo "$VIRTUAL_ENV"; command -v python'
INSTALLED = ["venv", "install .[test,report,sample]", "uninstall torchaudio"]


class Newcomer:
    """A fresh checkout on a machine that has the stand-in as its only Python."""

    def __init__(self, folder: Path, checkout: Path) -> None:
        self.checkout = folder / "checkout"
        self.log = folder / "log"
        (self.checkout / "recipes" / "lib").mkdir(parents=True)
        shutil.copy(checkout / "recipes" / "lib" / "environment.sh", self.checkout / "recipes" / "lib")
        (self.checkout / "setup.py").write_text("setup()\n")
        (self.checkout / "constraints.txt").write_text("torch==2.13.0\n")
        self.tools = folder / "bin"
        self.tools.mkdir()
        self.put("python3", STAND_IN)

    def put(self, name: str, script: str) -> None:
        (self.tools / name).write_text(script if script.startswith("#!") else f"#!/usr/bin/env bash\n{script}\n")
        (self.tools / name).chmod(0o755)

    def start(self, **environment: str) -> subprocess.Popen:
        variables = {"PATH": f"{self.tools}:/usr/bin:/bin", "HOME": str(Path.home()), "STAND_IN_LOG": str(self.log)}
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": self.checkout}
        return subprocess.Popen(["bash", "-c", USE], env=variables | environment, **how)

    def source(self, **environment: str) -> tuple[int, str, str]:
        out, err = (shell := self.start(**environment)).communicate(timeout=600)
        return shell.returncode, out, err

    def done(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def newcomer(tmp_path: Path, checkout: Path) -> Newcomer:
    return Newcomer(tmp_path, checkout)


def test_a_fresh_checkout_gets_an_environment_of_its_own_and_the_second_run_uses_it(newcomer: Newcomer) -> None:
    venv = newcomer.checkout / ".venv"
    status, out, err = newcomer.source()
    assert (status, out) == (0, f"{venv}\n{venv}/bin/python\n")
    assert "installing fairseq-alma[test,report,sample] into .venv" in err and " MB" in err
    assert newcomer.done() == INSTALLED
    assert newcomer.source() == (0, out, "")
    assert newcomer.done() == INSTALLED


def test_a_changed_requirement_and_a_missing_extra_are_installed_once(newcomer: Newcomer) -> None:
    newcomer.source()
    (newcomer.checkout / "constraints.txt").write_text("torch==2.14.0\n")
    for _ in range(2):
        assert newcomer.source(ALMA_EXTRAS="test,develop")[0] == 0
    assert newcomer.done() == [*INSTALLED, "install .[test,develop]", INSTALLED[2]]


def test_a_failed_installation_shows_why_and_the_next_run_starts_again(newcomer: Newcomer) -> None:
    status, out, err = newcomer.source(STAND_IN_STATUS="1")
    assert (status, out) == (1, "")
    assert "no such package" in err and "run the same command again" in err
    assert newcomer.source()[0] == 0
    assert newcomer.done() == [*INSTALLED[:2], *INSTALLED]


def test_an_installation_that_was_killed_starts_again(newcomer: Newcomer) -> None:
    shell = newcomer.start(STAND_IN_SECONDS="1")
    while "installing" not in shell.stderr.readline():
        pass
    shell.kill()
    shell.communicate()
    assert newcomer.source()[0] == 0
    assert newcomer.done().count("venv") == 2


def test_shells_at_the_same_time_install_once(newcomer: Newcomer) -> None:
    shells = [newcomer.start(STAND_IN_SECONDS="0.3") for _ in range(3)]
    ends = [(shell.communicate(timeout=600)[0], shell.returncode) for shell in shells]
    assert ends == [(ends[0][0], 0)] * 3
    assert newcomer.done() == INSTALLED


def test_a_checkout_that_was_moved_gets_a_new_environment(newcomer: Newcomer) -> None:
    newcomer.source()
    newcomer.checkout = newcomer.checkout.rename(newcomer.checkout.with_name("moved"))
    assert newcomer.source()[1].startswith(f"{newcomer.checkout}/.venv\n")
    assert newcomer.done() == [*INSTALLED, *INSTALLED]


def test_a_link_to_the_environment_of_another_checkout_is_refused_and_not_emptied(newcomer: Newcomer) -> None:
    newcomer.source()
    other = (newcomer.checkout / ".venv").rename(newcomer.checkout.with_name("other"))
    (newcomer.checkout / ".venv").symlink_to(other)
    (other / "alma-complete").write_text("/another/checkout/.venv\n")
    status, _, err = newcomer.source()
    assert status == 1 and "remove the link" in err
    assert (other / "bin" / "python").exists() and newcomer.done() == INSTALLED


def test_an_environment_made_by_hand_is_filled_and_a_folder_that_is_none_is_refused(newcomer: Newcomer) -> None:
    venv = newcomer.checkout / ".venv"
    venv.mkdir()
    (venv / "mine").touch()
    status, _, err = newcomer.source()
    assert status == 1 and "move this folder away" in err
    (venv / "bin").mkdir()
    shutil.copy(newcomer.tools / "python3", venv / "bin" / "python")
    assert newcomer.source()[0] == 0
    assert newcomer.done() == INSTALLED[1:] and (venv / "mine").exists()
    (newcomer.checkout / "constraints.txt").write_text("torch==2.14.0\n")
    assert [newcomer.source(STAND_IN_STATUS=status)[0] for status in "10"] == [1, 0]
    assert "venv" not in newcomer.done() and (venv / "mine").exists()


@pytest.mark.parametrize(
    ("requirement", "knobs", "done"),
    [
        ("pytest>=8; extra == 'test'", {}, []),
        ("no-such-thing>=8; extra == 'develop'", {}, []),
        ("no-such-thing>=8; extra == 'test'", {}, INSTALLED),
        ("pytest>=8; extra == 'test'", {"ALMA_OWN_VENV": "1"}, INSTALLED),
    ],
)
def test_an_active_environment_serves_if_it_has_this_checkout_and_the_extras(
    newcomer: Newcomer, requirement: str, knobs: dict[str, str], done: list[str]
) -> None:
    shutil.copy(newcomer.tools / "python3", newcomer.tools / "python")
    (newcomer.checkout / "fairseq_alma").mkdir()
    (newcomer.checkout / "fairseq_alma" / "__init__.py").touch()
    metadata = newcomer.checkout / "fairseq_alma-0.1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.4\nName: fairseq-alma\nVersion: 0.1.0\nRequires-Dist: {requirement}\n")
    status, _, err = newcomer.source(PYTHONPATH=str(newcomer.checkout), VIRTUAL_ENV="active", **knobs)
    assert (status, newcomer.done()) == (0, done), err


def test_a_machine_without_a_suitable_python_gets_one_line(newcomer: Newcomer) -> None:
    unsuitable, without_venv = "no CPython 3.11 or 3.12 found as python3", "lacks the module venv"
    for fault, message in {"STAND_IN_UNSUITABLE": unsuitable, "STAND_IN_WITHOUT_VENV": without_venv}.items():
        status, _, err = newcomer.source(**{fault: "1", "ALMA_PYTHON": "python3"})
        assert (status, newcomer.done()) == (1, []) and message in err and err.count("\n") == 1
