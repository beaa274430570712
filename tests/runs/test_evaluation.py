"""``alma-stream --then-evaluate``: the numbers that a user's command prints are in the record of each stage."""

import json

import pytest

from fairseq_alma.cli.stream import main
from fairseq_alma.errors import AlmaError
from tests.images.image_streams import make_stream

SIZE = (
    """echo {stage} {arrival} >> {run}/evaluated; echo '{"old": 1}'; echo "{\\"size\\": $(stat -c %s {checkpoint})}" """
)


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return make_stream(tmp_path_factory.mktemp("images") / "S", num_megabatches=3)


def evaluate(stream, folder, command, *options):
    words = ["--stream", str(stream), "--run", str(folder), *options, "--then-evaluate", command]
    assert main([*words, "--", "--width", "4", "--max-epoch", "2", "--cpu"]) == 0
    return [json.loads(path.read_text()) for path in sorted(folder.glob("stage-*/stage.json"))]


def test_each_stage_is_evaluated_once_and_records_the_numbers_of_the_last_line(stream, tmp_path):
    run = tmp_path / "a run"
    evaluate(stream, run, SIZE, "--wait", "2")
    found = evaluate(stream, run, SIZE, "--wait", "2")
    size = (run / "stage-001/member-0/checkpoint_last.pt").stat().st_size
    assert found[1]["evaluation"] == {"command": SIZE, "figures": {"size": size}}
    assert (run / "evaluated").read_text().splitlines() == ["0 1", "1 2"]


def test_the_command_receives_the_checkpoints_of_all_members(stream, tmp_path):
    ens = ("--wait", "3", "--learner", "ens", "--num-members", "2")
    command = """printf '{"members": %d}' $(ls {checkpoint} | wc -l)"""
    (record,) = evaluate(stream, tmp_path / "R", command, *ens)
    assert record["evaluation"]["figures"] == {"members": 2}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo found nothing >&2; exit 3", r"--then-evaluate failed \(exit status 3\)"),
        ("""echo '{"a": 1}'; echo 2.01""", "expected a JSON object of finite numbers.*found '2.01'"),
        ("""echo '{"a": 1, "b": NaN}'""", "expected a JSON object of finite numbers"),
    ],
)
def test_a_failed_command_is_reported_in_one_line_and_the_training_is_kept(command, message, stream, tmp_path):
    with pytest.raises(AlmaError, match=f"R/stage-000/evaluation.log: .*{message}"):
        evaluate(stream, tmp_path / "R", command, "--wait", "3")
    before = (tmp_path / "R/stage-000/member-0/checkpoint_last.pt").stat().st_mtime_ns
    (record,) = evaluate(stream, tmp_path / "R", """echo '{"a": 1}'""", "--wait", "3")
    assert record["evaluation"]["figures"] == {"a": 1}
    assert (tmp_path / "R/stage-000/member-0/checkpoint_last.pt").stat().st_mtime_ns == before
