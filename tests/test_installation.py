"""What pip installs: a wheel with all modules and commands, and pins for everything that it asks for."""

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fairseq_alma

PACKAGES = ("fairseq_alma", "data_prep")
HELP = """
import importlib.metadata, sys
command = importlib.metadata.entry_points(group="console_scripts", name="{name}")["{name}"].load()
try:
    status = command(["--help"])
except SystemExit as end:
    status = end.code
assert not status, status
print("loaded:", *sorted({{"fairseq", "torch"}} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel, built from a copy of the checkout so that nothing is left in it."""
    source = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(checkout / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in checkout.iterdir():
        if path.name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(path, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist"]
    built = subprocess.run([*pip, "."], cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return zipfile.ZipFile(next((source / "dist").glob("fairseq_alma-*.whl")))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(wheel.read(f"fairseq_alma-{fairseq_alma.__version__}.dist-info/METADATA").decode())


@pytest.fixture(scope="module")
def pins(checkout: Path) -> dict[str, str]:
    """Version by normalised name, as constraints.txt has them."""
    lines = (checkout / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_wheel_has_every_file_of_the_packages(wheel: zipfile.ZipFile, checkout: Path) -> None:
    files = {
        path.relative_to(checkout).as_posix()
        for package in PACKAGES
        for path in (checkout / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files - set(wheel.namelist()) == set()


def test_the_package_and_its_installation_have_one_version(metadata: Message) -> None:
    assert metadata["Version"] == importlib.metadata.version("fairseq-alma") == fairseq_alma.__version__


def test_every_requirement_has_a_pin_that_satisfies_it(metadata: Message, pins: dict[str, str]) -> None:
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    extras = metadata.get_all("Provides-Extra")
    needed = [
        requirement
        for requirement in requirements
        for python in ("3.11", "3.12")
        if requirement.marker is None
        or any(requirement.marker.evaluate({"python_version": python, "extra": extra}) for extra in ["", *extras])
    ]
    assert {"ve-fairseq", "torch", "pytest"} <= {requirement.name for requirement in needed}
    for requirement in needed:
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize("name", ["alma-prep-text", "alma-prep-images", "alma-stream", "alma-report"])
def test_a_light_command_prints_its_help_without_what_takes_seconds_to_import(name: str, tmp_path: Path) -> None:
    code = HELP.format(name=name)
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-1000:]
    assert ended.stdout.startswith("usage: ") and ended.stdout.splitlines()[-1] == "loaded:"
