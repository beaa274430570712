"""Which checkpoint stands for what a run has tested."""

import json

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.exchange.model_card import record_rows
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
def test_the_checkpoint_that_was_tested_is_the_runs_model(predicts_with, tmp_path):
    extras = [{} if predicts_with == "last" else {"anytime": {"first_update": 0, "predicts_with": predicts_with}}] * 2
    root = write_run(tmp_path / "R", [30.0, 20.0], stream=text_stream(num_megabatches=2), stage_extras=extras)
    touch(root, *FILES.values())
    assert lookup.find_model(root, None) == root / "stage-001" / FILES[predicts_with]
    for name, file in FILES.items():
        rows = record_rows(root / "stage-001" / file, Splits())
        assert ("test perplexity" in rows) == (name == predicts_with)
        assert " updates on " in rows["trained by"] and rows["options"] == "`--arch alma_switch_lm_tiny`"
        assert name == predicts_with or rows["test"].endswith(f"what was tested is stage-001/{FILES[predicts_with]}")


def test_a_model_card_counts_the_mega_batches_that_were_appended(tmp_path):
    root = write_run(tmp_path / "R", [30.0, 20.0], stream=text_stream(num_megabatches=4))
    record = json.loads((root / "run.json").read_text())
    record["stream"]["num_megabatches"] = 1  # when the run began
    (root / "run.json").write_text(json.dumps(record))
    touch(root, FILES["last"])
    for found, known in ((1, 4), (1, 2)):
        stream = Splits()
        stream.num_megabatches = known
        rows = record_rows(root / "stage-001" / FILES["last"], stream)
        assert rows["mega-batches seen"] == f"up to {found} of 0 to {known - 1} (stage 1)"


class Splits:
    """What a model card asks of a stream."""

    num_tokens, num_bytes, num_megabatches = 100, 400, 2

    def split(self, name):
        return self


@pytest.mark.parametrize("members", [["member-0", "member-1"], ["member-1"]], ids=" ".join)
def test_a_member_is_not_the_ensemble(members, tmp_path):
    root = write_run(tmp_path / "R", [30.0, 20.0], "gens", text_stream(num_megabatches=2), num_members=(1, 2))
    touch(root, *(f"{member}/checkpoint_last.pt" for member in members))
    with pytest.raises(AlmaError, match=r"ensemble.pt: the ensemble of stage 1 is not kept, as its members are"):
        lookup.find_model(root, None)
    rows = record_rows(root / "stage-001" / members[0] / "checkpoint_last.pt", Splits())
    assert rows["test"] == "no figures are known; what was tested is not kept"
    touch(root, "ensemble.pt")
    assert lookup.find_model(root, None) == root / "stage-001/ensemble.pt"


def test_an_arrival_has_the_model_in_force_and_what_the_stream_does_not_have_is_refused(tmp_path):
    root = write_run(tmp_path / "R", stream=text_stream(num_megabatches=8), wait=3, num_stages=1)
    write_run(tmp_path / "whole", stream=text_stream(num_megabatches=8), wait=3, drop_rest=True)
    first, second = "stage-000/member-0/checkpoint_last.pt", "stage-001/member-0/checkpoint_last.pt"
    for folder in (root, tmp_path / "whole"):
        touch(folder, FILES["last"], stage=0)
    touch(tmp_path / "whole", FILES["last"])
    for arrival in (2, 4, None):
        assert lookup.find_model(root, arrival) == root / first
    for arrival, file in ((4, first), (5, second), (7, second), (None, second)):
        assert lookup.find_model(tmp_path / "whole", arrival) == tmp_path / "whole" / file
    for folder, arrival, there in ((root, 1, "2 to 4"), (root, 5, "2 to 4"), (tmp_path / "whole", 8, "2 to 7")):
        message = f"no model yet at arrival {arrival}, there is one at arrivals {there}; run alma-stream, or give one"
        with pytest.raises(AlmaError, match=message):
            lookup.find_model(folder, arrival)
    begun = write_run(tmp_path / "begun", num_stages=0)
    with pytest.raises(AlmaError, match="no stage is complete yet"):
        lookup.find_model(begun, 0)


def test_weights_that_are_gone_are_named(tmp_path):
    with pytest.raises(AlmaError, match=r"member-0/checkpoint_last.pt: the weights of stage 3 are not kept"):
        stage_predictor(RunFolder(tmp_path), {"stage": 3})
