import json
import math
from types import SimpleNamespace

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.report.read_run import read_run
from tests.report.fakes import image_stream, table_of, text_stream, write_run


def read_figures(root, complain=None):
    """A run's facts, and for each column of its arrivals the figures that are there, by arrival."""
    facts, rows = read_run(root, complain)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: {row["arrival"]: row[name] for row in rows if name in row} for name in names}
    return SimpleNamespace(**{**facts, **columns})


def test_a_run_of_images_is_read(tmp_path):
    options = {"--arch": "alma_moe_mlp", "--width": "64"}
    run = read_figures(
        write_run(
            tmp_path / "R", [0.5, 0.25, 0.125], "gmoe", image_stream(6), num_experts=(2, 3, 4), wait=2,
            train_options=options, stage_extras=[{"expert_usage": [1]}, {}, {"expert_usage": [3]}],
        )
    )  # fmt: skip
    assert (run.label, run.kind, run.backbone, run.untrained) == ("gMoE_w2", "images", "mlp, width 64", 0.9)
    assert run.value == {1: 0.5, 3: 0.25, 5: 0.125}
    assert list(run.curve.values()) == [90, 50, 50, 25, 25, 12.5]
    assert run.anytime == pytest.approx(100 * (0.9 + 0.5 + 0.5 + 0.25 + 0.25 + 0.125))
    assert run.memory == 6000
    assert run.before_growth == {3: pytest.approx(0.3), 5: pytest.approx(0.15)}
    assert run.after_growth == {3: 0.3125, 5: 0.15625}
    assert run.growth_jump[3] == pytest.approx(math.log(0.7 / 0.6875))
    assert run.expert_usage == {1: [1], 5: [3]}


def test_text_takes_what_was_before_growth_from_the_stage_before(tmp_path):
    run = read_figures(write_run(tmp_path / "R", [40.0, 30.0], "gmoe", text_stream(2), num_experts=(4, 6)))
    assert run.before_growth == {1: 42.0}
    assert run.after_growth == {1: 37.5}
    assert run.growth_jump == {1: pytest.approx(math.log(37.5 / 42.0))}
    assert run.anytime == 35.0


def test_an_unfinished_run_has_a_curve_as_far_as_it_is_known_and_no_sums(tmp_path):
    run = read_figures(write_run(tmp_path / "R", [40.0], stream=text_stream(6), wait=2))
    assert list(run.curve.values()) == [50.0, 40.0, 40.0]
    assert (run.is_complete, run.final) == (False, 40.0)
    assert math.isnan(run.anytime) and math.isnan(run.memory)


def test_the_iid_control_learns_from_no_stream(tmp_path):
    run = read_figures(write_run(tmp_path / "R", [40.0], "ens", iid=3))
    assert (run.label, run.is_complete) == ("Ens iid k3", True)
    assert math.isnan(run.anytime) and math.isnan(run.memory)


def test_a_damaged_stage_is_named_and_the_others_are_read(tmp_path):
    root = write_run(tmp_path / "R", [40.0, 30.0, 25.0, 22.0])
    (root / "stage-001" / "stage.json").write_text('{"stage": 1')
    (root / "stage-002" / "stage.json").write_text('{"stage": 2, "megabatches": ["x"]}')
    faults = []
    run = read_figures(root, faults.append)
    assert run.value == {0: 40.0, 3: 22.0}
    assert not run.is_complete
    assert "stage-001/stage.json: damaged, not JSON" in str(faults[0])
    assert "stage-002/stage.json: damaged, no num_params" in str(faults[1])
    with pytest.raises(AlmaError, match="stage-001"):
        read_figures(root)


def test_a_stage_of_images_in_a_run_on_text_is_named(tmp_path):
    root, images = write_run(tmp_path / "R"), write_run(tmp_path / "I", stream=image_stream(4))
    (root / "stage-001" / "stage.json").write_bytes((images / "stage-001" / "stage.json").read_bytes())
    with pytest.raises(AlmaError, match=r"R/stage-001/stage.json: damaged, no test_flops_per_token in it; remove"):
        read_figures(root)


