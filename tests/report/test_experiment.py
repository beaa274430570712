import pytest

from fairseq_alma.report.experiment import experiments
from fairseq_alma.report.read_run import read_figures
from fairseq_alma.report.sizes import sizes_in_order
from tests.report.fakes import image_stream, write_run


def read(root, *args, **options):
    return read_figures(write_run(root, *args, **options))


def test_runs_that_differ_by_their_seeds_alone_are_one_experiment(tmp_path):
    runs = [read(tmp_path / f"R{seed}", [30.0 + seed] * 4, seed=seed) for seed in (1, 2, 3)]
    (experiment,) = experiments([*runs, read(tmp_path / "again", [40.0], seed=1)])
    assert len(experiment.runs) == 3  # a second run with the same seed is no further evidence
    assert experiment.spread(lambda run: run.final).show(2) == "32.00 ± 1.00"
    assert experiment.at(1).mean == 32.0


def test_runs_under_way_do_not_count_for_means(tmp_path):
    runs = [read(tmp_path / "A", [30.0] * 4), read(tmp_path / "B", [90.0], seed=2)]
    (experiment,) = experiments(runs)
    assert experiment.spread(lambda run: run.final).mean == 30.0


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
    assert sizes_in_order([large, small, ensemble]) == ["mlp, width 4", "mlp, width 64"]


def test_a_size_of_which_nothing_is_known_yet_has_its_place(tmp_path):
    waiting = read(tmp_path / "W", [], train_options={"--arch": "alma_switch_lm_large"})
    assert [each.name for each in experiments([waiting])] == ["SM_w1"]


@pytest.mark.parametrize("seeds", [(1, 2), (2, 1)])
def test_orders_of_the_same_images_are_seeds_of_one_experiment(seeds, tmp_path):
    runs = [read(tmp_path / f"R{seed}", stream=image_stream(seed=seed)) for seed in seeds]
    (experiment,) = experiments(runs)
    assert experiment.spread(lambda run: run.final).num_seeds == 2
