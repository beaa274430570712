"""Inputs: every compression gives the same text, and errors name broken files."""

import bz2
import gzip
import json
import lzma
import os
import struct
import threading
import zlib
from pathlib import Path

import pytest

from data_prep.text.documents import FilePart, documents_of, find_sources
from fairseq_alma.errors import AlmaError

DOCUMENTS = [f"document {number} with é and some words {number * 7919 % 1000}" for number in range(3000)]
TEXT = "\n\n".join(DOCUMENTS).encode()


def zstandard(content: bytes) -> bytes:
    return pytest.importorskip("zstandard", reason="zstandard is not installed").ZstdCompressor().compress(content)


COMPRESSIONS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard}


def read(path: Path, form="auto", field="text") -> list[str]:
    sources = find_sources([str(path)], form, field, Path("unused"))
    return [document for source in sources for block in FilePart(source).blocks() for document in documents_of(block)]


def parts_of(suffix) -> list[bytes]:
    """Return the text, compressed in two parts."""
    half = len(TEXT) // 2
    return [COMPRESSIONS[suffix](part) for part in (TEXT[:half], TEXT[half:])]


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_compressed_text_in_one_part_or_several_with_padding_is_read_like_plain_text(tmp_path, suffix):
    padding = bytes(4) * 100
    parts = parts_of(suffix)
    for content in (COMPRESSIONS[suffix](TEXT), b"".join(parts), b"".join(part + padding for part in parts)):
        (tmp_path / f"a.txt.{suffix}").write_bytes(content)
        assert read(tmp_path / f"a.txt.{suffix}") == DOCUMENTS
    (tmp_path / "a.txt").write_text("BZh is no compressed text")
    assert read(tmp_path / "a.txt") == ["BZh is no compressed text"]


def with_damaged_middle(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes(255 - byte for byte in content[middle : middle + 16]) + content[middle + 16 :]


@pytest.mark.parametrize("suffix", COMPRESSIONS)
@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (lambda first, second: with_damaged_middle(first), "(: broken|, line)"),
        (lambda first, second: first + b"\1" + second[1:], r": broken \w+ data after "),
        (lambda first, second: first + second[:20], r": broken \w+ data after "),
        (lambda first, second: b"plain text", r": expected (gzip|bzip2|xz|zstandard) data, found"),
    ],
    ids=["damaged", "second part damaged", "second part cut off", "plain"],
)
def test_incomplete_compressed_text_is_refused(tmp_path, suffix, damaged, message):
    (tmp_path / f"a.txt.{suffix}").write_bytes(damaged(*parts_of(suffix)))
    with pytest.raises(AlmaError, match=rf"a\.txt\.{suffix}{message}"):
        read(tmp_path / f"a.txt.{suffix}")


def test_an_xz_file_that_needs_gigabytes_of_memory_is_refused(tmp_path):
    content = bytearray(lzma.compress(b"text", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 16}]))
    content[16] = 40  # of the block's header: a dictionary of 4 GiB
    content[20:24] = zlib.crc32(content[12:20]).to_bytes(4, "little")
    (tmp_path / "a.txt.xz").write_bytes(content)
    with pytest.raises(AlmaError, match=r"broken xz data after 0 bytes of content \(Memory usage limit exceeded\)"):
        read(tmp_path / "a.txt.xz")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "A.JSONL.GZ", "a.txt", "a"])
def test_the_name_identifies_json_lines_and_json_lines_of_another_name_are_refused(tmp_path, name):
    content = "\n".join(json.dumps({"body": document}) for document in DOCUMENTS).encode()
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content if name == "a.txt" else gzip.compress(content))
    if "json" in name.lower():
        assert read(tmp_path / name, field="body") == DOCUMENTS
    else:
        with pytest.raises(AlmaError, match="give --format jsonl, or"):
            read(tmp_path / name)
    assert read(tmp_path / name, "lines")[0] == content.decode().partition("\n")[0]


