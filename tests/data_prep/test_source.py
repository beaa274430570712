"""Inputs: every compression gives the same text, broken ones are named."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest

from data_prep.text.document import documents_of
from data_prep.text.source import find_sources
from fairseq_alma.errors import AlmaError

DOCUMENTS = [f"document {number} with é and some words {number * 7919 % 1000}" for number in range(3000)]
TEXT = "\n\n".join(DOCUMENTS).encode()


def zstandard(content: bytes) -> bytes:
    package = pytest.importorskip("zstandard", reason="zstandard is not installed")
    return package.ZstdCompressor().compress(content)


COMPRESSIONS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard}


def read(path: Path, form=None, field="text") -> list[str]:
    sources = find_sources([str(path)], form, field, Path("unused"))
    return [document for source in sources for block, _ in source.blocks() for document in documents_of(block)]


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_compressed_text_reads_like_plain_text(tmp_path, suffix):
    file = tmp_path / f"a.txt.{suffix}"
    file.write_bytes(COMPRESSIONS[suffix](TEXT))
    assert read(file) == DOCUMENTS


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_several_compressed_parts_in_one_file_are_all_read(tmp_path, suffix):
    half = len(TEXT) // 2
    file = tmp_path / f"a.txt.{suffix}"
    file.write_bytes(COMPRESSIONS[suffix](TEXT[:half]) + COMPRESSIONS[suffix](TEXT[half:]))
    assert read(file) == DOCUMENTS


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_compressed_file_that_is_cut_off_is_refused(tmp_path, suffix):
    content = COMPRESSIONS[suffix](TEXT)
    file = tmp_path / f"a.txt.{suffix}"
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(AlmaError, match=rf"a\.txt\.{suffix}: broken"):
        read(file)


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_compressed_file_with_a_damaged_middle_is_refused(tmp_path, suffix):
    content = bytearray(COMPRESSIONS[suffix](TEXT))
    middle = len(content) // 2
    content[middle : middle + 16] = bytes(255 - byte for byte in content[middle : middle + 16])
    file = tmp_path / f"a.txt.{suffix}"
    file.write_bytes(content)
    with pytest.raises(AlmaError, match=rf"a\.txt\.{suffix}: broken|a\.txt\.{suffix}, line"):
        read(file)


@pytest.mark.parametrize("content", [b"plain text", b""])
def test_file_that_is_not_compressed_as_its_name_says_is_refused(tmp_path, content):
    (tmp_path / "a.txt.xz").write_bytes(content)
    with pytest.raises(AlmaError, match=r"a\.txt\.xz: not xz data as its name says"):
        read(tmp_path / "a.txt.xz")


def test_json_lines_are_known_by_their_name_also_when_compressed(tmp_path):
    lines = "\n".join(json.dumps({"body": document}) for document in DOCUMENTS)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert read(tmp_path / "a.jsonl.gz", field="body") == DOCUMENTS


def test_parquet_is_read_by_its_column(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"id": range(3000), "body": DOCUMENTS}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", field="body") == DOCUMENTS
    with pytest.raises(AlmaError, match="no column 'text', the columns are 'id', 'body'"):
        read(tmp_path / "a.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:1000])
    with pytest.raises(AlmaError, match=r"cut\.parquet: broken Parquet data"):
        read(tmp_path / "cut.parquet", field="body")


def test_folder_stands_for_its_files_in_the_order_of_their_names(tmp_path):
    for name in ("b.txt", "a/2.txt", "a/1.txt", ".hidden", "a/.git/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == ["a/1.txt", "a/2.txt", "b.txt"]


def test_folder_without_files_and_missing_file_are_refused(tmp_path):
    with pytest.raises(AlmaError, match="no file in this folder"):
        read(tmp_path)
    with pytest.raises(AlmaError, match="no such file or folder"):
        read(tmp_path / "nothing")
