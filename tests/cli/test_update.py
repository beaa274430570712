"""``alma-update``: a folder that learns a month at a time; what is refused leaves everything as it was."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from data_prep.text.command import main as prep_text
from fairseq_alma.cli import update
from fairseq_alma.cli.update import (
    RECORD,
    Model,
    UpdateOptions,
    UpdateRecord,
    _month_of,
    _refuse_another_language,
    _sources,
    main,
)
from fairseq_alma.data.stream import Stream, file_sha256
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import WORK_MARKER

CALL = [sys.executable, "-c", "from fairseq_alma.cli.update import main; import sys; sys.exit(main(sys.argv[1:]))"]
TINY = ["--", "--decoder-embed-dim", "8", "--decoder-ffn-embed-dim", "32", "--decoder-attention-heads", "1", "--cpu"]
SENTENCE = "the cat sat on a mat while nine dogs barked at the old moon and nobody slept in that house before dawn"


def month_of(number, num_documents=60):
    """The text of a month: documents that no other month has."""
    draw, words = random.Random(number), SENTENCE.split()
    return "\n\n".join(" ".join(draw.choices(words, k=25)) for _ in range(num_documents))


def write_months(folder, count):
    paths = []
    for number in range(count):
        path = folder / f"month-{number}.txt"
        path.write_text(month_of(number), encoding="utf-8")
        paths.append(path)
    return paths


def refusal(*arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(each) for each in arguments])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The stream of a first month."""
    folder = tmp_path_factory.mktemp("model")
    (path,) = write_months(folder, 1)
    out = ["--out", str(folder / "M" / "stream"), "--megabatches", "1", "--workers", "1", "--vocab-size", "auto"]
    assert prep_text([str(path), *out, "--valid-bytes", "5%", "--test-bytes", "5%", "--holdout-bytes", "5%"]) == 0
    return folder / "M", path


def test_the_first_month_is_not_spent_on_tests(prepared):
    stream = Stream.open(prepared[0] / "stream")
    total = sum(split.num_words for split in stream.splits)
    for name in ("valid", "test", "megabatch-000/holdout"):
        assert 0.02 < stream.split(name).num_words / total < 0.09
    assert stream.megabatch(0).num_words / total > 0.8


