"""Fashion-MNIST (31 MB, 70,000 articles of clothing): fetch, check, and make a stream of it.

    python -m data_prep.fashion_mnist --out STREAM --megabatches 100

Every option but the ones of ``--help`` goes to ``alma-prep-images fashion-mnist``. Source: the authors' page (Xiao et
al. 2017; MIT licence).
"""

import argparse
import sys
from pathlib import Path
from typing import Optional, Sequence

from data_prep.download import check_sha256, fetch_missing
from data_prep.images.command import main as prep_images
from fairseq_alma.cli.entry import command
from fairseq_alma.cli.parser import Parser
from fairseq_alma.terminal import tell

URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{name}"
# Of the files as they are fetched. The authors publish MD5 sums (8d4fb7e6..., 25c81989..., bef4ecab..., bb300cfd...);
# several public repositories give these beside them for the same files.
SHA256 = {
    "train-images-idx3-ubyte": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}


@command
def main(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Fetch what is not there, check it and hand it on."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--source",
        type=Path,
        default=Path("corpora/fashion-mnist"),
        help="folder of the four files; what is missing is fetched; files that are unpacked cannot be checked "
        "(default: %(default)s)",
    )
    args, rest = parser.parse_known_args(argv)
    for name, sha256 in SHA256.items():
        path = fetch_missing(URL, name, args.source)
        if path.suffix == ".gz":
            check_sha256([path], sha256, str(path))
        else:
            tell(f"{path}: not checked, as only the checksum of the .gz file is published", sys.stderr)
    return prep_images(["fashion-mnist", "--source", str(args.source), *rest])


if __name__ == "__main__":
    raise SystemExit(main(None))
