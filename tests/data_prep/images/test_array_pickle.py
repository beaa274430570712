"""Pickles: the published form is read, and nothing in any other is run."""

import os
import pickle
import random
import warnings

import numpy as np
import pytest

from data_prep.images.formats import read_array_pickle
from fairseq_alma.errors import AlmaError
from tests.data_prep.images.published import python2_pickle, random_images

PIXELS = random_images(4, 12)


class Runs:
    """Pickles to a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_published_form_is_read_as_the_stock_unpickler_reads_it(tmp_path):
    content = python2_pickle(data=PIXELS, labels=[3, 1, 300000, 2], batch_label=b"training batch 1 of 5")
    (tmp_path / "batch").write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it names what NumPy has moved
        expected = pickle.loads(content, encoding="bytes")
    read = read_array_pickle(tmp_path / "batch")
    assert {key.encode() for key in read} == set(expected)
    assert read["labels"] == expected[b"labels"] == [3, 1, 300000, 2]
    assert read["batch_label"] == expected[b"batch_label"]
    assert read["data"].dtype == np.uint8
    assert np.array_equal(read["data"], expected[b"data"])


@pytest.mark.parametrize("protocol", [3, 4])
@pytest.mark.parametrize("array", [PIXELS, np.asfortranarray(PIXELS), np.arange(5), np.arange(5, dtype=np.int32)])
def test_arrays_that_python_3_wrote_are_read_too(tmp_path, protocol, array):
    (tmp_path / "batch").write_bytes(pickle.dumps({"data": array}, protocol))
    assert np.array_equal(read_array_pickle(tmp_path / "batch")["data"], array)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("place", ["all of it", "a value", "a key", "in a list", "in an array"])
def test_pickle_that_calls_a_function_is_refused_and_runs_nothing(tmp_path, protocol, place):
    runs = Runs(os.mkdir, str(tmp_path / "was-here"))
    content = {
        "all of it": runs,
        "a value": {"data": PIXELS, "labels": runs},
        "a key": {runs: 1},
        "in a list": {"labels": [1, runs]},
        "in an array": {"data": np.array([runs], dtype=object)},
    }[place]
    (tmp_path / "batch").write_bytes(pickle.dumps(content, protocol))
    with pytest.raises(AlmaError, match=r"batch: no pickle of arrays and nothing else .*so it was not read"):
        read_array_pickle(tmp_path / "batch")
    assert os.listdir(tmp_path) == ["batch"]


def named(name: str) -> bytes:
    """The pickle of a function."""
    return "c{}\n{}\n.".format(*name.rsplit(".", 1)).encode()


def nested_pairs(depth: int = 60) -> bytes:
    """The pickle of a pair of the same two pairs, and so on: short, but to print or hash it takes 2^60 steps."""
    return b")" + b"2\x86" * depth


FUNCTIONS = (
    "builtins.eval",
    "builtins.getattr",
    "numpy.load",
    "numpy.core.multiarray.fromfile",
    "numpy.core.records.x",
)
ENDLESS = (
    b"\x80\x02}" + nested_pairs() + b"K\x01s.",
    b"\x80\x02}(" + nested_pairs() + b"K\x01u.",
    b"\x80\x02(" + nested_pairs() + b"K\x01d.",
    b"\x80\x04\x8f(" + nested_pairs() + b"\x90.",
    b"\x80\x04(" + nested_pairs() + b"\x91.",
    b"\x80\x02cnumpy\ndtype\n" + nested_pairs() + b"\x85R" + nested_pairs() + b"b.",
    b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85R" + nested_pairs() + b"b.",
)
"""What would never end in print or as a key."""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((named(name), f"it names {name}") for name in FUNCTIONS),
        *(
            (pickle.dumps({"data": np.zeros(3, dtype)}, 4), "it has an array of")
            for dtype in ("O", "f8", ">i8", "U3", [("a", "u1")])
        ),
        (python2_pickle(data=np.zeros(8, np.uint8)).replace(b"U\x02u1", b"U\x02O8"), "it has an array of type 'O8'"),
        (python2_pickle(data=np.zeros((4, 2), np.uint8)).replace(b"J\4\0\0\0", b"J\5\0\0\0"), "cannot reshape"),
        *((content, "no pickle of arrays and nothing else") for content in ENDLESS),
        (b"", r"nothing else \(EOFError\), so"),  # a fault without words
        *((content, "no pickle") for content in (b"garbage", b"\x80\x02}(", b".", b"\x80\xff.")),
        (pickle.dumps([1, 2]), "a pickled list found, a dictionary is needed"),
    ],
)
def test_anything_else_than_arrays_in_a_dictionary_is_refused_at_once(tmp_path, content, said):
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(AlmaError, match=f"batch: .*{said}"):
        read_array_pickle(tmp_path / "batch")


@pytest.mark.parametrize("seed", range(5))
def test_damage_anywhere_gives_one_line_or_other_numbers_but_never_a_fault(tmp_path, seed):
    generator = random.Random(seed)
    whole = python2_pickle(data=PIXELS, labels=[1, 2, 3, 4])
    refused = 0
    for _ in range(200):
        content = bytearray(whole)
        for _ in range(3):
            content[generator.randrange(len(content))] = generator.randrange(256)
        (tmp_path / "batch").write_bytes(content)
        try:
            assert all(isinstance(key, str) for key in read_array_pickle(tmp_path / "batch"))
        except AlmaError as error:
            assert "batch: " in str(error) and "\n" not in str(error)
            refused += 1
    assert 100 < refused < 200