def test_a_folder_of_another_kind_is_refused_and_left_alone(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to-mother.txt").write_text("dear mother")
    (path,) = write_months(tmp_path, 1)
    assert "letters: not a folder of alma-update" in refusal(tmp_path / "letters", path)
    assert [each.name for each in (tmp_path / "letters").iterdir()] == ["to-mother.txt"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file or folder"), ("", "no document|empty|too little text"), ("a\n", "too little text")],
)
def test_a_month_without_text_makes_no_model(tmp_path, content, message):
    path = tmp_path / "empty.txt"
    if content is not None:
        path.write_text(content)
    assert re.search(message, refusal(tmp_path / "M", path))
    assert not (tmp_path / "M").exists()


def test_other_options_than_the_first_call_s_are_refused(tmp_path, prepared):
    model = tmp_path / "M"
    shutil.copytree(prepared[0], model)
    months = [{"experts": 4, "is_done": True}]
    content = {"kind": "alma-update", "text": [], "words": ["--lr", "0.1"], "months": months}
    (model / RECORD).write_text(json.dumps(content))
    said = refusal(model, prepared[1], "--", "--lr", "0.2")
    assert "begun with other options (--lr 0.1 then, --lr 0.2 now)" in said


def test_a_damaged_record_is_refused(tmp_path):
    (tmp_path / "M").mkdir()
    (tmp_path / "M" / RECORD).write_text("{}")
    (path,) = write_months(tmp_path, 1)
    assert RECORD in refusal(tmp_path / "M", path)


def test_a_month_that_was_seen_is_known_by_its_content(tmp_path, prepared):
    stream = Stream.open(prepared[0] / "stream")
    again = shutil.copy(prepared[1], tmp_path / "renamed.txt")
    (tmp_path / "new.txt").write_text(month_of(3))
    for path, month in ((again, 0), (tmp_path / "new.txt", None)):
        assert _month_of(stream, _sources([str(path)], tmp_path / "M", UpdateOptions())) == month


def test_what_a_kill_left_once_the_stream_was_in_its_place_is_removed(tmp_path, prepared, monkeypatch):
    shutil.copytree(prepared[0], tmp_path / "M")
    model = Model(tmp_path / "M")
    model.record = UpdateRecord("alma-update", [], [], [])
    model.save()
    left = tmp_path / "M" / ".stream.building"
    (left / "kept").mkdir(parents=True)
    (left / WORK_MARKER).touch()
    monkeypatch.setattr(update, "_finish", lambda *arguments: True)
    assert main([str(tmp_path / "M"), str(prepared[1])]) == 0
    assert not left.exists()

    left.mkdir()
    (left / "mine.txt").touch()
    assert main([str(tmp_path / "M"), str(prepared[1])]) == 0
    assert (left / "mine.txt").exists()


def test_another_language_is_refused_with_a_number(tmp_path, prepared):
    model = Model.__new__(Model)
    model.root = prepared[0]
    stream = Stream.open(prepared[0] / "stream")
    (tmp_path / "other.txt").write_text("Жили-были старик со старухой у самого синего моря\n\n" * 20, encoding="utf-8")
    (tmp_path / "same.txt").write_text(month_of(5), encoding="utf-8")
    other, same = (
        _sources([str(tmp_path / f"{name}.txt")], tmp_path / "M", UpdateOptions()) for name in ("other", "same")
    )
    with pytest.raises(AlmaError, match=r"other.txt: \d\.\d\d bytes for a token, the first month .* has \d\.\d\d"):
        _refuse_another_language(model, stream, other, UpdateOptions())
    _refuse_another_language(model, stream, other, UpdateOptions(another_language=True))
    _refuse_another_language(model, stream, same, UpdateOptions())


def call(*arguments):
    done = subprocess.run([*CALL, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def state_of(model):
    """What a month leaves behind, but for times."""
    record = json.loads((model / RECORD).read_text())
    months = [{name: value for name, value in month.items() if name != "seconds"} for month in record["months"]]
    return months, file_sha256(model / "export" / "model.safetensors")


@pytest.mark.slow
def test_five_months_and_a_kill(tmp_path):
    months = write_months(tmp_path, 5)
    (tmp_path / "more.txt").write_text(month_of(9))
    said = call(tmp_path / "M", months[0], *TINY)
    assert "month 1 of" in said and "test set:" in said and "model: " in said
    shutil.copytree(tmp_path / "M", tmp_path / "K")

    with subprocess.Popen([*CALL, str(tmp_path / "K"), str(months[1])], stderr=subprocess.DEVNULL) as killed:
        while killed.poll() is None and not (tmp_path / "K" / "run" / "stage-001" / "train-member-0.log").exists():
            time.sleep(0.05)
        assert "another alma-update" in refusal(tmp_path / "K", months[2])
        os.kill(killed.pid, signal.SIGKILL)
    for number, path in enumerate(months[1:], 2):
        said = call(tmp_path / "M", path, *(["--passes", "2", "--size", "9000"] if number == 4 else []))
        assert f"month {number} of" in said and "on arrival" in said and "better" in said
        if number == 2:
            call(tmp_path / "K", path)
            assert state_of(tmp_path / "K") == state_of(tmp_path / "M")
    assert "month 3 has this text already" in call(tmp_path / "M", months[2])
    stages = [json.loads((tmp_path / "M" / "run" / f"stage-00{t}" / "stage.json").read_text()) for t in range(5)]
    assert stages[3]["num_updates"] > 1.5 * stages[2]["num_updates"]
    assert stages[4]["num_experts"] == stages[3]["num_experts"] > stages[2]["num_experts"] == 4
    assert "it can grow to" in refusal(tmp_path / "M", months[0].with_name("more.txt"), "--size", "1G")
    assert (tmp_path / "M" / "report" / "index.html").is_file()
