"""The command: the stream that it writes, complete or not at all, and its errors."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data_prep.text import command as module
from data_prep.text.command import main
from data_prep.text.steps import Work
from fairseq_alma.data.stream import Stream, file_sha256, split_name
from fairseq_alma.data.tokens import StreamTokenizer, TokenFile
from fairseq_alma.errors import AlmaError
from tests.forked import wait_until
from tests.scripts import usage_error

WORDS = [start + end for start in ("ba", "co", "di", "fu", "gra", "é") for end in ("n", "rt", "sk", "l", "ming", "北")]
ONE = ["a", "--out", "s", "--megabatches", "1"]


def make_documents(count: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    texts = (" ".join(generator.choices(WORDS, k=generator.randrange(3, 120))) for _ in range(count))
    return [f"Title {number}\n{text}." for number, text in enumerate(texts)]


def files_of(folder: Path, without: str = "") -> dict[str, str]:
    """Return path and sha256 of every file, except files with the name ``without``."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != without)
    return {str(path.relative_to(folder)): file_sha256(path) for path in paths}


def texts_of(stream: Stream, name: str) -> list[str]:
    tokenizer, file = StreamTokenizer.open(stream.root), TokenFile(stream.root / name)
    sequences = np.split(file.ids, np.cumsum(file.sizes)[:-1])
    assert all(sequence[-1] == 2 for sequence in sequences)
    return [tokenizer.decode([tokenizer.symbols[unit - 4] for unit in sequence[:-1]]) for sequence in sequences]


def run(*arguments: object) -> int:
    return main([*map(str, arguments), "--workers", "1"])


def create(text: Path, out: Path, *more: object) -> Stream:
    assert run(text, "--out", out, "--megabatches", 3, "--vocab-size", 300, *more) == 0
    return Stream.open(out)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    documents = make_documents(400)
    (folder / "text.txt").write_text("\n\n".join(documents + documents[:20]))
    create(folder / "text.txt", folder / "stream")
    return folder


@pytest.fixture
def text(made, tmp_path):
    """A file of 400 documents and 20 duplicates."""
    return shutil.copyfile(made / "text.txt", tmp_path / "text.txt")


@pytest.fixture
def stream(made, tmp_path):
    """The stream of that file, which may be altered."""
    return Stream.open(shutil.copytree(made / "stream", tmp_path / "stream"))


def test_a_stream_has_every_document_once_and_its_manifest_counts_them(stream):
    stream.verify([split.name for split in stream.splits])
    assert stream.num_megabatches == 3
    texts = {split.name: texts_of(stream, split.name) for split in stream.splits}
    assert sorted(sum(texts.values(), start=[])) == sorted(make_documents(400))  # noqa: RUF017
    for split in stream.splits:
        ours = texts[split.name]
        assert split.num_documents == len(ours)
        assert split.num_words == sum(len(one.split()) for one in ours)
        assert split.num_bytes == sum(len(one.encode()) for one in ours)
        assert split.num_tokens == len(TokenFile(stream.root / split.name).ids)
    assert stream.history[0]["num_duplicates"] == 20
    assert stream.history[0]["duplicate_bytes"] == sum(len(one.encode()) for one in make_documents(400)[:20])
    assert stream.history[0]["inputs"][0]["name"] == "text.txt"  # without a folder of this machine
    sizes = [stream.megabatch(number).num_bytes for number in range(3)]
    assert max(sizes) - min(sizes) <= max(len(one.encode()) for one in make_documents(400))


def test_stock_language_modeling_task_reads_valid_and_test_in_place(stream):
    from fairseq import options, tasks

    parser = options.get_training_parser(default_task="language_modeling")
    arguments = ["--task", "language_modeling", "--arch", "transformer_lm", "--tokens-per-sample", "64"]
    task = tasks.setup_task(options.parse_args_and_arch(parser, [str(stream.root), *arguments]))
    for name in ("valid", "test"):
        task.load_dataset(name)
        targets = [int(id_) for item in range(len(task.dataset(name))) for id_ in task.dataset(name)[item]["target"]]
        assert targets == TokenFile(stream.root / name).ids.tolist()


