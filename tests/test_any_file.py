"""Any bytes as any file that a command reads: a value or one AlmaError, never another exception, nor gigabytes."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
from functools import cache
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from data_prep.images.formats import read_array_pickle, read_idx
from data_prep.text.pieces import documents_of
from data_prep.text.source import find_sources
from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.data.tokens import StreamTokenizer
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import parse_gate_trees
from fairseq_alma.images.model_store import read_unfinished
from tests.checkpoints.small import small_checkpoint
from tests.test_any_input import IN_A_FOLDER, altered_bytes, one_line_or_a_value, places, with_value

TEXT = b"one document\n\nanother one\n" * 30
VOCABULARY = {"a": 0, "b": 1, "[UNK]": 2}


def saved(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def read_text(path: Path) -> None:
    for source in find_sources([str(path)], None, "text", path.parent):
        for block, _ in source.blocks():
            documents_of(block)


def parquet() -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    file = io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": ["one", "two"] * 20}), file)
    return file.getvalue()


READERS: dict[str, tuple[str, Callable[[], bytes], Callable[[Path], Any]]] = {
    "checkpoint": ("c.pt", lambda: saved(small_checkpoint()), read_checkpoint),
    "unfinished training": ("training.pt", lambda: saved({"epoch": 3, "best": [torch.ones(9)]}), read_unfinished),
    "tokenizer": (
        "tokenizer.json",
        lambda: Tokenizer(models.WordLevel(VOCABULARY, "[UNK]")).to_str().encode(),
        lambda path: StreamTokenizer(path).encode_batch(["a b"]),
    ),
    "idx": ("a-idx3", lambda: struct.pack(">HBB3I", 0, 8, 3, 2, 3, 3) + bytes(18), lambda path: read_idx(path, 3)),
    "idx.gz": (
        "a.gz",
        lambda: gzip.compress(struct.pack(">HBB3I", 0, 8, 3, 2, 3, 3) + bytes(18)),
        lambda path: read_idx(path, 3),
    ),
    "pickle": (
        "batch",
        lambda: pickle.dumps({b"data": np.zeros((2, 3), np.uint8), b"labels": [1, 2]}),
        read_array_pickle,
    ),
    "text": ("a.txt", lambda: TEXT, read_text),
    "lines of JSON": ("a.jsonl", lambda: b'{"text": "one"}\n{"text": "two"}\n' * 9, read_text),
    "gz": ("a.txt.gz", lambda: gzip.compress(TEXT) + gzip.compress(TEXT), read_text),
    "bz2": ("a.txt.bz2", lambda: bz2.compress(TEXT) + bz2.compress(TEXT), read_text),
    "xz": ("a.txt.xz", lambda: lzma.compress(TEXT) + lzma.compress(TEXT), read_text),
    "parquet": ("a.parquet", parquet, read_text),
}


@cache
def good(reader: str) -> bytes:
    return READERS[reader][1]()


@pytest.mark.parametrize("reader", READERS)
def test_the_files_that_are_altered_here_are_good_ones(reader: str, tmp_path: Path) -> None:
    name, _, read = READERS[reader]
    (tmp_path / name).write_bytes(good(reader))
    read(tmp_path / name)


@pytest.mark.parametrize("reader", READERS)
@settings(IN_A_FOLDER, max_examples=60)
@given(data=st.data())
def test_any_bytes_are_one_line_or_a_value(reader: str, data: Any, tmp_path: Path) -> None:
    name, _, read = READERS[reader]
    (tmp_path / name).write_bytes(altered_bytes(good(reader), data))
    one_line_or_a_value(lambda folder: read(folder / name), tmp_path)


ODD = st.sampled_from([None, True, -1, 2**40, 1.5, "x", "", [], {}, {"x": 1}, [[0]], "\x1b[31m"])


@settings(IN_A_FOLDER, max_examples=60)
@given(data=st.data())
def test_any_json_in_any_place_of_a_tokenizer_is_one_line_or_a_tokenizer(data: Any, tmp_path: Path) -> None:
    content = json.loads(good("tokenizer"))
    altered = with_value(content, data.draw(st.sampled_from(places(content))), data.draw(ODD))
    (tmp_path / "tokenizer.json").write_text(json.dumps(altered))
    one_line_or_a_value(lambda folder: StreamTokenizer(folder).encode_batch(["a b"]), tmp_path)


def test_a_tokenizer_that_numbers_its_tokens_beyond_any_vocabulary_is_refused(tmp_path: Path) -> None:
    content = json.loads(good("tokenizer"))
    content["model"]["vocab"]["a"] = 2**32 - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(AlmaError, match=r"tokenizer\.json: not a tokenizers tokenizer \(a token of number 4,294,967,2"):
        StreamTokenizer(tmp_path)


@settings(IN_A_FOLDER, max_examples=100)
@given(text=st.text(alphabet="[]0123456789, -x", max_size=60) | st.sampled_from(["[" * 10**5, "[[" + "0," * 10**5]))
def test_any_text_as_gate_trees_is_one_line_or_trees(text: str, tmp_path: Path) -> None:
    one_line_or_a_value(lambda _: parse_gate_trees(text, 2, 3), tmp_path)
