"""``alma-verify``: what is whole passes, and each thing that is not is named, with what to do."""

import json
import random
import re
import shutil

import pytest

from data_prep.text.command import main as alma_prep_text
from fairseq_alma.cli.stream import main as alma_stream
from fairseq_alma.cli.verify import main
from tests.images.image_streams import make_stream

TRAIN = ["--", "--width", "4", "--max-epoch", "1", "--cpu"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A stream S of three mega-batches, and on it a growing ensemble R of which two stages are complete."""
    folder = tmp_path_factory.mktemp("verify")
    make_stream(folder / "S", num_megabatches=3)
    for stage in ("0", "1"):
        words = ["--stream", str(folder / "S"), "--run", str(folder / "R"), "--learner", "gens", "--stage", stage]
        assert alma_stream([*words, *TRAIN]) == 0
    return folder


@pytest.fixture
def copied(made, tmp_path):
    """The run, to be damaged; its stream stays where it is."""
    shutil.copytree(made / "R", tmp_path / "R")
    return tmp_path / "R"


def findings(capsys, *paths):
    """Return the exit status, and what does not hold."""
    capsys.readouterr()
    status = main([*map(str, paths), "--json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert status == (0 if all(each["holds"] for each in found) else 1)
    return found, [each["says"] for each in found if not each["holds"]]


def test_what_is_whole_holds_and_a_run_says_how_it_goes_on(made, capsys):
    found, wrong = findings(capsys, made / "S", made / "R")
    assert wrong == []
    assert found[-1]["says"] == "2 of 3 stages are complete; the same alma-stream command goes on with stage 2"
    assert sum(each["path"].endswith("checkpoint_last.pt") for each in found) == 2
    assert main([str(made / "R")]) == 0
    assert all(line.startswith("ok  ") for line in capsys.readouterr().out.splitlines())


def test_nothing_is_written(made, capsys):
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    findings(capsys, made / "S", made / "R")
    assert {path: path.stat().st_mtime_ns for path in made.rglob("*")} == before


def damage_weights(run):
    path = run / "stage-001/member-1/checkpoint_last.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def another_stream(run):
    record = json.loads((run / "run.json").read_text())
    record["stream"]["fingerprint"] = "0" * 64
    (run / "run.json").write_text(json.dumps(record))


def record_of_no_stage(run):
    (run / "stage-001/stage.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_weights, "stage-001/member-1/checkpoint_last.pt: damaged"),
        (lambda run: shutil.rmtree(run / "stage-000/member-0"), "member-0/checkpoint_last.pt: not there, and it is"),
        (record_of_no_stage, "stage-001/stage.json: "),
        (another_stream, "run.json: begun on another stream than"),
        (lambda run: (run / "run.json").write_text("[]"), "run.json: "),
    ],
)
def test_what_is_not_whole_is_named_with_what_to_do(damage, message, copied, capsys):
    damage(copied)
    _, wrong = findings(capsys, copied)
    assert any(message in each for each in wrong)
    assert not any("\n" in each for each in wrong)


def test_each_file_of_a_stream_that_was_altered_is_named(made, tmp_path, capsys):
    shutil.copytree(made / "S", tmp_path / "S")
    for name in ("labels.npy", "test.npy"):
        (path := tmp_path / "S" / name).write_bytes(path.read_bytes()[:-1] + b"?")
    _, wrong = findings(capsys, tmp_path / "S")
    assert len(wrong) == 2 and "labels.npy" in wrong[0] and "test.npy" in wrong[1]


def test_how_much_of_the_test_text_was_trained_on_is_measured_for_each_mega_batch(tmp_path, capsys):
    generator = random.Random(0)
    documents = [" ".join(generator.choices("abcdefgh", k=20)) for _ in range(200)]
    (tmp_path / "text.txt").write_text("\n\n".join(each for one in documents for each in (one, one.upper() + "!")))
    prepare = [str(tmp_path / "text.txt"), "--megabatches", "2", "--vocab-size", "300", "--workers", "1"]
    assert alma_prep_text([*prepare, "--out", str(tmp_path / "kept"), "--no-decontaminate"]) == 0
    assert alma_prep_text([*prepare, "--out", str(tmp_path / "clean"), "--test-words", "400"]) == 0
    for name, share in (("clean", lambda percent: percent == 0), ("kept", lambda percent: 10 < percent < 90)):
        capsys.readouterr()
        assert main([str(tmp_path / name), "--overlap"]) == 0
        shares = re.findall(r"train: holds ([\d.]+)% of the test text's n-grams of 13 words", capsys.readouterr().out)
        assert len(shares) == 2 and all(share(float(each)) for each in shares)
    assert main([str(tmp_path / "clean"), "--overlap", "--json"]) == 0


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_what_is_nothing_of_ours_does_not_hold(name, tmp_path, capsys):
    _, wrong = findings(capsys, tmp_path / name)
    assert wrong == ["no stream, run, checkpoint or exported folder; give one"]
