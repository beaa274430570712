"""Pieces: wherever they are cut, their documents are those of the files, each once and in order."""

import gzip
import itertools
import json
import random

import pytest

from data_prep.text import pieces as pieces_module
from data_prep.text.passes import unpack
from data_prep.text.pieces import Part, Source, cut_into_pieces, documents_of
from fairseq_alma.errors import AlmaError


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
