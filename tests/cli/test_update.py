"""``alma-update``: a folder that learns a month at a time; what is refused leaves everything as it was."""

import json
import random
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_prep.text.command import main as prep_text
from data_prep.text.documents import documents_of, find_sources
from fairseq_alma.cli import update
from fairseq_alma.cli.update import BUDGET, RECORD, Month, describe, main, new_size, next_step
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.text import helper
from fairseq_alma.text.train_options import num_params
from tests.runs.results import weight_sums

TINY = ["--", "--decoder-embed-dim", "8", "--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "1", "--cpu"]
SENTENCE = "the cat sat on a mat while nine dogs barked at the old moon and nobody slept in that house before dawn"


def month_of(number, num_documents=60):
    """Return the text of a month: documents that no other month has."""
    draw, words = random.Random(number), SENTENCE.split()
    return "\n\n".join(" ".join(draw.choices(words, k=25)) for _ in range(num_documents))


def write_month(folder, number, **how):
    (path := folder / f"month-{number}.txt").write_text(month_of(number, **how), encoding="utf-8")
    return path


def refusal(*arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(each) for each in arguments])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def call(capsys, *arguments):
    assert main([str(each) for each in arguments]) == 0
    return capsys.readouterr().out


def test_a_month_continues_the_model_within_the_budget_of_all_months():
    assert next_step(0, [1000], 0) == ("begin", 3.0)
    assert next_step(1000, [1000, 500], 3000) == ("continue", 3.0)
    assert next_step(100_000, [1000, 1000], 4500) == ("continue", 1.5)  # the rest of three passes through both months
    assert next_step(100_000, [1000, 500], 9000) == ("continue", 1.0)  # after an expensive --redo
    assert next_step(100_000, [1000, 500], 9000, budget=0.5) == ("continue", 0.5)


def test_a_model_that_is_too_small_for_its_text_is_replaced_if_the_budget_and_the_options_allow_it():
    assert next_step(100, [1000, 1000], 3000) == ("restart", 1.5)
    assert next_step(100, [1000, 10_000], 3000)[0] == "restart"
    assert next_step(100, [1000] * 4, 9000) == ("continue", 3.0)  # 0.75 passes are too few for a new model
    assert next_step(10_000, [1000, 10_000], 3000) == ("continue", 3.0)  # large enough
    assert next_step(50, [1000] * 6, 5000) == ("continue", 3.0)  # cheap months before allow no expensive one
    tokens, spent, parameters = [], 0.0, 0
    for month in range(24):
        tokens.append(1000 * (1 + month % 3))
        action, passes = next_step(parameters, tokens, spent)
        parameters = sum(tokens) // 5 if action != "continue" else parameters
        spent += passes * (tokens[-1] if action == "continue" else sum(tokens))
        assert spent <= BUDGET * sum(tokens) + 1e-6
    stream = SimpleNamespace(megabatch=lambda t: SimpleNamespace(num_tokens=1000))  # The user chose the width:
    plan = update._plan([Month(("begin", 3.0), 0, params=10)], stream, ["--decoder-embed-dim", "8"], BUDGET, None)
    assert plan.step == ("continue", 3.0)


def test_a_small_first_month_gives_a_model_for_the_months_to_come():
    assert new_size(3000, vocab_size=1000) == new_size(400_000, vocab_size=1000) == num_params(144, 4, 1000)
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
    month = write_month(tmp_path, 1)
    month.write_text(f"{month.read_text()}\n\n{month_of(0, 1)}")
    output = call(capsys, model, month)
    dropped = r"bytes \(\d+ bytes dropped that repeat earlier or held-out text, see "
    assert re.search(f"^month 2 of .* {dropped}", output, re.M)
    for what in ("all text so far", "old text", "new month", "test set of the first month"):
        change = r"\d\.\d+ bits per byte before, \d\.\d+ after \(\d+\.\d % (better|worse); \d+ bytes\)"
        assert re.search(f"^{what}: {change}$", output, re.M)
    stage = json.loads((model / "run/stage-001/stage.json").read_text())
    assert stage["megabatches"] == [0, 1] and len(stage["holdouts"]) == 2
    assert stage["train_tokens"] == pytest.approx(3 * Stream.open(model / "stream").megabatch(1).num_tokens, rel=0.1)
    assert (model / "export/config.json").is_file() and (model / "report/index.html").is_file()
    again = call(capsys, model, month, "--budget", "6")
    assert "month 2 already has this text; nothing to do; to train the newest month with another --budget" in again


