"""``alma-stream --then-evaluate``: the figures of a user's command, once for each stage, whatever happens between."""

import json
import shutil
import signal

import pytest

from fairseq_alma.cli.report import main as report
from fairseq_alma.cli.stream import main
from fairseq_alma.errors import AlmaError
from fairseq_alma.runs.evaluation import StageEvaluation
from tests.images.image_streams import make_stream
from tests.kills.crashes import Crash
from tests.kills.launch import launch

WORDS = ["--", "--width", "4", "--max-epoch", "2", "--cpu"]
SIZE = """echo {stage} >> {run}/evaluated; echo '{"old": 1}'; echo "{\\"size\\": $(stat -c %s {checkpoint})}" """


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return make_stream(tmp_path_factory.mktemp("images") / "S", num_megabatches=3)


def words_of(stream, folder, *options):
    return ["--stream", str(stream), "--run", str(folder), *options, *WORDS]


def records(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("stage-*/stage.json"))]


def evaluated(folder):
    return (folder / "evaluated").read_text().split()


def usage_error(capsys, words):
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_each_stage_is_evaluated_once_and_stands_in_its_record_and_in_the_report(stream, tmp_path, capsys):
    words = words_of(stream, tmp_path / "R", "--wait", "2", "--then-evaluate", SIZE)
    assert main(words) == main(words) == 0
    found = records(tmp_path / "R")
    assert [record["evaluation"]["command"] for record in found] == [SIZE, SIZE]
    kept = tmp_path / "R/stage-001/member-0/checkpoint_last.pt"
    assert found[1]["evaluation"]["figures"] == {"size": kept.stat().st_size}
    assert evaluated(tmp_path / "R") == ["0", "1"]
    assert not [*tmp_path.glob("R/*/evaluat*.json"), *tmp_path.glob("R/*/evaluated.pt"), *tmp_path.glob("R/*/exported")]
    capsys.readouterr()
    assert report([str(tmp_path / "R"), "--out", str(tmp_path / "report")]) == 0
    size = found[1]["evaluation"]["figures"]["size"]
    lines = [line for line in capsys.readouterr().out.splitlines() if "| size" in line or "|   size" in line]
    assert [each.strip() for each in lines[0].split("|")[4:7]] == ["*", f"{size:.5g}", f"{size:.5g}"]
    rows = (tmp_path / "report" / "evaluation.csv").read_text().splitlines()
    assert rows[0].startswith("learner,experts") and [row.split(",")[2] for row in rows[1:]] == ["error", "size"]
    assert "Figures of --then-evaluate" in (tmp_path / "report" / "index.html").read_text()


def test_figures_change_nothing_else_in_the_records(stream, tmp_path):
    for name, options in (("plain", []), ("R", ["--then-evaluate", SIZE])):
        assert main(words_of(stream, tmp_path / name, *options)) == 0
    for record, plain in zip(records(tmp_path / "R"), records(tmp_path / "plain"), strict=True):
        del record["evaluation"], record["wall_seconds"], plain["wall_seconds"]
        assert record == plain


def test_what_the_user_has_put_where_models_go_is_left_alone(stream, tmp_path):
    own = [tmp_path / "R" / name for name in ("stage-001/exported/mine", "stage-001/member-7/checkpoint_last.pt")]
    assert main(words_of(stream, tmp_path / "R", "--stage", "0")) == 0
    for path in own:
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    assert main(words_of(stream, tmp_path / "R", "--stage", "1")) == 0
    assert main(words_of(stream, tmp_path / "R")) == 0
    assert [path.read_text() for path in own] == ["mine", "mine"]
    words = words_of(stream, tmp_path / "E", "--then-evaluate", SIZE)
    assert main([*words[:4], "--stage", "0", *words[4:]]) == 0
    (tmp_path / "E/stage-001/exported").mkdir(parents=True)
    with pytest.raises(AlmaError, match="stage-001/exported: not of this run, and --then-evaluate puts a model there"):
        main(words)
    (tmp_path / "E/stage-001/exported").rmdir()
    assert main(words) == 0


def test_a_run_killed_in_an_evaluation_makes_it_when_it_resumes_and_none_twice(stream, tmp_path):
    run = tmp_path / "R"
    kill = f"[ {{stage}} = 0 ] || [ -e {run}/killed ] || {{ touch {run}/killed; kill -9 $PPID; sleep 1; }}; " + SIZE
    command, no_crash = words_of(stream, run, "--then-evaluate", kill), Crash(run, tmp_path / "journal")
    assert launch(command, tmp_path / "log", no_crash) == -signal.SIGKILL
    assert len(records(run)) == 1
    assert launch(command, tmp_path / "log", no_crash) == 0
    assert evaluated(run) == ["0", "1", "2"]
    assert [set(record["evaluation"]["figures"]) for record in records(run)] == [{"size"}] * 3


