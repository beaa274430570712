import pytest
import torch

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint, write_checkpoint
from fairseq_alma.errors import AlmaError


def test_a_checkpoint_appears_only_when_it_is_complete(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError):
        write_checkpoint({}, tmp_path / "a.pt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 half an archive"])
def test_what_is_no_checkpoint_is_named_in_one_line(tmp_path, content):
    path = tmp_path / "bad.pt"
    path.write_bytes(content)
    with pytest.raises(AlmaError, match=r"bad\.pt"):
        read_checkpoint(path)


def test_a_saved_tensor_that_is_no_checkpoint_is_named(tmp_path):
    torch.save({"weights": torch.zeros(3)}, tmp_path / "other.pt")
    with pytest.raises(AlmaError, match="lacks 'model' or 'cfg'"):
        read_checkpoint(tmp_path / "other.pt")


def test_a_truncated_checkpoint_is_named(tmp_path):
    torch.save({"model": {"a": torch.zeros(1000)}, "cfg": {"model": {}}}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(AlmaError, match="truncated"):
        read_checkpoint(tmp_path / "cut.pt")
