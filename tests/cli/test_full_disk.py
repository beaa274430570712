"""A full disk ends a command with one line and no partial file; the same command then resumes."""

import errno
import os
from pathlib import Path

import pytest

from fairseq_alma import files
from fairseq_alma.cli.stream import main as alma_stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.images import stage_trainer
from tests.images.image_streams import make_stream
from tests.runs.results import stage_records, weight_sums

WORDS = ["--", "--width", "6", "--max-epoch", "3", "--cpu"]


def fill_disk(monkeypatch: pytest.MonkeyPatch, name: str, num_bytes: int) -> None:
    """Raise ENOSPC after a number of bytes in files of one name."""

    def open_limited(descriptor: int, *mode, **how):
        file = open(descriptor, *mode, **how)  # noqa: SIM115
        write, taken = file.write, [0]

        def write_limited(content) -> int:
            taken[0] += len(content)
            if taken[0] > num_bytes:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(content)

        if os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")) == f".{name}.tmp":
            file.write = write_limited
        return file

    monkeypatch.setattr(files, "open", open_limited, raising=False)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def refused(main, arguments: list[str]) -> str:
    """Return the line with which a command fails."""
    with pytest.raises(AlmaError) as error:
        main(arguments)
    assert "\n" not in str(error.value)
    assert "the disk is full; free some space" in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> Path:
    return make_stream(tmp_path_factory.mktemp("images") / "S", num_megabatches=2, num_train=60)


@pytest.fixture(scope="module")
def whole(stream: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "R"
    assert alma_stream(["--stream", str(stream), "--run", str(folder), *WORDS]) == 0
    return folder


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("run.json", 0),
        ("clock.json", 0),
        ("training.pt", 5_000),
        ("checkpoint_last.pt", 0),
        ("checkpoint_last.pt", 5_000),
        ("stage.json", 0),
    ],
)
def test_an_image_run_resumes_after_a_full_disk(name, num_bytes, whole, stream, tmp_path, monkeypatch):
    monkeypatch.setattr(stage_trainer, "SAVE_EVERY_SECONDS", 0.0)
    command = ["--stream", str(stream), "--run", str(tmp_path / "R"), *WORDS]
    with monkeypatch.context() as full:
        fill_disk(full, name, num_bytes)
        assert Path(refused(alma_stream, command).partition(": ")[0]).name == name
    assert not [left for left in names(tmp_path) if ".tmp" in left]
    assert alma_stream(command) == 0
    assert stage_records(tmp_path / "R") == stage_records(whole)
    assert weight_sums(tmp_path / "R") == weight_sums(whole)
    assert names(tmp_path / "R") == names(whole)
