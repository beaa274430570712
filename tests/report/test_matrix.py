import math

import numpy
import pytest

from fairseq_alma.metrics import mean_over_cost
from fairseq_alma.report.tables import forgotten, memorised
from tests.report.fakes import text_stream, write_run
from tests.report.test_tables import tables, texts

HELD_OUT = [[5.0, 5.5, 6.0], [4.8, 4.6, 5.2], [4.6, 4.5, 4.2]]
TRAINING = [[3.0, 5.6, 6.1], [4.0, 3.5, 5.0], [4.4, 4.2, 3.0]]


def write(root, seed=1, shift=0.0):
    extras = [
        {"matrix": {"held_out": own, "training": [loss - shift for loss in other]}}
        for own, other in zip(HELD_OUT, TRAINING, strict=True)
    ]
    return write_run(root, stream=text_stream(3), seed=seed, stage_extras=extras)


def test_what_is_memorised_and_forgotten_is_told_by_arrival_with_intervals_over_seeds(tmp_path):
    found = tables([write(tmp_path / "a"), write(tmp_path / "b", seed=2, shift=0.1)])["matrix"]
    assert found.header[-5:] == ["m0", "m1", "m2", "memorised", "forgotten"]
    rows = {(row[-7], row[-6]): row for row in texts(found)}
    nats = math.log(2)
    assert rows["held-out", "t1"][-5:-2] == [f"{nats * loss:.4f}" for loss in HELD_OUT[1]]
    assert rows["training", "t2"][-5] == f"{nats * (4.4 - 0.05):.4f}"
    # After t1: held-out minus training of the two that have arrived, 0.8 and 1.1, and 0.1 more with the other seed.
    assert rows["training", "t1"][-2] == f"{nats * 1.0:+.4f} ± {nats * 0.1 / 2 * 12.706:.4f}"
    assert rows["training", "t2"][-1] == f"{nats * (1.4 + 0.7) / 2:+.4f} ± 0.0000"
    assert rows["training", "t0"][-1] == "–" and rows["held-out", "t0"][-2] == "–"


def test_of_a_stage_that_gathers_several_mega_batches_none_is_forgotten_yet():
    matrix = {1: [3.0, 3.0, 5.0], 2: [3.5, 4.0, 4.0]}
    assert forgotten(matrix, 1) is None and forgotten(matrix, 2) == pytest.approx(0.75)


def test_runs_without_such_losses_have_no_table_and_no_figure(tmp_path):
    assert "matrix" not in tables([write_run(tmp_path / "R", stream=text_stream(3))])


def test_the_area_under_a_curve_is_that_of_its_trapezoids_over_the_cost_after_the_first_update():
    assert mean_over_cost({0: 4.0, 1: 2.0, 3: 1.0}, {0: 5.0, 1: 1.0, 3: 3.0}) == pytest.approx((3.0 + 4.5) / 4)
    assert mean_over_cost({2: 4.0}, {2: 1.0}) is None


def test_memorised_is_a_mean_over_what_has_arrived():
    matrix = {"held_out": {1: numpy.array([3.0, 4.0, 9.0])}, "training": {1: numpy.array([2.0, 4.0, 1.0])}}
    assert memorised(matrix, 1) == 0.5
