"""``alma-update``: a folder that learns a month at a time; what is refused leaves everything as it was."""

import json
import random
import re
import shutil

import pytest

from fairseq_alma.cli import update
from fairseq_alma.cli.update import BUDGET, RECORD, Decision, main, new_size, next_step
from fairseq_alma.data.stream import Stream
from fairseq_alma.text.defaults import num_params
from tests.runs.results import weight_sums

TINY = ["--", "--decoder-embed-dim", "8", "--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "1", "--cpu"]
SENTENCE = "the cat sat on a mat while nine dogs barked at the old moon and nobody slept in that house before dawn"


def month_of(number, num_documents=60):
    """Return the text of a month: documents that no other month has."""
    draw, words = random.Random(number), SENTENCE.split()
    return "\n\n".join(" ".join(draw.choices(words, k=25)) for _ in range(num_documents))


def write_month(folder, number, **how):
    path = folder / f"month-{number}.txt"
    path.write_text(month_of(number, **how), encoding="utf-8")
    return path


def refusal(*arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(each) for each in arguments])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def call(capsys, *arguments):
    assert main([str(each) for each in arguments]) == 0
    return capsys.readouterr().out


def test_a_month_continues_the_model_and_all_of_them_cost_no_more_than_the_budget():
    assert next_step(0, [1000], 0) == Decision("begin", 3.0)
    assert next_step(1000, [1000, 500], 3000) == Decision("continue", 3.0)
    assert next_step(100_000, [1000, 1000], 5000) == Decision("continue", 1.0)  # what is left of three passes


def test_a_model_that_is_too_small_for_its_text_is_replaced_when_a_month_is_large_enough_to_pay_for_it():
    assert next_step(100, [1000, 1000], 3000) == Decision("restart", 1.5)
    assert next_step(100, [1000, 10_000], 3000).action == "restart"
    assert next_step(100, [1000] * 4, 9000) == Decision("continue", 3.0)  # 0.75 passes are too few for a new model
    assert next_step(10_000, [1000, 10_000], 3000) == Decision("continue", 3.0)  # large enough
    tokens, spent, parameters = [], 0.0, 0
    for month in range(24):
        tokens.append(1000 * (1 + month % 3))
        step = next_step(parameters, tokens, spent)
        parameters = sum(tokens) // 5 if step.action != "continue" else parameters
        spent += step.passes * (tokens[-1] if step.action == "continue" else sum(tokens))
        assert spent <= BUDGET * sum(tokens) + 1e-6


