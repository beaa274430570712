import math

import pytest

from fairseq_alma.report import experiment as experiment_module
from fairseq_alma.report.experiment import begun, by_size, completed, names_of, sizes_in_order
from fairseq_alma.report.read_run import RunTable, read_run
from tests.report.fakes import image_stream, write_run


def read(root, *args, **options):
    return read_run(write_run(root, *args, **options))


def experiments(runs):
    return experiment_module.experiments(RunTable.of(runs))


def groups_of(runs):
    return begun(RunTable.of(runs))


@pytest.fixture
def make(tmp_path):
    return lambda name, *values, **options: read(tmp_path / name, *values, **options)


def test_runs_that_differ_by_their_seeds_alone_are_one_experiment(tmp_path):
    runs = [read(tmp_path / f"R{seed}", [30.0 + seed] * 4, seed=seed) for seed in (1, 2, 3)]
    (experiment,) = experiments([*runs, read(tmp_path / "again", [40.0], seed=1)])
    assert len(experiment.runs) == 3  # a second run with the same seed is no further evidence
    assert experiment.spread("final").show(2) == "32.00 ± 1.00"
    assert experiment.at(1).mean == 32.0


def test_where_a_run_went_on_and_how_a_number_is_written_make_no_other_experiment(tmp_path):
    options = [{"--lr": "0.01", "--num-workers": "0", "--cpu": ""}, {"--lr": "1e-2", "--num-workers": "2"}]
    runs = [read(tmp_path / f"R{seed}", seed=seed, train_options=words) for seed, words in enumerate(options)]
    (experiment,) = experiments(runs)
    assert len(experiment.runs) == 2


def test_a_multiple_of_the_updates_is_spelled_as_in_table_2(tmp_path):
    steps = {"--arch": "alma_switch_lm", "--max-update": "100"}
    runs = [
        read(tmp_path / "w1", train_options=steps),
        read(tmp_path / "w4", wait=4, train_options=steps),
        read(tmp_path / "w4-x4", wait=4, train_options={**steps, "--max-update": "400"}),
    ]
    assert [experiment.label for experiment in experiments(runs)] == ["SM_w1", "SM_w4", "SM_w4 (4x steps)"]


def test_experiments_of_the_same_name_are_told_apart_by_their_options(tmp_path):
    arch = {"--arch": "alma_switch_lm"}
    runs = [
        read(tmp_path / "A", train_options={**arch, "--lr": "0.1"}),
        read(tmp_path / "B", train_options={**arch, "--lr": "0.2"}),
        read(tmp_path / "C", num_experts=(8,), train_options={**arch, "--num-experts": "8"}),
    ]
    assert [experiment.name for experiment in experiments(runs)] == [
        "SM_w1, 4 experts, --lr 0.1", "SM_w1, 4 experts, --lr 0.2", "SM_w1, 8 experts",
    ]  # fmt: skip


def test_the_size_is_named_where_experiments_differ_in_it(tmp_path):
    def run(name, width, params, **options):
        arch = {"--arch": "alma_mlp", "--width": width}
        return read(tmp_path / name, stream=image_stream(), num_params=(params,), num_experts=(1,),
                    train_options=arch, **options)  # fmt: skip

    large, small = run("L", "64", 9000), run("S", "4", 100)
    ensemble = run("E", "4", 20000, learner="ens", num_members=(5,))
    assert [each.name for each in experiments([large, small, ensemble])] == [
        "SM_w1, mlp, width 4", "Ens_w1, 5 models, mlp, width 4", "SM_w1, mlp, width 64",
    ]  # fmt: skip
    assert [each.name for each in experiments([large])] == ["SM_w1"]
    assert sizes_in_order(RunTable.of([large, small, ensemble]).facts) == ["mlp, width 4", "mlp, width 64"]


def test_a_size_of_which_nothing_is_known_yet_has_its_place(tmp_path):
    waiting = read(tmp_path / "W", [], train_options={"--arch": "alma_switch_lm_large"})
    assert [each.name for each in experiments([waiting])] == ["SM_w1"]


@pytest.mark.parametrize("seeds", [(1, 2), (2, 1)])
def test_orders_of_the_same_images_are_seeds_of_one_experiment(seeds, tmp_path):
    runs = [read(tmp_path / f"R{seed}", stream=image_stream(seed=seed)) for seed in seeds]
    (experiment,) = experiments(runs)
    assert experiment.spread("final").num_seeds == 2


def test_runs_that_differ_by_their_seeds_alone_are_drawn_as_their_mean(make):
    runs = [make("a", [30, 20, 10, 6]), make("b", [34, 22, 12, 8], seed=2), make("c", learner="ens")]
    group, other = groups_of(runs)
    assert (list(group.course.curve), other.first.learner) == ([32, 21, 11, 7], "ens")
    assert list(group.course.deviation) == pytest.approx([math.sqrt(8), math.sqrt(2), math.sqrt(2), math.sqrt(2)])


def test_a_seed_that_is_behind_does_not_count_towards_the_mean(make):
    (group,) = groups_of([make("a", [30, 20, 10, 6]), make("b", [90, 80], seed=2)])
    assert list(group.course.curve) == [30, 20, 10, 6]
    assert len(group.complete) == 1


def test_a_run_that_diverged_has_no_deviation_rather_than_a_traceback(make):
    (group,) = groups_of([make("a", [math.inf, 20, 10, 6]), make("b", [30, 20, 10, 6], seed=2)])
    assert group.course.deviation[0] == 0
    assert group.course.curve[0] == math.inf


def test_runs_without_a_first_update_are_left_out(make):
    assert groups_of([make("a", num_stages=0), make("b", [], wait=4)]) == []


def test_the_iid_control_and_unfinished_runs_do_not_count_as_complete(make):
    runs = [make("a", [20.0], iid=3, learner="ens"), make("b", [30, 20]), make("c", learner="umix")]
    assert [group.first.learner for group in completed(groups_of(runs))] == ["umix"]


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