def test_an_evaluation_that_was_made_is_not_made_again_when_the_record_was_not_written(stream, tmp_path, monkeypatch):
    run = tmp_path / "R"
    command = words_of(stream, run, "--wait", "3", "--then-evaluate", SIZE)
    with monkeypatch.context() as patch:
        patch.setattr("fairseq_alma.runs.run_folder.RunFolder.write_stage", interrupt)
        assert main(command) == 130
    assert records(run) == [] and evaluated(run) == ["0"]
    assert main(command) == 0
    assert evaluated(run) == ["0"] and "size" in records(run)[0]["evaluation"]["figures"]
    shutil.rmtree(run / "stage-000")
    assert main(command) == 0
    assert evaluated(run) == ["0", "0"]


def interrupt(*arguments):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo found nothing >&2; exit 3", r"--then-evaluate failed \(exit status 3\): found nothing; the trained"),
        ("echo 2.01", r"must print figures as its last line, a JSON object such as .*; '2.01' found"),
        ("""echo '{"a": "b"}'""", r"must print figures"),
        ("""echo '{"a": 1}'; echo done""", r"'done' found"),
    ],
)
def test_a_command_that_fails_is_one_line_and_the_training_is_kept(command, message, stream, tmp_path):
    with pytest.raises(AlmaError, match=rf"R/stage-000/evaluation.log: .*{message}") as raised:
        main(words_of(stream, tmp_path / "R", "--wait", "3", "--then-evaluate", command))
    assert "\n" not in str(raised.value)
    trained = tmp_path / "R/stage-000/member-0/checkpoint_last.pt"
    before = trained.stat()
    assert main(words_of(stream, tmp_path / "R", "--wait", "3", "--then-evaluate", SIZE)) == 0
    assert trained.stat().st_mtime_ns == before.st_mtime_ns
    assert evaluated(tmp_path / "R") == ["0"]


@pytest.mark.parametrize("figures", ['{"a": 1, "b": NaN}', '{"a": 1e400}', '{"a": -Infinity}'])
def test_figures_that_are_not_finite_are_refused_as_json_has_none(figures, tmp_path):
    evaluation = StageEvaluation("", tmp_path, predictor=None)
    with pytest.raises(AlmaError, match=r"must print figures .* of finite numbers; '.*' found; the trained models"):
        evaluation._figures([["sh", "-c", f"echo '{figures}'"]], tmp_path / "evaluation.log")


def test_what_cannot_run_is_refused_before_anything_does(stream, tmp_path, capsys):
    run = tmp_path / "R"
    for command, message in (("  ", "an empty command"), ("if true", "not a command that a shell reads")):
        assert message in usage_error(capsys, words_of(stream, run, "--then-evaluate", command))
    vote = ["--learner", "ens", "--combine", "vote", "--then-evaluate", "cat {checkpoint}"]
    message = "--then-evaluate with {checkpoint}: no checkpoint predicts by vote; leave --combine out"
    assert message in usage_error(capsys, words_of(stream, run, *vote))
    assert not run.exists()


@pytest.mark.parametrize(("deed", "said"), [("rm", "removed"), ("truncate -s 9", "changed")])
def test_a_command_that_spoils_a_checkpoint_completes_no_stage(deed, said, stream, tmp_path):
    command = f"{deed} {{checkpoint}}; echo '{{\"a\": 1}}'"
    with pytest.raises(AlmaError, match=rf"member-0/checkpoint_last.pt: --then-evaluate has {said} it"):
        main(words_of(stream, tmp_path / "R", "--wait", "3", "--then-evaluate", command))
    assert records(tmp_path / "R") == []
    shutil.rmtree(tmp_path / "R/stage-000")
    assert main(words_of(stream, tmp_path / "R", "--wait", "3", "--then-evaluate", SIZE)) == 0


@pytest.mark.parametrize("name", ["-R", "a\nrun", "it's", "a  b"])
def test_any_name_reaches_the_command_as_one_word_that_is_no_option(name, stream, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = (
        """set -- {checkpoint}; echo "{\\"words\\": $#, \\"size\\": $(wc -c {checkpoint} | awk 'END {print $1}')}" """
    )
    words = words_of(stream, name, "--wait", "3", "--then-evaluate", command)
    words[words.index("--run") : words.index("--run") + 2] = [f"--run={name}"]
    assert main(words) == 0
    figures = records(tmp_path / name)[0]["evaluation"]["figures"]
    size = (tmp_path / name / "stage-000/member-0/checkpoint_last.pt").stat().st_size
    assert figures["words"] == 1 and (figures["size"] == size or "\n" in name)


def test_braces_that_are_no_place_stay(stream, tmp_path):
    command = """stage=7; echo 1 | awk '{print $1}' >&2; echo "{\\"a\\": ${stage}, \\"{other}\\": 2}" """
    assert main(words_of(stream, tmp_path / "R", "--wait", "3", "--then-evaluate", command)) == 0
    assert records(tmp_path / "R")[0]["evaluation"]["figures"] == {"a": 7, "{other}": 2}