def killed_in(monkeypatch, step, *arguments):
    """Run alma-update, and let a step fail as if the command was killed there."""
    with monkeypatch.context() as patch, pytest.raises(pytest.fail.Exception):
        patch.setattr(update, step, lambda *arguments: pytest.fail("killed"))
        main([str(each) for each in arguments])


def test_a_run_that_is_a_link_can_be_replaced(model, tmp_path, monkeypatch):
    (model / "run").rename(tmp_path / "disk")
    (model / "run").symlink_to(tmp_path / "disk")
    monkeypatch.setattr(update, "_train", lambda root, *_: shutil.copytree(root / "run", root / "run.next"))
    killed_in(monkeypatch, "_conclude", model, "--redo")
    assert not (model / "run").is_symlink() and not (tmp_path / "disk").exists()


def test_options_may_change_until_a_month_is_trained_and_a_model_is_no_input(tmp_path, monkeypatch, capsys):
    write_month(tmp_path, 0)
    (tmp_path / "empty.txt").touch()
    run = tmp_path / "M/run"
    for words, folder in ((["--lr", "abc"], run), (["--lr", "0.1"], tmp_path / "M/disk"), (["--cpu"], run)):
        killed_in(monkeypatch, "_train", tmp_path / "M", tmp_path, "--", *words)
        (folder / "stage-000").mkdir(parents=True)  # of a killed training; fails if the folder exists
        if folder != run:
            run.symlink_to(folder)
    killed_in(monkeypatch, "_train", tmp_path / "M", tmp_path)
    assert "using the options of the first call (--cpu); give others to change" in capsys.readouterr().err
    assert json.loads((tmp_path / "M" / RECORD).read_text())["words"] == ["--cpu"]
    inputs = Stream.open(tmp_path / "M/stream").history[0]["inputs"]
    assert [each["name"] for each in inputs] == ["empty.txt", "month-0.txt"]
    monkeypatch.setattr(update, "prepare_text", lambda options: signal.raise_signal(signal.SIGINT))
    assert main([str(tmp_path / "N"), str(write_month(tmp_path, 0))]) == 130  # interrupted, which is no success


@pytest.mark.slow
def test_a_month_that_was_killed_ends_like_one_that_was_not(model, tmp_path, capsys, monkeypatch):
    month, killed = write_month(tmp_path, 1), tmp_path / "K"
    shutil.copytree(model, killed)
    call(capsys, model, month)
    for step in ("stream_main", "_conclude"):
        killed_in(monkeypatch, step, killed, month)
    exported = (killed / "export/model.safetensors").read_bytes()
    assert "month 2 of" in call(capsys, killed, month)
    assert weight_sums(killed / "run") == weight_sums(model / "run")
    assert (killed / "export/model.safetensors").read_bytes() != exported  # also report and export are finished


@pytest.mark.slow
def test_a_redone_month_replaces_its_stage_alone_and_a_killed_one_loses_nothing(model, tmp_path, capsys, monkeypatch):
    call(capsys, model, write_month(tmp_path, 1))
    before, redo = weight_sums(model / "run"), [model, "--redo", "--budget", "4"]
    monkeypatch.delattr("os.link")  # Not all file systems have hard links.
    killed_in(monkeypatch, "stream_main", *redo)
    assert weight_sums(model / "run") == before
    killed_in(monkeypatch, "_conclude", *redo)
    (model / "run").rename(model / "run.next")  # as if the command was killed while it replaced the run
    with monkeypatch.context() as patch:
        patch.delattr(update, "stream_main")  # the month is not trained once more
        assert "4 passes through the new text" in call(capsys, *redo)
    after = weight_sums(model / "run")
    changed = [each for each in before if after[each] != before[each]]
    assert after.keys() == before.keys() and changed == ["stage-001/member-0/checkpoint_last.pt"]
    assert not (model / "run.next").exists()


