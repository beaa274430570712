"""Blocks, parts and pieces: the documents are the same, each once and in order, for any cuts of the input."""

import datetime
import gzip
import itertools
import json
import random
import re
from pathlib import Path

import pytest

from data_prep.text import documents as module
from data_prep.text.documents import Block, FilePart, Source, cut_into_pieces, documents_and_groups_of, documents_of
from fairseq_alma.errors import AlmaError

TEXT = "\ufeffone\nline\r\n\r\ntwo\n \t \n\n\nthree é\n\u3000\nfour\n\n\n"


def block(form, content, start=0, path=Path("unread"), **groups):
    return Block(Source(path, "input", 0, form, "text", **groups), content, start)


def documents_in(parts) -> list[str]:
    return [document for part in parts for block in part.blocks() for document in documents_of(block)]


@pytest.mark.parametrize(
    ("form", "content", "expected"),
    [
        ("text", TEXT.encode(), ["one\nline", "two", "three é", "four"]),
        ("file", b"\xef\xbb\xbfone\r\n\n two\n", ["one\n\n two"]),
        ("lines", b"\xef\xbb\xbfone\r\n\n two \nthree", ["one", "two", "three"]),
        ("jsonl", b'\xef\xbb\xbf{"text": "a\\n\\nb"}\n\n{"text": " c "}\n{"text": ""}', ["a\n\nb", "c"]),
    ],
)
def test_documents_of_each_form_with_a_byte_order_mark_and_any_line_feed(form, content, expected):
    assert documents_of(block(form, content)) == expected


@pytest.mark.parametrize("form", ["text", "lines", "file"])
@pytest.mark.parametrize("block_size", [1, 3, 1000])
def test_each_document_is_in_one_piece_wherever_blocks_and_pieces_are_cut(tmp_path, monkeypatch, form, block_size):
    monkeypatch.setattr(module, "BLOCK_SIZE", block_size)
    num_pieces = 0
    letters = ["a", "é", "\n", "\n\n", " ", "\r\n", "\t", "\u3000"]  # so that boundaries are everywhere
    for seed in range(12):
        path = tmp_path / f"{seed}.txt"
        path.write_bytes("".join(random.Random(seed).choices(letters, k=60)).encode())
        source = Source(path, "a", 0, form, "text")
        expected = documents_of(Block(source, path.read_bytes()))
        for width in (1, 2, 5, 17, 100):
            monkeypatch.setattr(module, "PIECE_SIZE", width)
            parts = [part for piece in cut_into_pieces([source]) for part in piece]
            num_pieces += len(parts)
            assert documents_in(parts) == expected
            assert b"".join(block.content for part in parts for block in part.blocks()) == path.read_bytes()
    assert num_pieces == 12 * 5 if form == "file" else num_pieces > 12 * 5 * 2


def test_a_document_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_SIZE", 10)
    monkeypatch.setattr(module, "MAX_DOCUMENT_SIZE", 50)
    (tmp_path / "a.txt").write_text("short\n\n" + "long\n" * 100)
    with pytest.raises(AlmaError, match=r"a\.txt, line 2: expected documents of at most"):
        list(FilePart(Source(tmp_path / "a.txt", "a.txt", 0, "text", "text")).blocks())


@pytest.mark.parametrize(
    ("form", "content", "message"),
    [
        ("text", b"a\n\nb\n\xff\n", "input, line 13: expected UTF-8 text, found byte 0xff"),
        ("text", b"a\n\x00\n", "input, line 11: expected UTF-8 text, found binary data"),
        ("jsonl", b'{"text": "a"}\n{"body": "b"}\n', "input, line 11: expected a field 'text', found fields 'body'"),
        ("jsonl", b'{"text": "a"}\n\n{"text"\n', "input, line 12: expected one JSON object on each line"),
        ("jsonl", b"[1]\n", "input, line 10: expected one JSON object on each line, found a JSON list"),
        ("jsonl", b'{"text": 5}\n', "input, line 10: expected a string in field 'text', found 5"),
        ("jsonl", b"[" * 100_000, "found an invalid line"),
        ("parquet", [("a",), (None,)], "input, row 20: expected a string in field 'text', found None"),
    ],
)
def test_an_error_names_the_line_of_the_decompressed_file(form, content, message, tmp_path):
    path, before = tmp_path / "a.gz", b"a\n" * 9
    path.write_bytes(gzip.compress(before + (content if isinstance(content, bytes) else b"")))
    with pytest.raises(AlmaError, match=re.escape(message)):
        documents_of(block(form, content, len(before), path))


def test_empty_documents_have_no_group():
    dates = {"a": "2024-05-17T10:00", " ": "x", "b": "2023-12-31"}
    content = "\n".join(json.dumps({"text": text, "date": date}) for text, date in dates.items()).encode()
    for period, expected in (("year", ["2024", "2023"]), ("month", ["2024-05", "2023-12"])):
        found = documents_and_groups_of(block("jsonl", content, by="date", period=period))
        assert found == [*zip("ab", expected, strict=True)]
    rows = [("a", datetime.date(2024, 5, 17)), ("", None), ("b", 7)]
    assert documents_and_groups_of(block("parquet", rows, by="when")) == [("a", "2024-05-17"), ("b", "7")]


@pytest.mark.parametrize(
    ("value", "period", "needed"),
    [
        *((value, None, "integer, or .* characters") for value in (None, True, 1.5, "", "a\nb", ["a"], "x" * 101)),
        *((value, "month", "a date with a month") for value in ("2024", "2024-13", "17.05.2024", 202405, "2024-051")),
        (1_500_000_000, "year", "a date with a year"),
    ],
)
def test_a_value_that_is_not_a_group_is_refused_with_its_row(value, period, needed):
    given = block("parquet", [("a", value)], 5, by="date", period=period)
    message = rf"input, row 6: expected .*{needed}.* in field 'date', found .*; correct the record, or give"
    with pytest.raises(AlmaError, match=message):
        documents_and_groups_of(given)


def test_row_groups_are_parts_and_keep_their_rows(tmp_path, monkeypatch):
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    rows = [f"document {number}" for number in range(900)]
    parquet.write_table(pyarrow.table({"text": [*rows, 5 * "x"]}), tmp_path / "a.parquet", row_group_size=100)
    source = Source(tmp_path / "a.parquet", "a.parquet", 0, "parquet", "text")
    monkeypatch.setattr(module, "PIECE_SIZE", source.stamp[0] // 5 + 1)
    pieces = cut_into_pieces([source])
    assert len(pieces) == 5 and documents_in(itertools.chain(*pieces)) == [*rows, 5 * "x"]
    assert [next(piece[0].blocks()).start for piece in pieces] == [0, 200, 400, 600, 800]
