"""WikiText-2 or -103 (2 or 103 million words): fetch, check, and make a stream of the articles.

    python -m data_prep.wikitext 103 --out STREAM --megabatches 10

Every option but the ones of ``--help`` goes to ``alma-prep-text``. Source: the authors' page (Merity et al. 2016;
CC BY-SA 3.0). Only the training part is used, since a stream draws its own validation and test sets. In the published
file an empty line stands between any two paragraphs, so articles are told by their headings (`` = Title = ``). The text
that is handed on is kept: in corpora/, or with ``--tokens`` beside STREAM, as X.articles.txt.
"""

import argparse
import io
import re
import zipfile
from pathlib import Path
from typing import Iterable, Iterator, Optional, Sequence

from data_prep.compression import strip_compression_suffix
from data_prep.download import check_sha256, fetch
from data_prep.text.command import main as prep_text
from data_prep.text.document import text_of
from data_prep.text.source import Source
from fairseq_alma.cli.entry import command
from fairseq_alma.cli.parser import Parser, utf8_path
from fairseq_alma.errors import AlmaError, refuse_no_file
from fairseq_alma.files import open_atomically

URL = "https://wikitext.smerity.com/wikitext-{size}-v1.zip"
SHA256 = {
    "2": "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    "103": "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
}
_TITLE = re.compile(r"^ = [^=].*[^=] = $")


@command
def main(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Fetch the archive unless it is there, check it, write one text of articles and hand it on."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=tuple(SHA256), help="millions of words")
    parser.add_argument("--archive", type=Path, help="wikitext-SIZE-v1.zip; fetched to corpora/ if not there")
    parser.add_argument(
        "--tokens",
        type=Path,
        help="wiki.train.tokens already unpacked, plain or compressed; not checked, nothing is fetched",
    )
    parser.add_argument("--out", type=utf8_path, required=True, metavar="STREAM", help="folder of the stream")
    args, rest = parser.parse_known_args(argv)
    articles = Path("corpora") / f"wikitext-{args.size}.articles.txt"
    if args.tokens is not None:
        refuse_no_file(args.tokens, "--tokens", "give wiki.train.tokens")
        # Its own folder may be one that is only read.
        articles = args.out.absolute().parent / f"{strip_compression_suffix(args.tokens.name)}.articles.txt"
        write_articles(_lines_of(args.tokens), articles)
    else:
        archive = args.archive or articles.parent / f"wikitext-{args.size}-v1.zip"
        fetch(URL.format(size=args.size), archive)
        check_sha256([archive], SHA256[args.size], str(archive))
        _unpack(archive, f"wikitext-{args.size}/wiki.train.tokens", articles)
    return prep_text([str(articles), "--out", str(args.out), *rest])


def _unpack(archive: Path, member: str, articles: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(member) as content:
            write_articles(io.TextIOWrapper(content, encoding="utf-8"), articles)
    except (zipfile.BadZipFile, KeyError) as error:
        raise AlmaError(f"{archive}: no archive with {member} in it ({error}); fetch it again") from error


def _lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a text in UTF-8, whatever it is compressed with. Raises AlmaError if it is none."""
    for block, _ in Source(path, str(path), argument=0, form="lines", field="").blocks():
        yield from text_of(block).removesuffix("\n").split("\n")


def write_articles(tokens: Iterable[str], path: Path) -> None:
    """Write the articles of ``wiki.train.tokens`` with an empty line between them and none within."""
    with open_atomically(path, "w") as file:
        for article in articles_of(tokens):
            file.write("\n".join(article) + "\n\n")


def articles_of(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield each article as its lines, the empty ones left out.

    A heading of the first level begins an article; those of lower levels (`` = = History = = ``) do not.
    """
    article: list[str] = []
    after_empty = True
    for line in lines:
        line = line.rstrip("\n")
        if not line.strip():
            after_empty = True
            continue
        if article and after_empty and _TITLE.match(line) and " = = " not in line:
            yield article
            article = []
        article.append(line.strip())
        after_empty = False
    if article:
        yield article


if __name__ == "__main__":
    raise SystemExit(main(None))
