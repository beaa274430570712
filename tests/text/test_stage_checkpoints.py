import pytest
import torch

from fairseq_alma.errors import AlmaError
from fairseq_alma.text import stage_checkpoints as checkpoints
from fairseq_alma.text.stage_checkpoints import Progress
from tests.checkpoints.small import small_checkpoint


def save(path, num_updates=10, epoch=2, tokens=640, **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    extra_state = {"train_iterator": {"epoch": epoch}, "AlmaLMTask": {"train_tokens": tokens}}
    torch.save(small_checkpoint(num_updates, **{"extra_state": extra_state, **more}), path)
    return path


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def test_progress_is_read_from_the_checkpoint(tmp_path):
    path = save(tmp_path / "checkpoint_last.pt", num_updates=10, epoch=3, tokens=640)
    assert checkpoints.read_progress(path) == Progress(num_updates=10, num_epochs=2, train_tokens=640)
    path = save(tmp_path / "checkpoint_last.pt", extra_state={"train_iterator": {"epoch": 1}})
    with pytest.raises(AlmaError, match=r"checkpoint_last.pt: .*expected a token count, found none"):
        checkpoints.read_progress(path)


@pytest.mark.parametrize(
    ("max_update", "max_epoch", "is_over"),
    [(10, None, True), (11, None, False), (None, 2, True), (None, 3, False), (11, 2, True)],
)
def test_either_limit_ends_a_training(max_update, max_epoch, is_over):
    assert Progress(10, 2, 0).has_reached(max_update, max_epoch) is is_over


def test_a_training_resumes_from_a_complete_last_checkpoint(tmp_path):
    last = save(tmp_path / "checkpoint_last.pt", num_updates=10)
    save(tmp_path / "checkpoint_1_5.pt", num_updates=5)
    assert checkpoints.repair_last(tmp_path) == last
    assert checkpoints.read_progress(last).num_updates == 10


@pytest.mark.parametrize("is_truncated", [True, False])
def test_a_damaged_last_checkpoint_is_replaced_by_the_newest_undamaged_one(tmp_path, is_truncated):
    for updates in (5, 9, 10):
        save(tmp_path / f"checkpoint_1_{updates}.pt", num_updates=updates)
    truncate(tmp_path / "checkpoint_1_10.pt")
    last = save(tmp_path / "checkpoint_last.pt")
    if is_truncated:
        truncate(last)
    else:  # like a page that was never written
        content = last.read_bytes()
        middle = len(content) // 2
        last.write_bytes(content[:middle] + bytes(64) + content[middle + 64 :])
        assert checkpoints.is_complete(last)
    assert checkpoints.repair_last(tmp_path) == last
    assert checkpoints.read_progress(last).num_updates == 9
    assert (tmp_path / "checkpoint_1_9.pt").stat().st_ino != last.stat().st_ino


def test_a_stage_without_an_undamaged_checkpoint_starts_again(tmp_path):
    truncate(save(tmp_path / "checkpoint_last.pt"))
    (tmp_path / "checkpoint_last.pt.tmp").write_bytes(b"half")
    assert checkpoints.repair_last(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    assert checkpoints.repair_last(tmp_path / "never made") is None


def test_every_truncation_of_a_checkpoint_is_detected(tmp_path):
    path = save(tmp_path / "checkpoint_last.pt")
    content = path.read_bytes()
    assert checkpoints.is_complete(path)
    for length in range(0, len(content) - 1, 97):
        path.write_bytes(content[:length])
        assert not checkpoints.is_complete(path)


def test_a_checkpoint_with_an_unsupported_zip_version_counts_as_damaged(tmp_path):
    path = save(tmp_path / "checkpoint_last.pt")
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 6] = 240  # the version that is needed to extract the last entry
    path.write_bytes(content)
    assert not checkpoints.is_complete(path) and checkpoints.repair_last(tmp_path) is None


def test_only_the_optimizer_state_is_dropped(tmp_path):
    path = save(tmp_path / "checkpoint_last.pt")
    before, size = torch.load(path, weights_only=True), path.stat().st_size
    for _ in range(2):
        checkpoints.drop_optimizer_state(path)
    after = torch.load(path, weights_only=True)
    assert set(before) - set(after) == {"last_optimizer_state"} and not checkpoints.read_progress(path).has_optimizer
    assert torch.equal(after["model"]["network.layers.0.weight"], before["model"]["network.layers.0.weight"])
    assert path.stat().st_size < size and [entry.name for entry in tmp_path.iterdir()] == ["checkpoint_last.pt"]


def test_checkpoints_are_removed_and_files_of_the_user_stay(tmp_path):
    folder = tmp_path / "member-0"
    for name in ("checkpoint_last.pt", "checkpoint_1_5.pt", "checkpoint_best.pt", "checkpoint_1_9.pt.tmp"):
        save(folder / name)
    checkpoints.remove(folder, ["checkpoint_last.pt"])
    assert [entry.name for entry in folder.iterdir()] == ["checkpoint_last.pt"]
    (folder / "notes.txt").write_text("mine")
    checkpoints.remove(folder)
    assert [entry.name for entry in folder.iterdir()] == ["notes.txt"]
    (folder / "notes.txt").unlink()
    checkpoints.remove(folder)
    assert not folder.exists()