@pytest.mark.slow
def test_a_larger_model_is_trained_in_a_new_run_that_replaces_the_run(model, tmp_path, capsys):
    (model / RECORD).write_text(re.sub('"--decoder.*"1",', "", (model / RECORD).read_text(), flags=re.S))  # any size
    output = call(capsys, model, write_month(tmp_path, 1), "--size", "60k")
    assert "training: new model" in output and re.search("^new month: .* before, ", output, re.M)
    assert not (model / "run/stage-001").exists() and not (model / "run.next").exists()
    assert '"hidden_size": 32' in (model / "export/config.json").read_text()  # 8 before
    assert len(json.loads((model / "run/stage-000/stage.json").read_text())["holdouts"]) == 2
    output = call(capsys, model, write_month(tmp_path, 2))
    assert "training: current model, 1 pass through" in output and (model / "run/stage-001/stage.json").is_file()
    (model / "run/stage-001/stage.json").unlink()  # the advice about a damaged record
    assert "training: new model" in call(capsys, model, write_month(tmp_path, 3), "--size", "80k")


@pytest.mark.slow
def test_the_first_month_can_be_redone_and_a_month_of_a_few_lines_is_learned(model, tmp_path, capsys):
    output = call(capsys, model, "--redo", "--budget", "2")
    assert "training: new model, 2 passes through all text" in output and not (model / "run.next").exists()
    output = call(capsys, model, write_month(tmp_path, 1, num_documents=3))
    assert "month 2 of" in output and "test set of the first month: " in output


@pytest.mark.slow
def test_24_small_months_cost_at_most_three_passes_and_one_test_and_export_each(model, tmp_path, capsys, monkeypatch):
    calls = []

    def call_in_last_month(name, words=(), **how):
        calls.append(name)
        if number == 23:
            helper.call(name, words, **how)
        elif name.endswith("export:main"):
            Path(words[words.index("--out") + 1]).mkdir()

    monkeypatch.setattr(update, "call", call_in_last_month)
    for number in range(1, 24):
        calls.clear()
        call(capsys, model, write_month(tmp_path, number, num_documents=10 + 5 * (number % 3)))
        assert calls == ["fairseq_alma.cli.report:main", "fairseq_alma.cli.export:main"]
        months, stream = json.loads((model / RECORD).read_text())["months"], Stream.open(model / "stream")
        tokens = sum(stream.megabatch(t).num_tokens for t in range(number + 1))
        assert sum(month["train_tokens"] for month in months) <= BUDGET * tokens + 4 * 128  # an update
        stage = model / f"run/stage-{number:03d}"
        assert (stage / "test.log").read_text().count("$ fairseq-eval-lm") == 1
        assert [each["megabatch"] for each in json.loads((stage / "stage.json").read_text())["holdouts"]]
    assert len(months) == 24


def test_a_month_after_which_old_text_is_predicted_worse_is_a_warning():
    months = [Month(("begin", 3.0), 0, months=[2.0]), Month(("continue", 3.0), 0, before=2.5, months=[2.03, 2.1])]
    lines = [*describe(months, [90, 10], 9)]
    assert "all text so far: 2.050 bits per byte before, 2.037 after (0.6 % better; 100 bytes)" in lines
    assert any(line.startswith("warning: the loss on the old text is 1.5 % worse") for line in lines)
    months[1].months[0], months[1].before = 2.01, None  # the old model was damaged
    lines = [*describe(months, [90, 10], 9)]
    assert "all text so far: 2.019 bits per byte (100 bytes)" in lines and "warning" not in "".join(lines)
    assert "12.5 passes" in "".join(describe([Month(("begin", 12.5), 0)], [9], 9))


