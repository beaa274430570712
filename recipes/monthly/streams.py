"""Write six months of changing text for bench.py: Wikipedia by topic, or Python source by package.

    python recipes/monthly/streams.py wikipedia ARTICLES.tsv.xz wiki.00.txt.xz wiki.01.txt.xz... --out DIR [--size 1M]
    python recipes/monthly/streams.py python constraints.txt --out DIR [--size 1M]
    python recipes/monthly/bench.py DIR/{1,2,3,4,5,6}.txt --out bench

The script writes DIR/1.txt to DIR/6.txt. The mean size is --size bytes; the longest file is four times as long as the
shortest file. An empty line separates documents. ARTICLES is a table with the columns shard (number of the text file,
from 0), byte_offset and nbytes; the first line of an article is its title, each other line a paragraph. The Python
files come from installed packages, whose versions must equal the versions in constraints.txt.

Hardware: one CPU core. Time: a minute. The output is the same on every machine.
"""

import argparse
import csv
import hashlib
import lzma
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Iterator, Mapping, Optional, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.runs.study import read_size
from fairseq_alma.terminal import command

SHARES = (0.9, 1.6, 0.4, 1.3, 0.7, 1.1)  # Bytes of each month, as a multiple of --size.
# Largest document, in bytes: a longer article is cut after a paragraph, a longer Python file is skipped.
LONGEST = {"wikipedia": 6_000, "python": 20_000}
SHORTEST = 500  # Smallest document, in bytes.
# Words of each topic; each topic is a month. `topic_of` assigns articles to topics.
TOPICS = {
    "countries": "country city capital river island islands province county population located coast region kingdom "
    "republic state town territory geography landlocked",
    "people": "born actor actress singer writer novelist poet painter composer player politician president king "
    "emperor queen mathematician philosopher physicist author director",
    "nature": "species genus plant plants animal animals bird birds fish family disease medical cell protein body "
    "organism organisms biology flowering mammal tree",
    "computing": "computer computers software programming operating system systems algorithm data network internet "
    "protocol file processor memory hardware code digital video",
    "history": "war battle army military empire dynasty treaty century ancient revolution ship aircraft weapon navy "
    "invasion siege roman medieval missile",
    "science": "mathematics theorem theory physics chemical element equation energy atomic number numbers function set "
    "group space particle star constellation chemistry",
}
PACKAGES = ("networkx", "sympy", "matplotlib", "transformers", "scikit-learn", "pandas")


def topic_of(article: str) -> Optional[str]:
    """Return the topic with the most words in the title and first sentence; None if no word matches or for a tie."""
    title, _, rest = article.partition("\n")
    words = set(re.findall(r"\w+", f"{title} {rest.partition('. ')[0]}".lower()))
    counts = {topic: len(words & set(known.split())) for topic, known in TOPICS.items()}
    best = max(counts.values())
    found = [topic for topic, count in counts.items() if count == best]
    return found[0] if best and len(found) == 1 else None


def read_articles(table: Path, shards: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield the topic and text of each article, at most `LONGEST` bytes, in the order of the table."""
    text, number = b"", -1
    with lzma.open(table, "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            if int(row["shard"]) >= len(shards):
                continue
            if int(row["shard"]) != number:
                number = int(row["shard"])
                text = lzma.decompress(shards[number].read_bytes())
            begin = int(row["byte_offset"])
            article = text[begin : begin + int(row["nbytes"])].strip()
            cut = article.rfind(b"\n", 0, LONGEST["wikipedia"]) if len(article) > LONGEST["wikipedia"] else len(article)
            document = article[: max(0, cut)].decode()
            if (topic := topic_of(document)) is not None:
                yield topic, document


def read_sources(constraints: Path) -> Iterator[tuple[str, str]]:
    """Yield the package and the text of each Python file, without empty lines, sorted by the hash of the file name."""
    pins = dict(line.split("==") for line in constraints.read_text(encoding="utf-8").split() if "==" in line)
    for package in PACKAGES:
        version = metadata.version(package)
        if version != pins.get(package):
            sys.exit(f"{package} {version}: expected {pins.get(package)} as in {constraints}; install this version")
        names = [name for name in metadata.files(package) or () if name.suffix == ".py" and "tests" not in name.parts]
        for name in sorted(names, key=lambda each: hashlib.sha256(str(each).encode()).digest()):
            text = name.read_text(encoding="utf-8")
            # A licence at the start of every file would count as text that is shared with the test set.
            text = re.sub(r"\A(?:#.*\n)+", "", text)
            if len(text.encode()) <= LONGEST["python"]:
                yield package, "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def write_months(documents: Iterator[tuple[str, str]], months: Mapping[str, int], folder: Path) -> None:
    """Write a file for each month.

    Args:
        documents: (month, text) of each document.
        months: bytes of each month, in order; a month ends with the document that reaches this size.
        folder: folder for the files.
    """
    texts: dict[str, list[str]] = {month: [] for month in months}
    sizes = dict.fromkeys(months, 0)
    for month, text in documents:
        size = len(text.encode())
        if size >= SHORTEST and sizes[month] < months[month]:
            texts[month].append(text)
            sizes[month] += size
    for month, expected in months.items():
        if sizes[month] < expected:
            sys.exit(f"{month}: expected {expected:,} bytes of text, found {sizes[month]:,}; give a smaller --size")
    folder.mkdir(parents=True, exist_ok=True)
    for number, month in enumerate(months, start=1):
        (folder / f"{number}.txt").write_text("\n\n".join(texts[month]) + "\n", encoding="utf-8")
        print(f"{folder / f'{number}.txt'}: {month}, {len(texts[month]):,} documents, {sizes[month]:,} bytes")


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    """Write the six files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    wikipedia, python = kinds.add_parser("wikipedia"), kinds.add_parser("python")
    wikipedia.add_argument("articles", type=Path, metavar="ARTICLES", help="table of the articles (.tsv.xz)")
    wikipedia.add_argument("shards", type=Path, nargs="+", metavar="SHARD", help="text files (.txt.xz) from shard 0 on")
    python.add_argument("constraints", type=Path, metavar="CONSTRAINTS", help="file with the pinned versions")
    for each in (wikipedia, python):
        each.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the six files")
        each.add_argument(
            "--size", type=read_size, default="1M", help="mean bytes of a month, such as 800k (default: 1M)"
        )
    options = parser.parse_args(argv)
    if options.size is None:
        parser.error("--size auto: expected a number of bytes, such as 800k")
    if options.kind == "wikipedia":
        names, documents = tuple(TOPICS), read_articles(options.articles, options.shards)
    else:
        names, documents = PACKAGES, read_sources(options.constraints)
    months = {name: round(share * options.size) for name, share in zip(names, SHARES, strict=True)}
    try:
        write_months(documents, months, options.out)
    except (KeyError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise AlmaError(f"{options.articles}: not a table of these text files ({error}); start with shard 0") from error


if __name__ == "__main__":
    sys.exit(main(None))
