"""An extract of the English Wikipedia of May 2015 (408 MB, 65 million words, 30,729 articles): make a stream of it.

    python -m data_prep.wikipedia_2015 --out STREAM --megabatches 4

Every option but the ones of ``--help`` goes to ``alma-prep-text``. Source: the repository jason-feng/wikiVisual, which
holds the output of wikiextractor in 400 files; text CC BY-SA 3.0. Each article is a document: its title, then one
paragraph per line.
"""

import argparse
import html
import re
from pathlib import Path
from typing import Iterable, Iterator, Optional, Sequence

from data_prep.download import check_sha256, fetch
from data_prep.text.command import main as prep_text
from fairseq_alma.cli.entry import command
from fairseq_alma.cli.parser import Parser
from fairseq_alma.files import open_atomically

URL = "https://raw.githubusercontent.com/jason-feng/wikiVisual/1c0fac92f29f17c1603bfffbe864e0dfdff66897/text/{name}"
NAMES = [f"{folder}/wiki_{number:02d}" for folder in ("AA", "AB", "AC", "AD") for number in range(100)]
SHA256 = "8483f9bd98aef5a2d9c5ebcff243a531c258c7814c091ee602641aaa303ebef5"  # of all files in this order
_TAG = re.compile(r"^<doc [^>]*>$|^</doc>$")


@command
def main(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Fetch what is not there, check the whole, write one text of articles and hand it on."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--source",
        type=Path,
        default=Path("corpora/wikipedia-2015"),
        help="folder of AA/wiki_00 to AD/wiki_99; what is missing is fetched (default: %(default)s)",
    )
    args, rest = parser.parse_known_args(argv)
    paths = [fetch(URL.format(name=name), args.source / name) for name in NAMES]
    check_sha256(paths, SHA256, str(args.source))
    articles = args.source.with_name(f"{args.source.name}.articles.txt")
    with open_atomically(articles, "w") as file:
        for path in paths:
            with open(path, encoding="utf-8") as lines:
                file.writelines("\n".join(article) + "\n\n" for article in articles_of(lines))
    return prep_text([str(articles), *rest])


def articles_of(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield each article of a wikiextractor file as its lines, without tags and empty lines."""
    article: list[str] = []
    for line in lines:
        line = line.strip()
        if _TAG.match(line):
            if article:
                yield article
            article = []
        elif line:
            article.append(html.unescape(line))
    if article:
        yield article


if __name__ == "__main__":
    raise SystemExit(main(None))