def test_files_in_out_are_not_input(text, tmp_path, capsys):
    create(tmp_path, tmp_path / "a b/stream")
    assert f"next: alma-stream --stream '{tmp_path}/a b/stream' --run RUN" in capsys.readouterr().out
    stream = create(tmp_path, tmp_path / "a b/stream")
    assert "nothing to do" in capsys.readouterr().out
    assert [each["name"] for each in stream.history[0]["inputs"]] == ["text.txt"]
    (stream.root / "dict.txt").unlink()
    with pytest.raises(AlmaError, match=r"dict\.txt: expected a file of .* found no file"):
        create(tmp_path, tmp_path / "a b/stream")
    with pytest.raises(AlmaError, match=r"expected text outside .*stream, the folder to write"):
        create(tmp_path / "a b/stream", tmp_path / "a b/stream")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seed", 2], "was made with --seed 1, not with --seed 2"),
        (["--format", "lines"], "was made with the default of --format, not with --format lines"),
        ([], r"made from different input \(changed or new files: text\.txt"),
        (["--field", "body"], r"^--field body: .*text\.txt is plain text, which has no fields; remove --field"),
    ],
)
def test_another_command_on_the_same_folder_is_refused(stream, text, tmp_path, more, message):
    if not more:
        text.write_text(text.read_text() + "\n\nmore")
    with pytest.raises(AlmaError, match=message):
        create(text, tmp_path / "stream", *more)


def test_a_folder_that_is_not_a_stream_is_refused_and_unchanged(text, tmp_path, monkeypatch):
    (tmp_path / "out/empty").mkdir(parents=True)
    (tmp_path / "out/mine").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path / "out/empty")
    for out, found in (("out", "a folder with other files"), ("loop", "the target of a"), ("out/empty", "the current")):
        with pytest.raises(AlmaError, match=f"found {found}"):
            create(text, tmp_path / out)
    with pytest.raises(AlmaError, match="expected a stream for --append, found no stream"):
        run(text, "--out", tmp_path / "stream", "--append", "--megabatches", 1)
    assert (tmp_path / "out/mine").read_text() == "mine"


def test_append_adds_megabatches_changes_no_other_file_and_does_nothing_the_second_time(stream, text, tmp_path, capsys):
    before = files_of(stream.root, without="stream.json")
    later = make_documents(100, seed=9)
    (tmp_path / "later.txt").write_text("\n\n".join(later + make_documents(400)[:50]))
    (stream.root / "megabatch-003").mkdir()  # as after a killed run
    (stream.root / "megabatch-003/train.bin").write_text("half")
    append = [tmp_path / "later.txt", "--out", stream.root, "--append", "--megabatches", 2]
    assert run(*append) == 0
    longer = Stream.open(stream.root)
    longer.verify([split.name for split in longer.splits])
    assert longer.num_megabatches == 5
    assert before.items() <= files_of(stream.root).items()
    assert longer.fingerprint_of_first(3) == stream.fingerprint
    assert sorted(texts_of(longer, "megabatch-003/train") + texts_of(longer, "megabatch-004/train")) == sorted(later)
    assert longer.history[1]["num_duplicates"] == 50
    capsys.readouterr()
    assert run(*append) == 0
    create(text, stream.root)
    assert capsys.readouterr().out.count("nothing to do") == 2
    assert Stream.open(stream.root) == longer


def test_appending_reads_the_manifest_under_the_lock_and_does_not_write_through_a_link(stream, tmp_path, monkeypatch):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"{name * 3} {number} " * 5 for number in range(60)))
    append, enter = ("--out", stream.root, "--append", "--megabatches", 1), module.work_folder

    def append_another_first(*arguments):  # Another command starts before this command changes the manifest.
        monkeypatch.setattr(module, "work_folder", enter)
        assert run(tmp_path / "a.txt", *append) == 0
        return enter(*arguments)

    monkeypatch.setattr(module, "work_folder", append_another_first)
    assert run(tmp_path / "b.txt", *append) == 0
    longer = Stream.open(stream.root)
    longer.verify([split.name for split in longer.splits])
    assert [record["inputs"][0]["name"] for record in longer.history] == ["text.txt", "a.txt", "b.txt"]
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/train.bin").write_text("mine")
    (stream.root / "megabatch-005").symlink_to(tmp_path / "precious")
    with pytest.raises(AlmaError, match="at megabatch-005, found a symbolic link"):
        run(tmp_path / "c.txt", *append)
    assert (tmp_path / "precious/train.bin").read_text() == "mine" and Stream.open(stream.root) == longer


