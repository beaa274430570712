import os

import pytest
import torch

from fairseq_alma.checkpoints import UnfitCheckpoint
from fairseq_alma.checkpoints.checkpoint_file import load_archive, write_checkpoint


def test_a_checkpoint_appears_only_when_it_is_complete(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError):
        write_checkpoint({}, tmp_path / "a.pt")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def replaced(tmp_path, monkeypatch):
    """A file, and what lets another, shorter one take its place between torch's two looks at it, so many times."""
    path, mapped = tmp_path / "a.pt", torch.UntypedStorage.from_file
    torch.save({"moments": torch.ones(5000), "model": torch.arange(1000.0)}, path)

    def replace(times):
        left = iter(range(times))

        def replace_and_map(*arguments):
            if next(left, None) is not None:
                torch.save({"model": torch.arange(1000.0)}, tmp_path / "b.pt")
                os.replace(tmp_path / "b.pt", path)
            return mapped(*arguments)

        monkeypatch.setattr(torch.UntypedStorage, "from_file", replace_and_map)
        return path

    return replace


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(replaced):
    loaded = load_archive(replaced(times=1), mmap=True)
    assert list(loaded) == ["model"] and torch.equal(loaded["model"], torch.arange(1000.0))


def test_one_that_is_replaced_each_time_is_named(replaced):
    with pytest.raises(UnfitCheckpoint, match="again and again"):
        load_archive(replaced(times=100), mmap=True)
