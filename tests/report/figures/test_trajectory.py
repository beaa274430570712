import pytest

from fairseq_alma.report.figures.run_groups import groups_of
from fairseq_alma.report.figures.trajectory import Point, trajectory


def test_a_trajectory_has_what_a_learner_had_cost_by_each_arrival(make):
    run = make("a", [30, 20], wait=2, num_params=[100, 300], num_experts=[4, 6], num_members=[2], train_flops=1e12)
    assert trajectory(groups_of([run])[0]) == [
        Point(1, (50 + 30) / 2, 4, 100, 8),  # the stream has 50 units; 2 mega-batches times 2 members
        Point(2, (50 + 30 + 30) / 3, 4, 100, 8),
        Point(3, (50 + 30 + 30 + 20) / 4, 8, 300, 12),
    ]


def test_its_end_is_the_average_perplexity(make):
    run = make("a", [30, 20, 10, 6])
    assert trajectory(groups_of([run])[0])[-1].average == run.anytime


def test_points_are_means_over_seeds(make):
    runs = [make("a", [30, 20, 10, 6]), make("b", [40, 20, 10, 6], seed=2)]
    assert [point.average for point in trajectory(groups_of(runs)[0])] == pytest.approx([35, 27.5, 65 / 3, 17.75])