def test_a_small_first_month_gives_a_model_for_the_months_to_come():
    assert new_size(3000, vocab_size=1000) == new_size(400_000, vocab_size=1000) == num_params(128, 2, 1000)
    assert new_size(3_000_000, vocab_size=1000) == num_params(192, 4, 1000)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A model of one month."""
    folder = tmp_path_factory.mktemp("first")
    assert main([str(folder / "M"), str(write_month(folder, 0)), *TINY]) == 0
    return folder / "M"


@pytest.fixture
def model(first, tmp_path):
    shutil.copytree(first, tmp_path / "M")
    return tmp_path / "M"


def test_a_month_is_learned_by_draws_from_all_text_and_compared_in_bits_per_byte(model, tmp_path, capsys):
    said = call(capsys, model, write_month(tmp_path, 1))
    for what in ("everything so far", "new month", "first month's test"):
        assert re.search(
            rf"^{what}: \d\.\d+ bits per byte before, \d\.\d+ after \(\d+\.\d % (better|worse)\)$", said, re.M
        )
    stage = json.loads((model / "run/stage-001/stage.json").read_text())
    assert stage["megabatches"] == [0, 1] and len(stage["holdouts"]) == 2
    new = Stream.open(model / "stream").megabatch(1).num_tokens
    assert stage["train_tokens"] == pytest.approx(3 * new, rel=0.1)
    assert (model / "export/config.json").is_file() and (model / "report/index.html").is_file()
    assert "month 2 has this text already" in call(capsys, model, tmp_path / "month-1.txt")


@pytest.mark.slow
def test_a_month_that_a_kill_cut_off_ends_as_one_that_was_not(model, tmp_path, capsys, monkeypatch):
    month = write_month(tmp_path, 1)
    shutil.copytree(model, tmp_path / "K")
    call(capsys, model, month)
    with monkeypatch.context() as patch:
        patch.setattr(update, "_conclude", lambda *arguments: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            main([str(tmp_path / "K"), str(month)])
    call(capsys, tmp_path / "K", month)
    assert weight_sums(tmp_path / "K/run") == weight_sums(model / "run")


def test_a_redone_month_replaces_its_stage_alone_and_a_killed_one_loses_nothing(model, tmp_path, capsys, monkeypatch):
    call(capsys, model, write_month(tmp_path, 1))
    before = weight_sums(model / "run")
    with monkeypatch.context() as patch:
        patch.setattr(update.Model, "replace_run", lambda self: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            main([str(model), "--redo", "--budget", "4"])
    assert weight_sums(model / "run") == before
    assert "4 passes through its text" in call(capsys, model, "--redo", "--budget", "4")
    after = weight_sums(model / "run")
    assert after.keys() == before.keys() and [each for each in before if after[each] != before[each]] == [
        "stage-001/member-0/checkpoint_last.pt"
    ]
    assert not (model / "run.next").exists() and not (model / "run.old").exists()


@pytest.mark.slow
def test_a_larger_model_begins_anew_next_to_the_run_that_it_replaces(model, tmp_path, capsys):
    said = call(capsys, model, write_month(tmp_path, 1), "--size", "60k")
    assert "a larger model begun anew" in said and "new month: " in said and " before, " in said
    assert not (model / "run/stage-001").exists() and not (model / "run.next").exists()
    assert len(json.loads((model / "run/stage-000/stage.json").read_text())["holdouts"]) == 2
    said = call(capsys, model, write_month(tmp_path, 2))
    assert "the model continues" in said and (model / "run/stage-001/stage.json").is_file()


def test_a_month_that_makes_the_old_worse_is_a_warning(model, tmp_path, capsys):
    call(capsys, model, write_month(tmp_path, 1))
    record = json.loads((model / RECORD).read_text())
    record["months"][0]["months"] = [0.5]
    (model / RECORD).write_text(json.dumps(record))
    opened = update.Model(model)
    assert any(line.startswith("warning: old text") for line in update._describe(opened, opened.stream(), 1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or folder"),
        (b"", "no document|empty|too little text"),
        (b"a\n", "too little text"),
        (bytes(range(256)) * 40, "UTF-8|binary|NUL|text"),
    ],
)
def test_a_month_without_text_makes_no_model(content, message, tmp_path):
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    assert re.search(message, refusal(tmp_path / "M", path))
    assert not (tmp_path / "M").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no document|empty|too little text|nothing"),
        (month_of(0), "already|too little text|duplicates|no document"),
        ("Жили-были старик со старухой у самого синего моря\n\n" * 20, r"bytes per token, the first month .* has \d"),
    ],
)
def test_a_bad_month_leaves_the_model_as_it_was(text, message, model, tmp_path, capsys):
    (tmp_path / "bad.txt").write_text(text, encoding="utf-8")
    before = (model / RECORD).read_bytes()
    try:
        said = call(capsys, model, tmp_path / "bad.txt")
    except SystemExit as error:
        said = str(error)
    assert re.search(message, said)
    assert (model / RECORD).read_bytes() == before


@pytest.mark.slow
def test_a_month_of_a_few_lines_is_learned(model, tmp_path, capsys):
    said = call(capsys, model, write_month(tmp_path, 1, num_documents=3))
    assert "month 2 of" in said and "first month's test: " in said


def test_a_folder_of_another_kind_and_one_of_version_0_2_0_are_refused_and_left_alone(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to-mother.txt").write_text("dear mother")
    month = write_month(tmp_path, 1)
    assert "letters: not a folder of alma-update" in refusal(tmp_path / "letters", month)
    assert [each.name for each in (tmp_path / "letters").iterdir()] == ["to-mother.txt"]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / RECORD).write_text('{"kind": "alma-update", "text": [], "words": [], "months": []}')
    assert "update.json: written by version 0.2.0" in refusal(tmp_path / "old", month)


def test_other_options_than_those_of_the_first_call_are_refused(model, tmp_path):
    assert "begun with other options" in refusal(model, write_month(tmp_path, 1), "--", "--lr", "0.2")
