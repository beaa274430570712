"""The checkpoint of a run, or of one of its arrivals."""

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.runs import lookup
from fairseq_alma.runs.run_folder import RunFolder, stage_predictor
from tests.report.fakes import text_stream, write_run

FILES = {
    "last": "member-0/checkpoint_last.pt", "average": "member-0/checkpoint_average.pt",
    "best": "member-0/checkpoint_best.pt", "branch": "member-0/branch/checkpoint_last.pt",
}  # fmt: skip


def touch(root, *names, stage=1):
    for name in names:
        path = root / f"stage-{stage:03d}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize("predicts_with", FILES)
def test_the_tested_checkpoint_is_the_model_of_the_run(predicts_with, tmp_path):
    extras = [{} if predicts_with == "last" else {"anytime": {"first_update": 0, "predicts_with": predicts_with}}] * 2
    root = write_run(tmp_path / "R", [30.0, 20.0], stream=text_stream(num_megabatches=2), stage_extras=extras)
    touch(root, *FILES.values())
    assert lookup.find_model(root, None) == root / "stage-001" / FILES[predicts_with]


@pytest.mark.parametrize("members", [["member-0", "member-1"], ["member-1"]], ids=" ".join)
def test_a_member_is_not_the_ensemble(members, tmp_path):
    root = write_run(tmp_path / "R", [30.0, 20.0], "gens", text_stream(num_megabatches=2), num_members=(1, 2))
    touch(root, *(f"{member}/checkpoint_last.pt" for member in members))
    given = rf"ensemble.pt: expected an ensemble, found only its members; .* such as .*/stage-001/{members[0]}/check"
    with pytest.raises(AlmaError, match=given):
        lookup.find_model(root, None)
    touch(root, "ensemble.pt")
    assert lookup.find_model(root, None) == root / "stage-001/ensemble.pt"


def test_an_arrival_has_the_model_of_the_last_update_before_it(tmp_path):
    root = write_run(tmp_path / "R", stream=text_stream(num_megabatches=8), wait=3, drop_rest=True)
    for stage in (0, 1):
        touch(root, FILES["last"], stage=stage)
    for arrival, stage in ((2, 0), (4, 0), (5, 1), (None, 1)):
        assert lookup.find_model(root, arrival) == root / f"stage-00{stage}/member-0/checkpoint_last.pt"
    for arrival in (1, 6):
        with pytest.raises(AlmaError, match=f"no model at arrival {arrival}; give an arrival from 2 to 5"):
            lookup.find_model(root, arrival)
    begun = write_run(tmp_path / "begun", num_stages=0)
    with pytest.raises(AlmaError, match="expected a complete stage, found none"):
        lookup.find_model(begun, 0)


def test_missing_weights_are_named(tmp_path):
    message = r"checkpoint_last.pt: missing, because the run does not keep weights of stage 3"
    with pytest.raises(AlmaError, match=message):
        stage_predictor(RunFolder(tmp_path), {"stage": 3})