def write_dated(path: Path, months: dict[str, int], seed: int = 0) -> Path:
    """Write JSON lines with a date, some documents of each month, in no order."""
    records = [
        {"text": text, "date": f"{month}-0{len(text) % 9 + 1}"}
        for at, (month, count) in enumerate(months.items())
        for text in make_documents(count, seed + at)
    ]
    random.Random(seed).shuffle(records)
    path.write_text("\n".join(map(json.dumps, records)))
    return path


MONTHS = {"2024-10": 90, "2024-09": 60, "2024-11": 70}


def test_each_month_is_a_mega_batch_and_held_out_text_is_from_all_months(tmp_path, capsys):
    given = write_dated(tmp_path / "posts.jsonl", MONTHS)
    by_month = ["--by", "date", "--period", "month"]
    assert run(given, *by_month, "--out", tmp_path / "stream", "--vocab-size", 300, "--test-bytes", 5400) == 0
    assert "mega-batches 0 to 2: 2024-09, 2024-10, 2024-11" in capsys.readouterr().out
    stream = Stream.open(tmp_path / "stream")
    month_of = {record["text"]: record["date"][:7] for record in map(json.loads, given.read_text().splitlines())}
    for number, month in enumerate(sorted(MONTHS)):
        assert {month_of[text] for text in texts_of(stream, f"megabatch-{number:03d}/train")} == {month}
    assert len({month_of[text] for text in held_out_texts(stream)}) > 1
    later = write_dated(tmp_path / "later.jsonl", {"2024-12": 40}, seed=9)
    undated = write_dated(tmp_path / "undated.jsonl", {"2025-02": 40}, seed=7)
    assert run(undated, "--megabatches", 1, "--out", stream.root, "--append") == 0
    assert run(later, *by_month, "--out", stream.root, "--append") == 0
    assert run(later, *by_month, "--out", stream.root, "--append") == 0  # the same command does nothing
    again = write_dated(tmp_path / "again.jsonl", {"2024-12": 20, "2025-01": 20}, seed=5)
    with pytest.raises(AlmaError, match=r"--by date: .* has groups: 2024-12 \(2024-12 is megabatch-004/train\)"):
        run(again, *by_month, "--out", stream.root, "--append")
    assert Stream.open(stream.root).num_megabatches == 5


def test_integer_groups_are_in_numerical_order_and_repeated_text_stays_in_the_first(tmp_path):
    documents, old = make_documents(80), {*make_documents(40)}
    records = [{"text": text, "round": 10} for text in documents] + [{"text": text, "round": 2} for text in old]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert run(tmp_path / "a.jsonl", "--by", "round", "--out", tmp_path / "stream", "--vocab-size", 300) == 0
    stream = Stream.open(tmp_path / "stream")
    assert stream.history[0]["groups"] == ["2", "10"]
    first, second = (set(texts_of(stream, split_name(t))) for t in range(2))
    assert first < old and not old & second


def test_by_is_refused_for_plain_text_and_too_many_mega_batches_in_any_way(stream, text, tmp_path, monkeypatch):
    with pytest.raises(AlmaError, match=r"--by date: .*text\.txt is plain text, which has no fields"):
        run(text, "--by", "date", "--out", tmp_path / "new")
    given = write_dated(tmp_path / "posts.jsonl", MONTHS)
    monkeypatch.setattr("data_prep.text.steps.MAX_MEGABATCHES", 2)
    with pytest.raises(AlmaError, match=r"--by: expected at most 2 values \(mega-batches\), found 3"):
        run(given, "--by", "date", "--period", "month", "--out", tmp_path / "new")
    with pytest.raises(AlmaError, match=r"--append: expected at most 2 mega-batches, found 4 \(1 new\); append fewer"):
        run(given, "--out", stream.root, "--append", "--megabatches", 1)


def near_copies(documents: list[str]) -> list[str]:
    """Return the documents with additional words, other white space, capitals and punctuation."""
    return [f"{document.upper().replace(' ', ',  ')} copied {number}." for number, document in enumerate(documents)]


@pytest.fixture
def copied(tmp_path):
    """A file of 400 documents of 30 words, with a near-copy of each."""
    documents = [" ".join(random.Random(number).choices(WORDS, k=30)) for number in range(400)]
    (tmp_path / "copied.txt").write_text("\n\n".join(documents + near_copies(documents)))
    return tmp_path / "copied.txt"


