"""The scripts per data set of images, with files at hand instead of the network."""

import hashlib
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep import cifar10, cifar100, download, emnist, fashion_mnist, mnist
from data_prep.images.idx import emnist_names
from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.errors import AlmaError
from tests.data_prep.images.published import MNIST_NAMES, write_cifar10, write_cifar100, write_mnist

OPTIONS = ["--out", "s", "--megabatches", "2"]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder without a network."""
    monkeypatch.chdir(tmp_path)

    def no_network(url: str, **options: object) -> None:
        raise TimeoutError(f"no network in tests, not even for {url}")

    monkeypatch.setattr(download.urllib.request, "urlopen", no_network)
    return tmp_path


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_is_checked_by_its_content_however_it_was_packed(folder, monkeypatch, packed):
    write_mnist(folder / "m", packed=packed)
    with pytest.raises(AlmaError, match=r"train-images-idx3-ubyte.*: sha256 .* found, the published content has ba89"):
        mnist.main(["--source", "m", *OPTIONS])
    write_mnist(folder / "plain", packed=False)
    monkeypatch.setattr(mnist, "SHA256", {name: sha256(folder / "plain" / name) for name in MNIST_NAMES})
    assert mnist.main(["--source", "m", *OPTIONS]) == 0
    assert ImageStream.open("s").dataset == "mnist"


@pytest.mark.parametrize(("script", "address"), [(mnist, "ossci-datasets"), (fashion_mnist, "fashion-mnist")])
def test_what_is_missing_is_fetched(folder, script, address):
    with pytest.raises(AlmaError, match=rf"{address}.*train-images-idx3-ubyte\.gz: cannot be fetched .*name the file"):
        script.main(["--source", "m", *OPTIONS])
    assert list((folder / "m").iterdir()) == []


def test_fashion_mnist_is_checked_as_it_was_fetched(folder, monkeypatch):
    write_mnist(folder / "f")
    with pytest.raises(AlmaError, match=r"train-images-idx3-ubyte\.gz: sha256 .* found"):
        fashion_mnist.main(["--source", "f", *OPTIONS])
    monkeypatch.setattr(fashion_mnist, "SHA256", {name: sha256(folder / f"f/{name}.gz") for name in MNIST_NAMES})
    assert fashion_mnist.main(["--source", "f", *OPTIONS]) == 0
    assert ImageStream.open("s").dataset == "fashion-mnist"


def test_fashion_mnist_unpacked_is_prepared_and_said_to_be_unchecked(folder, capsys):
    write_mnist(folder / "f", packed=False)
    assert fashion_mnist.main(["--source", "f", *OPTIONS]) == 0
    assert capsys.readouterr().err.count("not checked") == 4


def write_emnist(folder: Path, split: str) -> None:
    """Write a split's files and the archive that holds them."""
    names = tuple(emnist_names(split))
    write_mnist(folder / "e", num_classes=26, first_label=1, names=names)
    with zipfile.ZipFile(folder / "e.zip", "w") as archive:
        for name in names:
            archive.write(folder / f"e/{name}.gz", f"gzip/{name}.gz")


def test_emnist_unpacks_the_files_of_the_split(folder, monkeypatch):
    write_emnist(folder, "letters")
    with pytest.raises(AlmaError, match=r"e\.zip: sha256 .* found"):
        emnist.main(["--archive", "e.zip", "--split", "letters", *OPTIONS])
    monkeypatch.setattr(emnist, "SHA256", sha256(folder / "e.zip"))
    with pytest.raises(AlmaError, match=r"e\.zip: .*emnist-balanced-train-images.*fetch it again"):
        emnist.main(["--archive", "e.zip", *OPTIONS])
    (folder / "corpora").mkdir()
    (folder / "e.zip").rename(folder / "corpora/emnist-gzip.zip")
    assert emnist.main(["--split", "letters", *OPTIONS]) == 0
    assert ImageStream.open("s").dataset == "emnist-letters"
    assert len(list((folder / "corpora/emnist-gzip").iterdir())) == 4


def test_emnist_takes_a_folder_without_a_check(folder):
    write_emnist(folder, "letters")
    assert emnist.main(["--source", "e", "--split", "letters", *OPTIONS]) == 0
    assert ImageStream.open("s").num_classes == 26


@pytest.mark.parametrize(
    ("script", "write", "name"),
    [(cifar10, write_cifar10, "cifar-10-binary"), (cifar100, write_cifar100, "cifar-100-binary")],
)
def test_cifar_is_unpacked_from_the_archive(folder, monkeypatch, script, write, name):
    images, labels = write(folder / "c", "binary")
    (folder / "corpora").mkdir()
    with tarfile.open(folder / f"corpora/{name}.tar.gz", "w:gz") as archive:
        archive.add(folder / "c", script.ARCHIVE.layout.folders[0])
    with pytest.raises(AlmaError, match=rf"{name}\.tar\.gz: sha256 .* found"):
        script.main(OPTIONS)
    monkeypatch.setattr(script, "ARCHIVE", replace(script.ARCHIVE, sha256=sha256(folder / f"corpora/{name}.tar.gz")))
    assert script.main(OPTIONS) == 0
    stream = ImageStream.open("s")
    assert np.array_equal(stream.images, images) and np.array_equal(stream.labels, labels)


def test_cifar_takes_a_folder_of_the_python_version(folder):
    images, _ = write_cifar10(folder / "c", "python")
    assert cifar10.main(["--source", "c", *OPTIONS]) == 0
    assert np.array_equal(ImageStream.open("s").images, images)


def test_member_that_is_there_is_left_alone_and_none_is_written_by_half(folder):
    (folder / "a.bin").write_bytes(bytes(5000))
    (folder / "b.bin").write_bytes(bytes(5000))
    with tarfile.open(folder / "a.tar.gz", "w:gz") as archive:
        archive.add("a.bin", "x/a.bin")
        archive.add("b.bin", "x/b.bin")
    (folder / "out").mkdir()
    (folder / "out/a.bin").write_text("mine")
    download.unpack(folder / "a.tar.gz", ["x/a.bin", "x/b.bin"], folder / "out")
    assert (folder / "out/a.bin").read_text() == "mine"
    assert (folder / "out/b.bin").stat().st_size == 5000
    content = (folder / "a.tar.gz").read_bytes()
    (folder / "a.tar.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(AlmaError, match=r"a\.tar\.gz: damaged, or not the published archive .*fetch it again"):
        download.unpack(folder / "a.tar.gz", ["x/a.bin", "x/b.bin"], folder / "other")
    assert "b.bin" not in {path.name for path in (folder / "other").iterdir()}


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_file_that_is_no_archive_is_refused(folder, content):
    (folder / "a.tar.gz").write_bytes(content)
    with pytest.raises(AlmaError, match=r"a\.tar\.gz: damaged, or not the published archive"):
        download.unpack(folder / "a.tar.gz", ["x/a.bin"], folder / "out")
