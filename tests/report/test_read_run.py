import json
import math

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.report.read_run import load_run
from tests.report.fakes import image_stream, text_stream, write_run


def test_a_run_of_images_has_a_row_for_each_arrival(tmp_path):
    options = {"num_experts": (2, 3, 4), "wait": 2, "train_options": {"--arch": "alma_moe_mlp", "--width": "64"}}
    run = load_run(write_run(tmp_path / "R", [0.5, 0.25, 0.125], "gmoe", image_stream(6), **options))
    assert (run.label, run.size, run.experts) == ("gMoE_w2", "mlp, width 64", "2, 3, 4")
    assert list(run.arrivals.planned) == list(run.arrivals.done) == [False, True] * 3
    assert list(run.done.value) == [0.5, 0.25, 0.125]
    assert list(run.arrivals.curve) == [90, 50, 50, 25, 25, 12.5]
    assert run.over_stream == pytest.approx(100 * (0.9 + 0.5 + 0.5 + 0.25 + 0.25 + 0.125))
    assert run.memory == 6000
    assert list(run.done.before_growth)[1:] == [pytest.approx(0.3), pytest.approx(0.15)]
    assert list(run.done.after_growth)[1:] == [0.3125, 0.15625]


def test_a_run_on_text_sums_cost_and_takes_the_value_before_growth_from_the_stage_before(tmp_path):
    run = load_run(write_run(tmp_path / "R", [40.0, 30.0], "gmoe", text_stream(2), num_experts=(4, 6)))
    assert (run.done.before_growth[1], run.done.after_growth[1]) == (42.0, 37.5)
    assert (run.over_stream, run.final) == (35.0, 30.0)
    assert list(run.arrivals.average) == [40, 35] and list(run.arrivals.tflops) == [1, 2]
    assert run.bits_per_byte == pytest.approx(math.log2(30) / 4)  # 100 tokens of 400 bytes


def test_an_incomplete_run_has_a_curve_as_far_as_it_is_known_and_no_sums(tmp_path):
    run = load_run(write_run(tmp_path / "R", [40.0], stream=text_stream(6), wait=2))
    assert list(run.arrivals.curve.dropna()) == [50.0, 40.0, 40.0]
    assert (run.is_complete, run.final) == (False, 40.0)
    assert math.isnan(run.over_stream) and math.isnan(run.memory)


def test_the_iid_control_learns_from_no_stream(tmp_path):
    run = load_run(write_run(tmp_path / "R", [40.0], "ens", iid=3))
    assert (run.label, run.is_complete) == ("Ens iid k3", True) and math.isnan(run.over_stream)


def test_a_run_whose_stream_grew_has_the_new_arrivals(tmp_path):
    root = write_run(tmp_path / "R", [30.0, 29.0, 28.0])
    record = json.loads((root / "run.json").read_text())
    record["stream"]["num_megabatches"] = 2
    (root / "run.json").write_text(json.dumps(record))
    assert list(load_run(root).arrivals.value) == [30, 29, 28]


def test_a_damaged_stage_is_named_and_the_others_are_read(tmp_path):
    root = write_run(tmp_path / "R", [40.0, 30.0, 25.0, 22.0])
    (root / "stage-001" / "stage.json").write_text('{"stage": 1')
    faults = []
    run = load_run(root, faults.append)
    assert list(run.done.value) == [40.0, 25.0, 22.0] and not run.is_complete
    assert "stage-001/stage.json: damaged: not JSON" in str(faults[0])
    with pytest.raises(AlmaError, match="stage-001"):
        load_run(root)


@pytest.mark.parametrize(
    "change", [{"options": {}}, {"stream": {"kind": "images"}}, {"seed": None}, {"train_options": 3}]
)
def test_a_damaged_run_record_is_named(change, tmp_path):
    root = write_run(tmp_path / "R", num_stages=0)
    record = json.loads((root / "run.json").read_text())
    (root / "run.json").write_text(json.dumps({**record, **change}))
    with pytest.raises(AlmaError, match=r"R/run\.json: damaged"):
        load_run(root)


def test_a_kind_of_data_that_is_not_known_is_named(tmp_path):
    with pytest.raises(AlmaError, match=r"R/run\.json: expected a run on text or images, found 'sound'"):
        load_run(write_run(tmp_path / "R", stream={**text_stream(), "kind": "sound"}))


def test_many_sizes_of_a_growing_learner_are_shortened(tmp_path):
    members = {"learner": "gens", "stream": image_stream(), "num_experts": (1,), "num_members": range(1, 11)}
    assert load_run(write_run(tmp_path / "E", **members)).experts == "1 to 10 models"
    run = load_run(write_run(tmp_path / "T", learner="gens", stream=text_stream(), num_members=(1, 2, 3, 4)))
    assert run.experts == "4@1, 4@2, 4@3, 4@4"