def test_near_copies_of_held_out_text_are_dropped_counted_and_listed(copied, tmp_path, capsys):
    stream = create(copied, tmp_path / "stream", "--holdout-bytes", 2000)
    held_out, trained = set(), set()
    for split in stream.splits:
        texts = {re.sub(" copied.*|,", "", text.lower()).replace("  ", " ") for text in texts_of(stream, split.name)}
        (trained if split.name.endswith("/train") else held_out).update(texts)
    assert trained and not held_out & trained
    record = stream.history[0]
    assert sum(split.num_documents for split in stream.splits) + record["num_contaminated"] == 800
    assert 0 < record["num_contaminated"] == len(record["contaminated"]) <= len(held_out)
    assert sum(each["bytes"] for each in record["contaminated"]) == record["contaminated_bytes"]
    assert len(record["contaminated"][0]["ngram"].split()) == 13
    assert f"{record['num_contaminated']} documents" in capsys.readouterr().out
    assert stream.decontaminated == 13


@pytest.mark.parametrize("num", [14, 7])
def test_a_licence_of_most_training_documents_does_not_count(num, tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.text.documents.PIECE_SIZE", 1000)
    licensed = [f"{' '.join(WORDS)} {text} {text}" for text in make_documents(num)]
    (tmp_path / "text.txt").write_text("\n\n".join(licensed))
    later = [f"{' '.join(WORDS)} {' '.join(random.Random(each).choices(WORDS, k=200))}" for each in range(2)]
    (tmp_path / "later.txt").write_text("\n\n".join(later + make_documents(20, seed=5)))
    one_each = ["--valid-bytes", "1", "--test-bytes", "1"]
    stream = create(tmp_path / "text.txt", tmp_path / "stream", *one_each)
    assert stream.history[0]["num_contaminated"] == 0
    assert run(tmp_path / "later.txt", "--out", stream.root, "--append", "--megabatches", 1) == 0
    assert Stream.open(stream.root).history[1]["num_contaminated"] == 0


def test_text_in_three_of_seven_new_documents_is_not_in_half_of_them(stream, tmp_path):
    quote = max(texts_of(stream, "test"), key=len)
    documents = sorted(make_documents(20, seed=5), key=len)[-7:]
    (tmp_path / "later.txt").write_text("\n\n".join([f"{quote} {text}" for text in documents[:3]] + documents[3:]))
    assert run(tmp_path / "later.txt", "--out", stream.root, "--append", "--megabatches", 1) == 0
    assert Stream.open(stream.root).history[1]["num_contaminated"] == 3


def test_the_stream_does_not_depend_on_pieces_workers_or_a_pipe(copied, tmp_path, monkeypatch):
    more = ["--holdout-bytes", "3%"]
    one = create(copied, tmp_path / "one", *more)
    monkeypatch.setattr("data_prep.text.documents.PIECE_SIZE", 30_000)
    command = ["--out", str(tmp_path / "two"), "--megabatches", "3", "--vocab-size", "300", "--workers", "2", *more]
    assert main([str(copied), *command]) == 0
    assert Stream.open(tmp_path / "two") == replace(one, root=tmp_path / "two")
    command[1] = str(tmp_path / "piped")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=copied.open("rb")))
    assert main(["-", *command]) == 0
    one, two, piped = (files_of(tmp_path / name, without="stream.json") for name in ("one", "two", "piped"))
    assert one == two == piped


