import pytest

from fairseq_alma.runs.tensorboard_files import EVENTS, rewind_curves
from tests.runs.curves import Curves

tensorboard = pytest.importorskip("torch.utils.tensorboard")


def write(folder, number, steps):
    """Write a curve as fairseq does, into the event file of this number: the order in which TensorBoard reads."""
    before = set(folder.glob(EVENTS))
    writer = tensorboard.SummaryWriter(str(folder))
    for step in steps:
        writer.add_scalar("loss", 100 * number + step, step)
    writer.close()
    name_new_files(folder, before, number)


def name_new_files(folder, before, number):
    for i, new in enumerate(sorted(set(folder.glob(EVENTS)) - before)):
        new.rename(folder / f"events.out.tfevents.{number + i:010d}.test")


def test_a_training_that_goes_on_draws_no_update_twice(tmp_path):
    folder = tmp_path / "train_inner"
    write(folder, 1, range(1, 9))
    curves = Curves(folder)
    assert len(curves.steps("loss")) == 8
    before = set(folder.glob(EVENTS))
    rewind_curves(tmp_path, num_updates=6)
    name_new_files(folder, before, 2)
    write(folder, 9, range(7, 10))
    expected = [101, 102, 103, 104, 105, 106, 907, 908, 909]
    assert [value for _, value, _ in curves.read("loss")] == expected
    assert [value for _, value, _ in Curves(folder).read("loss")] == expected


def test_a_training_that_begins_anew_loses_its_old_curves(tmp_path):
    write(tmp_path / "train_inner", 1, range(3))
    rewind_curves(tmp_path, num_updates=0)
    assert not list(tmp_path.rglob(EVENTS))


def test_a_training_without_curves_is_left_alone(tmp_path):
    rewind_curves(tmp_path / "nowhere", num_updates=6)
    assert not list(tmp_path.iterdir())
