"""Read a stream of images: the images of a mega-batch, and errors of damaged files."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from fairseq_alma.data.image_stream import ImageSet, ImageStream, write_image_stream
from fairseq_alma.data.stream import StreamFile
from fairseq_alma.errors import AlmaError
from tests.runs.fakes import write_manifest

IMAGES = np.random.default_rng(0).integers(0, 256, (50, 1, 4, 5), dtype=np.uint8)
LABELS = np.arange(50) % 7


@pytest.fixture
def stream(tmp_path):
    """Return a stream of 4 mega-batches of 9 and 1 images, and 7 test images."""
    write_image_stream(tmp_path / "s", ImageSet("tiny", IMAGES, LABELS, 43, 7, augment=True), 4, 1)
    return ImageStream.open(tmp_path / "s")


def test_megabatches_are_joined_in_the_requested_order(stream):
    parts = {t: stream.indices("train", [t]).tolist() for t in range(4)}
    assert stream.indices("train", [2, 0]).tolist() == parts[2] + parts[0]
    assert stream.indices("train", range(4)).dtype == np.int64
    assert stream.indices("train", []).tolist() == []
    everything = np.concatenate([stream.indices("train", range(4)), stream.indices("valid", range(4))])
    assert len(set(everything.tolist())) == 40 and everything.max() < 43
    valid = {t: stream.indices("valid", [t]).tolist() for t in (1, 3)}
    assert stream.indices("valid", [3, 1]).tolist() == valid[3] + valid[1]
    assert stream.indices("test").tolist() == list(range(43, 50))


def test_stream_of_text_is_refused(tmp_path):
    write_manifest(tmp_path, num_megabatches=2)
    with pytest.raises(AlmaError, match="expected a stream of images, found text; give another stream"):
        ImageStream.open(tmp_path)


@pytest.mark.parametrize("name", ["images.npy", "labels.npy", "megabatch-002/valid.npy", "test.npy"])
def test_a_damaged_file_is_reported(stream, name):
    path = stream.stream.root / name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(AlmaError, match=f"{name}: expected sha256 .* found"):
        ImageStream.open(stream.stream.root)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("images.npy", IMAGES[:, :, 1:], r"expected uint8 \(any, 1, 4, 5\), found uint8 \(50, 1, 3, 5\)"),
        ("images.npy", IMAGES[:43], r"labels\.npy: expected int64 \(43\), found int64 \(50,\)"),
        ("labels.npy", LABELS[:, None], r"expected int64 \(50\), found int64 \(50, 1\)"),
        ("labels.npy", LABELS + 1, "expected numbers from 0 to 6, found 1 to 7"),
        ("labels.npy", np.array([None] * 50), "found Python objects"),
        ("megabatch-001/train.npy", np.arange(9) + 42, "expected numbers from 0 to 49, found 42 to 50"),
        ("valid.npy", np.arange(4, dtype=np.int32), r"expected int64 \(4\), found int32 \(4,\)"),
        ("images.npy", b"x" * 100, r"damaged \.npy file \(expected a .npy signature"),  # does not advise to unpickle
    ],
)
def test_an_array_of_another_type_shape_or_range_is_refused(stream, name, array, message):
    root = stream.stream.root
    np.save(root / name, array, allow_pickle=True)
    if isinstance(array, bytes):
        (root / name).write_bytes(array)
    content = json.loads((root / "stream.json").read_text())
    for file in [*content["images"]["files"], *(file for split in content["splits"] for file in split["files"])]:
        if file["path"] == name:  # the manifest has its size and sha256
            file.update(asdict(StreamFile.describe(root, name)))
    (root / "stream.json").write_text(json.dumps(content))
    with pytest.raises(AlmaError, match=message):
        ImageStream.open(root)