def test_a_month_without_text_makes_no_model(tmp_path):
    assert refusal(tmp_path / "new/M", tmp_path / "bad.txt").endswith(
        "expected a file or folder, found nothing; give a path"
    )
    binary = bytes(range(256)) * 40
    for content, message in ((b"", "no document"), (b"a\n", "too little new text"), (binary, "UTF-8|binary|NUL|text")):
        (path := tmp_path / "bad.txt").write_bytes(content)
        assert re.search(message, refusal(tmp_path / "new/M", path))
        assert not (tmp_path / "new").exists()
    path.write_text("one line, one document\n" * 9)
    assert refusal(tmp_path / "new/M", path).endswith("by empty lines, or --format lines if each line is a document")
    assert refusal(tmp_path / "new/M", path, "--format", "file").endswith("give more documents, one in each file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no document|empty|too little new text|nothing"),
        (month_of(0), "month 1 already has this text"),
        (month_of(0, 1), r"bad.txt: too little new text for a month \(INPUT: .* already contains all 1 documents"),
        (f"{month_of(1, 2)} ".replace("\n\n", " "), r"no document is left; .*\); give more documents, separated by"),
        (f"{month_of(1, 1)}\n\n{'Жили-были старик со старухой ' * 300}", "bytes per token, as in the"),
        ("Жили-были старик со старухой у самого синего моря\n\n" * 20, r"bytes per token, as in the .*, found \d"),
    ],
)
def test_a_bad_month_leaves_the_model_as_it_was(text, message, model, tmp_path, capsys):
    (tmp_path / "bad.txt").write_text(text, encoding="utf-8")
    before = (model / RECORD).read_bytes()
    try:
        output = call(capsys, model, tmp_path / "bad.txt")
    except SystemExit as error:
        output = str(error)
    assert re.search(message, output)
    assert (model / RECORD).read_bytes() == before


def test_a_folder_of_another_kind_or_version_or_with_a_path_that_fairseq_splits_is_refused_and_not_changed(tmp_path):
    assert "MODEL M:1: fairseq splits paths at ':'; rename the folder" in refusal("M:1", write_month(tmp_path, 0))
    assert not Path("M:1").exists()
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to-mother.txt").write_text("dear mother")
    month = write_month(tmp_path, 1)
    assert "letters: expected a folder of alma-update, found no update.json; restore it from a backup, or give a" in (
        refusal(tmp_path / "letters", month)
    )
    assert [each.name for each in (tmp_path / "letters").iterdir()] == ["to-mother.txt"]
    (old := tmp_path / "old").mkdir()
    (old / RECORD).write_text('{"kind": "alma-update", "text": [], "words": [], "months": []}')
    assert "update.json: expected format version 2, found None of fairseq_alma 0.2.0 or older; " in refusal(old, month)


def test_options_that_alma_update_cannot_use_are_usage_errors(tmp_path, capsys):
    for words, message in (
        ("text -- --max-update 10", "--max-update after --: --budget sets the length of the training"),
        ("text -- --seed 2", "--seed: alma-update sets this option; remove it"),
        ("--redo -- --lr 0.5", "--redo uses the text and the options of the first call; remove --format"),
    ):
        assert refusal(tmp_path / "M", *words.split()) == "2"
        assert message in capsys.readouterr().err and not (tmp_path / "M").exists()


def test_a_stream_that_is_newer_or_older_than_the_record_is_refused(model, tmp_path):
    months = [str(write_month(tmp_path, number)) for number in (1, 2)]
    assert prep_text([*months, "--out", str(model / "stream"), "--append", "--one-per-input"]) == 0
    record = json.loads((model / RECORD).read_text())
    for number in (1, 5):
        (model / RECORD).write_text(json.dumps({**record, "months": number * record["months"]}))
        assert f"stream: expected {number} months as in update.json, found 3; restore MODEL" in refusal(model, *months)


def test_a_month_does_not_continue_a_model_that_is_gone(model, tmp_path, monkeypatch):
    monkeypatch.setattr(update, "stream_main", None)  # it would train another model on the older months
    (old := model / "run/stage-000/stage.json").rename(tmp_path / "stage.json")
    (model / RECORD).write_text(
        (content := (model / RECORD).read_text()).replace('"is_done": true', '"is_done": false')
    )
    with pytest.raises(TypeError, match="not callable"):  # the stage runs again
        main([str(model), str(write_month(tmp_path, 0))])
    (tmp_path / "stage.json").rename(old)
    (model / RECORD).write_text(content)
    month = write_month(tmp_path, 1)
    for part in ("run/stage-000", "run/run.json", "run"):
        shutil.move(model / part, tmp_path / "gone")
        assert "run: expected run.json and stage-000/member-0/checkpoint_last.pt, found" in refusal(model, month)
        shutil.move(tmp_path / "gone", model / part)
    monkeypatch.setattr(update, "call", lambda name, words, log: pytest.fail(" ".join(words)))
    with pytest.raises(pytest.fail.Exception, match=r"--gen-subset megabatch-001/holdout --cpu .*--batch-size \d"):
        main([str(model), str(month), "--size", "60k"])  # the advice
    shutil.rmtree(model / "run/stage-000/member-0")
    killed_in(monkeypatch, "stream_main", model, month, "--size", "60k")
    shutil.rmtree(model / "stream")
    assert "stream: missing; restore it from a backup, or give a new MODEL" in refusal(model, month)


