"""The manifest: fingerprints, and errors for damaged manifests and files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fairseq_alma.data.stream import MANIFEST, Split, Stream, StreamFile, TokenizerEntry, split_name, write_manifest
from fairseq_alma.errors import AlmaError

NAMES = (split_name(0), split_name(1), "valid", "test")


def write_stream(root: Path) -> Stream:
    splits = []
    for number, name in enumerate(NAMES):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        paths = [f"{name}.bin", f"{name}.idx"]
        for path in paths:
            (root / path).write_bytes(bytes([number]) * (number + 5))
        splits.append(Split(name, tuple(StreamFile.describe(root, path) for path in paths), num_documents=number))
    (root / "dict.txt").write_text("a 1\n")
    (root / "tokenizer.json").write_text("{}")
    tokenizer = TokenizerEntry.describe("tokenizers", 1, [StreamFile.describe(root, "tokenizer.json")])
    stream = Stream(root, "text", 1, tuple(splits), tokenizer, StreamFile.describe(root, "dict.txt"))
    write_manifest(stream, root / MANIFEST)
    return stream


def test_a_manifest_is_read_as_it_was_written_and_a_missing_split_is_refused_with_the_existing_ones(tmp_path):
    stream = write_stream(tmp_path)
    assert Stream.open(tmp_path) == stream
    assert stream.num_megabatches == 2
    assert stream.megabatch(1).num_documents == 1
    with pytest.raises(AlmaError, match="no mega-batch 2; give a number from 0 to 1"):
        stream.megabatch(2)
    with pytest.raises(AlmaError, match="no split 'tset'; choose from megabatch-000/train"):
        stream.split("tset")


def test_a_fingerprint_depends_on_content_and_not_on_the_folder(tmp_path):
    first, second = write_stream(tmp_path / "a"), write_stream(tmp_path / "b")
    assert first.fingerprint == second.fingerprint
    altered = replace(first.splits[0], num_words=7)
    assert replace(first, splits=(altered, *first.splits[1:])).fingerprint != first.fingerprint
    assert replace(first, history=({"command": "append"},)).fingerprint == first.fingerprint


def test_a_stream_with_held_out_parts_of_some_mega_batches_only_is_damaged(tmp_path):
    stream = write_stream(tmp_path)
    names = [split_name(t, "holdout") for t in range(2)]
    files = [tuple(StreamFile(f"{name}{suffix}", 1, "0" * 64) for suffix in (".bin", ".idx")) for name in names]
    whole = replace(stream, splits=(*stream.splits[:2], *map(Split, names, files), *stream.splits[2:]))
    write_manifest(whole, tmp_path / MANIFEST)
    assert Stream.open(tmp_path).has_holdouts
    write_manifest(replace(whole, splits=(*whole.splits[:3], *whole.splits[4:])), tmp_path / MANIFEST)
    with pytest.raises(AlmaError, match="no split megabatch-001/holdout"):
        Stream.open(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 1}, "expected format version 2, found 1 of fairseq_alma 0.2.0 or older; prepare"),
        ({"format_version": 7}, "expected format version 2, found 7; prepare"),
        ({"num_megabatches": 3}, r"damaged, expected 3 mega-batches as in num_megabatches, found 2"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path, changes, message):
    write_stream(tmp_path)
    manifest = tmp_path / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **changes}))
    with pytest.raises(AlmaError, match=message):
        Stream.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\2" * 6, r"expected 7 bytes as in stream\.json, found 6"),
        (b"\3" * 7, "expected sha256 .* found"),
        (None, "expected a file of 7 bytes .* found no file"),
    ],
)
def test_verify_names_the_file_that_differs(tmp_path, content, message):
    stream = write_stream(tmp_path)
    stream.verify(NAMES)
    file = tmp_path / "valid.bin"
    file.unlink() if content is None else file.write_bytes(content)
    stream.verify(["test"])
    with pytest.raises(AlmaError, match=rf"valid\.bin: {message}"):
        stream.verify(["valid"])


def test_bits_per_byte_do_not_depend_on_the_tokenizer():
    coarse = Split("test", (), num_tokens=100, num_bytes=400).bits_per_byte(8.0)
    fine = Split("test", (), num_tokens=200, num_bytes=400).bits_per_byte(4.0)
    assert coarse == fine == 2.0
    assert Split("test", ()).bits_per_byte(8.0) is None