def test_append_drops_copies_of_any_held_out_text_and_holds_out_parts_of_the_same_size(text, tmp_path):
    stream = create(text, tmp_path / "stream", "--holdout-bytes", 3600)
    assert all(3600 <= stream.split(split_name(t, "holdout")).num_bytes < 4400 for t in range(3))
    held_out = [text for name in ("test", "megabatch-001/holdout") for text in texts_of(stream, name)]
    copies = near_copies([text for text in held_out if len(text.split()) > 20])
    (tmp_path / "later.txt").write_text("\n\n".join(copies + make_documents(100, seed=9)))
    assert run(tmp_path / "later.txt", "--out", stream.root, "--append", "--megabatches", 1) == 0
    longer = Stream.open(stream.root)
    assert longer.fingerprint_of_first(3) == stream.fingerprint != longer.fingerprint
    assert longer.num_megabatches == 4 and 3600 <= longer.split(split_name(3, "holdout")).num_bytes < 4400
    assert not {*copies} & {*texts_of(longer, "megabatch-003/train")}
    of_month = texts_of(longer, "megabatch-003/holdout")
    (tmp_path / "again.txt").write_text("\n\n".join(near_copies(of_month) + make_documents(50, seed=11)))
    assert run(tmp_path / "again.txt", "--out", stream.root, "--append", "--megabatches", 1) == 0
    trained = {text.split(" COPIED")[0] for text in texts_of(Stream.open(stream.root), "megabatch-004/train")}
    assert not trained & {text.upper().replace(" ", ",  ") for text in of_month if len(text.split()) > 12}


def test_a_mega_batch_without_remaining_documents_is_refused_and_a_damaged_test_set_too(stream, text, tmp_path):
    copies = near_copies([text for text in held_out_texts(stream) if len(text.split()) > 20][:5])
    (tmp_path / "later.txt").write_text("\n\n".join(copies))
    message = r"^megabatch-003/train: no document is left; .* 5 dropped because .* or --no-decontaminate$"
    with pytest.raises(AlmaError, match=message):
        run(tmp_path / "later.txt", "--out", stream.root, "--append", "--megabatches", 1)
    assert Stream.open(stream.root).num_megabatches == 3
    with pytest.raises(AlmaError, match=r"^megabatch-004/train: no document is left; .* 5 duplicates"):
        run(*[tmp_path / "later.txt"] * 2, "--out", stream.root, "--append", "--one-per-input")
    assert run(tmp_path / "later.txt", "--out", stream.root, "--append", "--megabatches", 1, "--no-decontaminate") == 0
    (stream.root / "test.bin").write_bytes(b"")
    with pytest.raises(AlmaError, match=r"test\.bin: expected [\d,]+ bytes .*, found 0"):
        run(tmp_path / "text.txt", "--out", stream.root, "--append", "--megabatches", 1)


def held_out_texts(stream: Stream) -> list[str]:
    return texts_of(stream, "valid") + texts_of(stream, "test")


def test_one_per_input_keeps_the_order_of_the_inputs_and_trains_the_tokenizer_on_the_first(tmp_path):
    for number, letters in enumerate(("qqq", "qqq", "gra")):
        documents = [f"input{number} {each.replace('gra', letters)}" for each in make_documents(60, seed=number)]
        (tmp_path / f"{number}.txt").write_text("\n\n".join(documents))
    inputs = [tmp_path / f"{number}.txt" for number in (2, 0, 1)]
    assert run(*inputs, "--one-per-input", "--out", tmp_path / "stream", "--vocab-size", 400) == 0
    stream = Stream.open(tmp_path / "stream")
    symbols = "".join(StreamTokenizer.open(stream.root).symbols)
    assert "gra" in symbols and "qq" not in symbols
    for megabatch, number in enumerate((2, 0, 1)):
        texts = texts_of(stream, stream.megabatch(megabatch).name)
        assert texts and all(text.startswith(f"input{number} ") for text in texts)
    assert len({text.split()[0] for text in texts_of(stream, "test")}) == 3


def test_a_given_tokenizer_is_used_and_copied_and_duplicates_can_be_kept(stream, text, tmp_path):
    more = ["--keep-duplicates", "--no-decontaminate", "--tokenizer", stream.root / "tokenizer/tokenizer.json"]
    assert run(text, "--out", tmp_path / "second", "--megabatches", 2, *more) == 0
    second = Stream.open(tmp_path / "second")
    # checkpoints fit both streams
    assert (second.tokenizer, second.dictionary_sha256) == (stream.tokenizer, stream.dictionary_sha256)
    assert second.history[0]["num_duplicates"] == 0
    assert sum(split.num_documents for split in second.splits) == 420
    (stream.root / "tokenizer/config.json").write_text('{"vocab_size": 400}')  # of a model, copied to the stream
    with pytest.raises(AlmaError, match="was made with --tokenizer"):
        run(text, "--out", tmp_path / "second", "--megabatches", 2, *more)


