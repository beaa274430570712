"""Blocks and documents: the cut of a block never changes what the documents are."""

import datetime
import json
import re

import pytest

from data_prep.text import pieces as pieces_module
from data_prep.text.pieces import Block, Group, Source, documents_of, groups_of
from fairseq_alma.errors import AlmaError

TEXT = "\ufeffone\nline\r\n\r\ntwo\n \t \n\n\nthree é\n\u3000\nfour\n\n\n"


def block(form, content, first_line=1):
    return Block("input", form, "text", first_line, content)


def test_documents_are_separated_by_lines_that_look_empty():
    assert documents_of(block("text", TEXT.encode())) == ["one\nline", "two", "three é", "four"]


def test_lines_are_documents_where_asked_for():
    assert documents_of(block("lines", b"one\r\n\n two \nthree")) == ["one", "two", "three"]


def test_json_lines_give_their_field_whole():
    content = "\n".join(json.dumps({"text": text}) for text in ("a\n\nb", " c ", "")) + "\n\n"
    assert documents_of(block("jsonl", content.encode())) == ["a\n\nb", "c"]


@pytest.mark.parametrize("form", ["text", "lines"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 1000])
def test_documents_do_not_depend_on_where_blocks_are_cut(tmp_path, monkeypatch, form, block_size):
    monkeypatch.setattr(pieces_module, "BLOCK_SIZE", block_size)
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    blocks = [block for block, _ in Source(tmp_path / "a.txt", "a.txt", 0, form, "text").blocks()]
    assert b"".join(block.content for block in blocks) == TEXT.encode()
    assert [document for block in blocks for document in documents_of(block)] == documents_of(
        block(form, TEXT.encode())
    )
    lines = [1 + TEXT.encode()[: sum(len(b.content) for b in blocks[:n])].count(b"\n") for n in range(len(blocks))]
    assert [block.first_line for block in blocks] == lines


def test_document_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces_module, "BLOCK_SIZE", 10)
    monkeypatch.setattr(pieces_module, "MAX_DOCUMENT_SIZE", 50)
    (tmp_path / "a.txt").write_text("short\n\n" + "long\n" * 100)
    with pytest.raises(AlmaError, match=r"a\.txt, line \d: a document of more than"):
        list(Source(tmp_path / "a.txt", "a.txt", 0, "text", "text").blocks())


@pytest.mark.parametrize(
    ("form", "content", "message"),
    [
        ("text", b"a\n\nb\n\xff\n", "input, line 13: byte 0xff is not UTF-8"),
        ("text", b"a\n\x00\n", "input, line 11: binary data"),
        ("jsonl", b'{"text": "a"}\n{"body": "b"}\n', "input, line 11: no field 'text', the fields are 'body'"),
        ("jsonl", b'{"text": "a"}\n\n{"text"\n', "input, line 12: not JSON"),
        ("jsonl", b"[1]\n", "input, line 10: a JSON list found"),
        ("jsonl", b'{"text": 5}\n', "input, line 10: 'text' is 5, it must be a text"),
        ("jsonl", b'{"text": "\\ud800"}\n', "half a surrogate pair"),
        ("jsonl", b"[" * 100_000, "not JSON"),
        ("parquet", ["a", None], "input, row 11: 'text' is None"),
    ],
)
def test_bad_content_is_named_with_its_line(form, content, message):
    with pytest.raises(AlmaError, match=re.escape(message)):
        documents_of(block(form, content, first_line=10))


def test_groups_are_those_of_the_documents_that_are_left():
    records = [
        {"text": "a", "date": "2024-05-17T10:00"},
        {"text": " ", "date": "x"},
        {"text": "b", "date": "2023-12-31"},
    ]
    content = "\n".join(map(json.dumps, records)).encode()
    for period, expected in (("year", ["2024", "2023"]), ("month", ["2024-05", "2023-12"])):
        one = Block("input", "jsonl", "text", 1, content, Group("date", period))
        assert documents_of(one) == ["a", "b"] and groups_of(one) == expected
    rows = Block(
        "input", "parquet", "text", 1, [("a", datetime.date(2024, 5, 17)), ("", None), ("b", 7)], Group("when")
    )
    assert documents_of(rows) == ["a", "b"] and groups_of(rows) == ["2024-05-17", "7"]


@pytest.mark.parametrize(
    ("value", "period", "needed"),
    [
        *((value, None, "a word or a whole number") for value in (None, True, 1.5, "", "a\nb", ["a"], "x" * 101)),
        *((value, "month", "a date with its month") for value in ("2024", "2024-13", "17.05.2024", 202405)),
    ],
)
def test_what_names_no_group_is_refused_with_its_line(value, period, needed):
    content = json.dumps({"text": "a", "date": value}).encode()
    with pytest.raises(AlmaError, match=rf"input, line 5: 'date' is .*, {needed}.* is needed; mend the record or --by"):
        groups_of(Block("input", "jsonl", "text", 5, content, Group("date", period)))