def test_parquet_is_read_by_its_column(tmp_path):
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(pyarrow.table({"id": range(3000), "body": DOCUMENTS}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", field="body") == DOCUMENTS
    with pytest.raises(AlmaError, match="expected one column 'text', found columns 'id', 'body'"):
        read(tmp_path / "a.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:1000])
    with pytest.raises(AlmaError, match=r"cut\.parquet: broken Parquet data"):
        read(tmp_path / "cut.parquet", field="body")
    table = pyarrow.Table.from_arrays([pyarrow.array(["one"])] * 2, names=["text", "text"])
    parquet.write_table(table, tmp_path / "2.parquet")
    with pytest.raises(AlmaError, match=r"2\.parquet: expected one column 'text', found columns 'text', 'text'"):
        read(tmp_path / "2.parquet")


def test_splits_of_a_data_set_are_not_mixed(tmp_path):
    for name in ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "validation-00000-of-00001.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}')
    with pytest.raises(AlmaError, match="found the splits train, validation; give"):
        read(tmp_path)
    assert len(read(tmp_path, "file")) == 3


def test_files_about_a_data_set_are_ignored_unless_there_are_no_others(tmp_path, capsys):
    for name in ("README.md", "LICENSE", "dataset_infos.json", "LICENSE-apache.txt", "notes.txt", "notice_1.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    assert read(tmp_path) == ["text of notes.txt", "text of notice_1.txt"]
    assert "2 files used, 4 ignored" in capsys.readouterr().err
    assert read(tmp_path / "README.md") == ["text of README.md"]


def test_zstandard_frames_of_all_kinds_are_read_in_any_order(tmp_path):
    first, second = parts_of("zst")
    skippable = struct.pack("<II", 0x184D2A53, 7) + b"skipped"
    empty = zstandard(b"")
    for content in (
        skippable + first + skippable + empty + second,
        empty + first + bytes(100) + second + skippable,
        first + empty + empty + skippable + skippable + second + bytes(4),
    ):
        (tmp_path / "a.txt.zst").write_bytes(content)
        assert read(tmp_path / "a.txt.zst") == DOCUMENTS


def test_a_folder_represents_its_files_in_the_order_of_their_names_without_linked_folders(tmp_path, capsys):
    for name in ("in/b.txt", "in/a/2.txt", "in/a/1.txt", "in/.hidden", "in/a/.git/x", "elsewhere/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "in/more").symlink_to(tmp_path / "elsewhere")
    assert read(tmp_path / "in") == ["in/a/1.txt", "in/a/2.txt", "in/b.txt"]
    assert "in/more: this link to a folder is ignored" in capsys.readouterr().err


def test_a_pipe_is_copied_and_read_like_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(gzip.compress(TEXT),))
    writer.start()
    (source,) = find_sources([str(tmp_path / "pipe")], "auto", "text", tmp_path)
    writer.join()
    assert (source.form, source.is_copy) == ("text", True)
    for _ in range(2):
        assert [document for block in FilePart(source).blocks() for document in documents_of(block)] == DOCUMENTS


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("pipe nothing", "nothing: expected a file or folder, found nothing"),
        ("pipe loop", "loop: expected a file or folder, found nothing"),
        ("pipe ", "INPUT '': expected a file or folder, found nothing"),
        ("pipe /dev/zero", "/dev/zero: expected a file, folder or pipe, found a device"),
        ("-", "INPUT -: standard input is closed; give a file"),
    ],
)
def test_an_input_that_cannot_be_read_is_refused_before_a_pipe_is_read(tmp_path, monkeypatch, inputs, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", None)
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    with pytest.raises(AlmaError, match=message):
        find_sources(inputs.split(" "), "auto", "text", tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("nothing")])
def test_a_pipe_or_a_broken_link_in_a_folder_is_refused(make, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("text")
    make(tmp_path / "in/b.txt")
    with pytest.raises(AlmaError, match=r"in/b\.txt: expected a regular file, found a special file or a broken link"):
        read(tmp_path / "in")