def test_a_tokenizer_that_loses_text_is_refused_or_noted(text, tmp_path, capsys):
    vocabulary = {letter: number for number, letter in enumerate("aei ")}
    content = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    (tmp_path / "few.json").write_text(json.dumps(content))
    words = [text, "--out", tmp_path / "stream", "--megabatches", 2, "--tokenizer", tmp_path / "few.json"]
    with pytest.raises(AlmaError, match=r"few\.json: encodes only [\d,]+ of [\d,]+ characters"):
        run(*words)
    vocabulary |= {letter: number for number, letter in enumerate(sorted({*text.read_text()} - {"b"}))}
    (tmp_path / "few.json").write_text(json.dumps(content))
    run(*words)
    assert "held-out documents lose letters or digits" in capsys.readouterr().err


def test_a_name_that_is_not_utf_8_is_recorded_with_escapes(text, tmp_path):
    odd = shutil.copyfile(text, Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.txt")))
    for _ in range(2):
        assert create(odd, tmp_path / "stream").history[0]["inputs"][0]["name"] == "a\\xff.txt"


def test_no_file_remains_after_bad_input(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.text.documents.PIECE_SIZE", 30_000)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_bytes(b"good\n\n" * 30_000 + b"b\xffad\n")
    with pytest.raises(AlmaError, match=r"a\.txt, line 60001: expected UTF-8 text, found byte 0xff"):
        main([str(tmp_path / "in"), "--out", str(tmp_path / "s"), "--megabatches", "1", "--workers", "2"])
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("content", ["", "short", "\n\n".join(make_documents(500))])
def test_a_file_that_changes_while_it_is_read_is_refused(text, tmp_path, monkeypatch, content):
    assign = Work.assign
    monkeypatch.setattr(Work, "assign", lambda work: (assign(work), text.write_text(content)))
    with pytest.raises(AlmaError, match=r"^.*text\.txt: the file changed while it was read"):
        create(text, tmp_path / "stream")


def test_a_signal_leaves_no_file_and_the_next_run_succeeds_after_a_killed_one(text, tmp_path, no_patience):
    command = [sys.executable, "-m", "data_prep.text.command", "-", "--out", str(tmp_path / "stream")]
    for number in (signal.SIGTERM, signal.SIGKILL):
        assert os.listdir(tmp_path) == ["text.txt"]
        how = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([*command, "--megabatches", "3"], **how)
        assert wait_until(lambda: [*tmp_path.glob(".stream.building/*/input-0")])
        with pytest.raises(AlmaError, match="another alma-prep-text holds the lock"):
            create(text, tmp_path / "stream")
        process.send_signal(number)
        complaints = process.communicate(timeout=600)[1]
        is_killed = number == signal.SIGKILL
        assert (process.returncode, complaints.count("\n")) == ((-number, 0) if is_killed else (128 + number, 1))
    create(text, tmp_path / "stream").verify(["valid", "test"])
    assert sorted(os.listdir(tmp_path)) == ["stream", "text.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--out", "s"], "give --megabatches B, --one-per-input"),
        ([*ONE, "--vocab-size", "5"], "at least 256"),
        ([*ONE, "--tokenizer", "t", "--vocab-size", "500"], "remove --vocab-size or --tokenizer"),
        ([*ONE, "--by", "date"], "--by date: the values of this field determine"),
        ([*ONE, "--period", "month"], "give --by NAME"),
        ([*ONE, "--no-decontaminate", "--decontaminate-ngram", "5"], "not allowed with --decontaminate-ngram"),
        (["a", "--out", "s", "--by", "date", "--format", "lines"], "--by date: --format lines has no fields"),
        ([*ONE, "--append", "--holdout-bytes", "30"], "--holdout-bytes: --append uses the setting"),
        (["a", "b", "--out", "s", "--megabatches", "3", "--one-per-input"], "--one-per-input makes 2"),
        (["-", "-", "--out", "s", "--megabatches", "3"], "give - once"),
        (["a"] * 65_536 + ["--out", "s", "--megabatches", "1"], "expected at most 65535 inputs, found 65536"),
        ([*ONE, "--field", "body", "--format", "lines"], "lines has no fields;"),
        ([*ONE, "--out", ""], "argument --out: expected a path, found an empty string"),
    ],
)
def test_usage_errors_end_with_status_2(arguments, message, capsys):
    assert message in usage_error(capsys, main, arguments)
