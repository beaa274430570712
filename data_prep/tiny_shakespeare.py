"""Tiny Shakespeare (1.1 MB, 0.2 million words): fetch, check, and make a stream of it.

    python -m data_prep.tiny_shakespeare --out STREAM --megabatches 4 --vocab-size 2000

Every option but the ones of ``--help`` goes to ``alma-prep-text``. Source: A. Karpathy's char-rnn; public domain text.
Each speech is a document.
"""

import argparse
from pathlib import Path
from typing import Optional, Sequence

from data_prep.download import check_sha256, fetch
from data_prep.text.command import main as prep_text
from fairseq_alma.cli.entry import command
from fairseq_alma.cli.parser import Parser

URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/"
    "data/tinyshakespeare/input.txt"
)
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


@command
def main(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Fetch the text unless it is there, check it and hand it on."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--file", type=Path, default=Path("corpora/tiny-shakespeare.txt"), help="the text; fetched if not there"
    )
    args, rest = parser.parse_known_args(argv)
    fetch(URL, args.file)
    check_sha256([args.file], SHA256, str(args.file))
    return prep_text([str(args.file), *rest])


if __name__ == "__main__":
    raise SystemExit(main(None))
