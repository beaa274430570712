import math

import pytest

from fairseq_alma.report.figures.run_groups import by_size, complete_groups, groups_of, names_of
from tests.report.fakes import image_stream


def test_runs_that_differ_by_their_seeds_alone_are_drawn_as_their_mean(make):
    runs = [make("a", [30, 20, 10, 6]), make("b", [34, 22, 12, 8], seed=2), make("c", learner="ens")]
    group, other = groups_of(runs)
    assert (group.curve, other.first.learner) == ([32, 21, 11, 7], "ens")
    assert group.deviations == pytest.approx([math.sqrt(8), math.sqrt(2), math.sqrt(2), math.sqrt(2)])


def test_a_seed_that_is_behind_does_not_count_towards_the_mean(make):
    (group,) = groups_of([make("a", [30, 20, 10, 6]), make("b", [90, 80], seed=2)])
    assert group.curve == [30, 20, 10, 6]
    assert group.is_complete


def test_errors_are_shown_in_percent(make):
    (group,) = groups_of([make("a", [0.5, 0.25], stream=image_stream(4), wait=2)])
    assert group.curve == [90, 50, 50, 25]
    assert group.updates == [1, 3]


def test_a_run_that_diverged_has_no_deviation_rather_than_a_traceback(make):
    (group,) = groups_of([make("a", [math.inf, 20, 10, 6]), make("b", [30, 20, 10, 6], seed=2)])
    assert group.deviations[0] == 0
    assert group.curve[0] == math.inf


def test_runs_without_a_first_update_are_left_out(make):
    assert groups_of([make("a", num_stages=0), make("b", [], wait=4)]) == []


def test_the_iid_control_and_unfinished_runs_do_not_count_as_complete(make):
    runs = [make("a", [20.0], iid=3, learner="ens"), make("b", [30, 20]), make("c", learner="umix")]
    assert [group.first.learner for group in complete_groups(runs)] == ["umix"]


def test_sizes_are_sorted_by_their_parameters(make):
    runs = [
        make(f"w{width}", train_options={"--arch": "alma_mlp", "--width": str(width)}, num_params=[width * 100])
        for width in (64, 8, 16)
    ]
    assert list(by_size(groups_of(runs))) == ["mlp, width 8", "mlp, width 16", "mlp, width 64"]


def test_names_are_as_short_as_tells_groups_apart(make):
    def experts(number):
        return make(f"{number}", num_experts=[number], train_options={"--num-experts": f"{number}"})

    runs = [experts(4), experts(8), make("c", wait=2), make("d", iid=3)]
    assert names_of(groups_of(runs)) == ["SM_w1, 4 experts", "SM_w1, 8 experts", "SM_w2", "SM iid k3"]
