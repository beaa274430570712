"""The scripts per corpus, with files at hand instead of the network."""

import hashlib
import io
import lzma
import zipfile

import pytest

from data_prep import download, tiny_shakespeare, wikipedia_2015, wikitext
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError

WIKITEXT = " \n = First = \n \n one <unk> two \n three \n \n = = Section = = \n \n four \n \n = Second = \n \n five \n"


def test_shakespeare_is_checked_and_prepared(tmp_path, monkeypatch):
    file = tmp_path / "input.txt"
    file.write_text("\n\n".join(f"SPEAKER {number}:\nline {number}" for number in range(200)))
    options = ["--file", str(file), "--out", str(tmp_path / "s"), "--megabatches", "2", "--vocab-size", "256"]
    with pytest.raises(AlmaError, match=r"input\.txt: sha256 .* found"):
        tiny_shakespeare.main(options)
    monkeypatch.setattr(tiny_shakespeare, "SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    assert tiny_shakespeare.main([*options, "--workers", "1"]) == 0
    assert sum(split.num_documents for split in Stream.open(tmp_path / "s").splits) == 200


def test_wikitext_articles_begin_at_headings_of_the_first_level():
    articles = list(wikitext.articles_of(io.StringIO(WIKITEXT)))
    assert articles == [["= First =", "one <unk> two", "three", "= = Section = =", "four"], ["= Second =", "five"]]


@pytest.mark.parametrize("form", ["archive", "tokens"])
def test_wikitext_is_prepared_from_a_file_at_hand(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    content = "".join(f" = Title {number} = \n \n some words {number} \n \n" for number in range(50))
    if form == "archive":
        with zipfile.ZipFile("w.zip", "w") as archive:
            archive.writestr("wikitext-2/wiki.train.tokens", content)
        sha256 = hashlib.sha256((tmp_path / "w.zip").read_bytes()).hexdigest()
        monkeypatch.setitem(wikitext.SHA256, "2", sha256)
        source = ["--archive", "w.zip"]
    else:
        (tmp_path / "wiki.train.tokens").write_text(content)
        source = ["--tokens", "wiki.train.tokens"]
    options = ["--out", "s", "--megabatches", "2", "--vocab-size", "256", "--workers", "1"]
    assert wikitext.main(["2", *source, *options]) == 0
    assert sum(split.num_documents for split in Stream.open("s").splits) == 50


def test_wikitext_tokens_may_be_compressed_and_stand_where_nothing_can_be_written(tmp_path):
    lines = "".join(f" = Title {number} = \n \n some words {number} \n \n" for number in range(50_000))
    (tmp_path / "in").mkdir()
    (tmp_path / "in/wiki.train.tokens.xz").write_bytes(lzma.compress(lines.encode(), preset=0))
    assert list(wikitext.articles_of(wikitext._lines_of(tmp_path / "in/wiki.train.tokens.xz"))) == [
        [f"= Title {number} =", f"some words {number}"] for number in range(50_000)
    ]
    small = lzma.compress("".join(lines.splitlines(keepends=True)[:200]).encode())
    (tmp_path / "in/wiki.train.tokens.xz").write_bytes(small)
    options = ["--out", str(tmp_path / "out/s"), "--megabatches", "2", "--vocab-size", "256", "--workers", "1"]
    for _ in range(2):
        assert wikitext.main(["2", "--tokens", str(tmp_path / "in/wiki.train.tokens.xz"), *options]) == 0
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["wiki.train.tokens.xz"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"s", "wiki.train.tokens.articles.txt"}


def test_wikitext_tokens_that_are_no_text_are_one_line(tmp_path):
    (tmp_path / "wiki.train.tokens").write_bytes(b" = T = \n \n na\xefve\n")
    with pytest.raises(AlmaError, match=r"wiki.train.tokens, line 3: byte 0xef is not UTF-8; the input must be text"):
        wikitext.main(["2", "--tokens", str(tmp_path / "wiki.train.tokens"), "--out", str(tmp_path / "s")])
    assert [path.name for path in tmp_path.iterdir()] == ["wiki.train.tokens"]


def test_wikipedia_articles_lose_their_tags(tmp_path, monkeypatch):
    article = '<doc id="{0}" url="u" title="A">\nTitle {0}\n\nfirst &amp; second\n</doc>\n<doc id="x">\n\n</doc>\n'
    assert list(wikipedia_2015.articles_of(article.format(1).splitlines())) == [["Title 1", "first & second"]]
    names = ["AA/wiki_00", "AA/wiki_01"]
    (tmp_path / "w/AA").mkdir(parents=True)
    for number, name in enumerate(names):
        (tmp_path / "w" / name).write_text("".join(article.format(100 * number + count) for count in range(20)))
    content = b"".join((tmp_path / "w" / name).read_bytes() for name in names)
    monkeypatch.setattr(wikipedia_2015, "NAMES", names)
    monkeypatch.setattr(wikipedia_2015, "SHA256", hashlib.sha256(content).hexdigest())
    options = ["--out", str(tmp_path / "s"), "--megabatches", "2", "--vocab-size", "256", "--workers", "1"]
    assert wikipedia_2015.main(["--source", str(tmp_path / "w"), *options]) == 0
    assert sum(split.num_documents for split in Stream.open(tmp_path / "s").splits) == 40


def test_address_that_does_not_answer_is_named(tmp_path):
    with pytest.raises(AlmaError, match=r"nothing\.invalid/x: cannot be fetched .*; fetch it by other means"):
        download.fetch("http://nothing.invalid/x", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_fetched_file_appears_whole_and_is_not_fetched_again(tmp_path):
    (tmp_path / "published").write_text("content")
    fetched = download.fetch((tmp_path / "published").as_uri(), tmp_path / "folder/copy")
    assert fetched.read_text() == "content"
    (tmp_path / "published").unlink()
    assert download.fetch((tmp_path / "published").as_uri(), fetched) == fetched
    download.check_sha256([fetched, fetched], hashlib.sha256(b"contentcontent").hexdigest(), "copy")