def test_an_impossible_size_and_other_options_than_at_first_are_refused_and_not_recorded(model, tmp_path, monkeypatch):
    before, month = (model / RECORD).read_bytes(), write_month(tmp_path, 1)
    assert "first call (-- --decoder-embed-dim 8 " in refusal(model, month, "--", "--lr", "0.2")
    for root in (model, tmp_path / "new"):
        assert "--size 5: expected" in refusal(root, month, "--size", "5")
    assert (model / RECORD).read_bytes() == before
    killed_in(monkeypatch, "_train", tmp_path / "new", write_month(tmp_path, 2))  # other text may begin the model


@pytest.mark.parametrize("words", ["--arch lstm_lm", "--arch=lstm_lm", "-a lstm_lm", "--eval-capacity-factor 2"])
def test_a_model_that_cannot_be_exported_is_refused_before_any_work(words, tmp_path):
    message = refusal(tmp_path / "M", write_month(tmp_path, 0), "--", "--cpu", *words.split())
    assert re.search("^options after --: transformers (has no architecture for lstm_lm|cannot drop tokens)", message)
    assert not (tmp_path / "M").exists()


def test_the_field_that_the_first_call_was_given_is_read_in_later_months(model, tmp_path, monkeypatch):
    (model / RECORD).write_text((model / RECORD).read_text().replace('"text": []', '"text": ["--field", "body"]'))
    path, text = tmp_path / "month.jsonl", "Жили-были старик со старухой у самого синего моря"
    path.write_text(json.dumps({"body": 9 * text}), encoding="utf-8")
    assert "bytes per token" in refusal(model, path)
    killed_in(monkeypatch, "_train", model, write_month(tmp_path, 1))  # plain text needs no field


def test_text_whose_words_the_tokenizer_does_not_know_is_not_another_language(tmp_path, monkeypatch):
    draw = random.Random(1)
    (tmp_path / "short").write_text("A few words in other letters")
    for name in ("first", "second"):  # Each document has its own words.
        words = [["".join(draw.choices("abcdefghij", k=6)) for _ in range(20)] for _ in range(8)]
        (tmp_path / name).write_text("\n\n".join(" ".join(draw.choices(own, k=400)) for own in words))
    out = tmp_path / "stream"
    prep_text([str(tmp_path / "first"), "--out", str(out), "--megabatches", "1", "--vocab-size", "512", *update.SPLITS])
    read, sources = [], 1000 * find_sources([str(tmp_path / "second")], "text", "text", None)
    monkeypatch.setattr(update, "documents_of", lambda block: read.append(block) or documents_of(block))
    update._refuse_another_language(Stream.open(out), sources)
    assert len(read) == 2 * update.SAMPLED_DOCUMENTS  # two blocks of some of the files
    update._refuse_another_language(Stream.open(out), find_sources([str(tmp_path / "short")], "text", "text", None))
    for name in ("tables", "more"):
        (tmp_path / name).write_text("\n\n".join(" ".join(map(str, draw.choices(range(9999), k=80))) for _ in range(9)))
    more = find_sources([str(tmp_path / "more")], "text", "text", None)
    with pytest.raises(AlmaError, match="bytes per token, as in the test set"):
        update._refuse_another_language(Stream.open(out), more)
    prep_text([str(tmp_path / "tables"), "--out", str(out), "--append", "--megabatches", "1"])
    update._refuse_another_language(Stream.open(out), more)