def test_the_table_has_a_row_for_each_run_and_arrival(tmp_path):
    roots = [
        write_run(tmp_path / "A", [40.0, 30.0], wait=2, num_params=(1000, 3000)),
        write_run(tmp_path / "B", [45.0], learner="ens", num_members=(2,), num_experts=(4,)),
    ]
    table = table_of(roots)
    assert list(table.facts.label) == ["SM_w2", "Ens_w1"]
    arrivals = table.arrivals
    assert list(zip(arrivals.run, arrivals.arrival, strict=True)) == [(run, t) for run in (0, 1) for t in range(4)]
    assert list(arrivals.done) == [False, True, False, True, True, False, False, False]
    assert list(arrivals.planned) == [False, True, False, True, True, True, True, True]
    assert list(arrivals.average)[:5] == [50, 45, (50 + 40 + 40) / 3, 40, 45]
    assert arrivals.average[5:].isna().all()
    assert list(arrivals.params)[1:5] == [1000, 1000, 3000, 1000]
    assert list(arrivals.tflops)[:5] == [0, 2, 2, 4, 2]
    assert list(arrivals.experts)[4:] == [8, 8, 8, 8]


def test_nothing_that_acts_on_a_terminal_is_kept_of_a_name(tmp_path):
    stream = {**text_stream(), "path": "streams/\x1b[2Jtext"}
    options = {"--arch": "alma\n_switch\u202e_lm"}
    run = read_figures(write_run(tmp_path / "R\x1b]0;x\x07", stream=stream, train_options=options))
    assert run.shown_path == f"{tmp_path}/R\\x1b]0;x\\x07"
    assert run.stream["path"] == "streams/\\x1b[2Jtext"
    assert run.train_options == {"--arch": "alma\\n_switch\\u202e_lm"}


@pytest.mark.parametrize(
    "change", [{"options": {}}, {"stream": {"kind": "images"}}, {"seed": None, "stream": None}, {"train_options": 3}]
)
def test_a_damaged_run_record_is_named(change, tmp_path):
    root = write_run(tmp_path / "R", num_stages=0)
    record = json.loads((root / "run.json").read_text())
    (root / "run.json").write_text(json.dumps({**record, **change}))
    with pytest.raises(AlmaError, match=r"R/run\.json: damaged"):
        read_figures(root)


def test_a_kind_of_data_that_is_not_known_is_named(tmp_path):
    with pytest.raises(AlmaError, match=r"R/run\.json: a run on 'sound'; .* text and images"):
        read_figures(write_run(tmp_path / "R", stream={**text_stream(), "kind": "sound"}))


@pytest.mark.parametrize(
    "train_options,size",
    [
        ({"--arch": "alma_switch_lm_base"}, "base"),
        ({"--arch": "alma_switch_lm", "--decoder-layers": "2", "--decoder-embed-dim": "64"}, "2 layers, width 64"),
        ({"--arch": "alma_vgg", "--channels": "8"}, "vgg, 8 channels"),
        ({"--arch": "alma_moe_vgg", "--channels": "8"}, "vgg, 8 channels"),
        ({}, ""),
    ],
)
def test_the_size_of_the_backbone_is_spelled_the_same_for_all_learners(train_options, size, tmp_path):
    assert read_figures(write_run(tmp_path / "R", train_options=train_options)).backbone == size


def test_many_sizes_of_a_growing_learner_are_shortened(tmp_path):
    run = read_figures(write_run(tmp_path / "E", learner="gens", stream=image_stream(), num_experts=(1,),
                                 num_members=range(1, 11)))  # fmt: skip
    assert run.experts == "1 to 10 models"
    run = read_figures(write_run(tmp_path / "T", learner="gens", stream=text_stream(), num_members=(1, 2, 3, 4)))
    assert run.experts == "4@1, 4@2, 4@3, 4@4"
