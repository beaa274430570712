"""Pieces, blocks and documents: wherever the input is cut, its documents are the same, each once and in order."""

import datetime
import gzip
import itertools
import json
import random
import re

import pytest

from data_prep.text import pieces as pieces_module
from data_prep.text.passes import unpack
from data_prep.text.pieces import Block, Group, Part, Source, cut_into_pieces, documents_of, groups_of
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


def documents_in(parts) -> list[str]:
    return [document for part in parts for block, _ in part.blocks() for document in documents_of(block)]


def odd_text(seed: int) -> bytes:
    """Few letters and much white space of all kinds, so that boundaries stand everywhere."""
    generator = random.Random(seed)
    return "".join(generator.choices(["a", "é", "\n", "\n\n", " ", "\r\n", "\t", "\u3000"], k=60)).encode()


@pytest.mark.parametrize("form", ["text", "lines"])
@pytest.mark.parametrize("block_size", [1, 3, 1000])
def test_each_document_is_in_one_part_wherever_parts_are_cut(tmp_path, monkeypatch, form, block_size):
    monkeypatch.setattr(pieces_module, "BLOCK_SIZE", block_size)
    for seed in range(20):
        path = tmp_path / f"{seed}.txt"
        path.write_bytes(odd_text(seed))
        source = Source(path, "a", 0, form, "text")
        whole = documents_in([Part(source)])
        for width in (1, 2, 5, 17):
            bounds = [*range(0, source.size, width), None]
            parts = [Part(source, start, end) for start, end in itertools.pairwise(bounds)]
            assert documents_in(parts) == whole
            assert b"".join(block.content for part in parts for block, _ in part.blocks()) == path.read_bytes()


def test_small_files_share_a_piece_and_large_ones_have_several(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces_module, "SMALLEST_PIECE", 1000)
    texts = {"a": "x\n\n" * 30, "b": "y\n\n" * 40, "c": "z\n\n" * 2000, "d": "end"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "e.gz").write_bytes(gzip.compress(random.Random(1).randbytes(3000).hex().encode()))
    sources = [Source(tmp_path / name, name, 0, "text", "text") for name in (*texts, "e.gz")]
    pieces = cut_into_pieces(sources)
    assert [len({part.source for part in piece.parts}) for piece in pieces] == [3, 1, 1, 1, 1, 1, 2]
    assert [part.end for part in pieces[-1].parts] == [None, None]  # what is compressed is not cut
    assert sum(piece.size for piece in pieces) == sum(source.size for source in sources)
    assert documents_in([part for piece in pieces for part in piece.parts]) == documents_in(map(Part, sources))


def test_a_message_names_the_line_of_the_file_not_of_the_piece(tmp_path):
    lines = [json.dumps({"text": "a"})] * 40 + ["no JSON"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    part = Part(Source(tmp_path / "a.jsonl", "a.jsonl", 0, "jsonl", "text"), 300, None)
    with pytest.raises(AlmaError, match=r"^a\.jsonl, line 41: not JSON"):
        documents_in([part])


def test_row_groups_are_parts_and_keep_their_rows(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [f"document {number}" for number in range(900)]
    parquet.write_table(pyarrow.table({"text": [*rows, 5 * "x"]}), tmp_path / "a.parquet", row_group_size=100)
    source = Source(tmp_path / "a.parquet", "a.parquet", 0, "parquet", "text")
    monkeypatch.setattr(pieces_module, "SMALLEST_PIECE", source.size // 4)
    pieces = cut_into_pieces([source])
    assert [len(piece.parts) for piece in pieces] == [2, 2, 1]
    assert documents_in([part for piece in pieces for part in piece.parts]) == [*rows, 5 * "x"]
    firsts = [next(part.blocks())[0].first_line for piece in pieces for part in piece.parts]
    assert firsts == [1, 201, 401, 601, 801]


def test_what_is_unpacked_is_what_is_read(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(odd_text(1)))
    source = Source(tmp_path / "a.gz", "a", 0, "text", "text")
    assert sum(size for size, _ in unpack((source, tmp_path / "kept/a"))) == source.size
    assert (tmp_path / "kept/a").read_bytes() == odd_text(1)
