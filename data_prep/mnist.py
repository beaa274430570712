"""MNIST (11 MB, 70,000 digits): fetch, check, and make a stream of it.

    python -m data_prep.mnist --out STREAM --megabatches 500

Every option but the ones of ``--help`` goes to ``alma-prep-images mnist``. Source: LeCun, Cortes and Burges. The
authors' page, http://yann.lecun.com/exdb/mnist/, has no files any more, so they come from PyTorch's mirror of it.
"""

import argparse
from pathlib import Path
from typing import Optional, Sequence

from data_prep.download import check_sha256, fetch_missing
from data_prep.images.command import main as prep_images
from fairseq_alma.cli.entry import command
from fairseq_alma.cli.parser import Parser

URL = "https://ossci-datasets.s3.amazonaws.com/mnist/{name}"
# Of the files unpacked, as many public repositories quote them for the authors' files.
SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


@command
def main(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Fetch what is not there, check it and hand it on."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--source",
        type=Path,
        default=Path("corpora/mnist"),
        help="folder of the four files, plain or .gz; what is missing is fetched (default: %(default)s)",
    )
    args, rest = parser.parse_known_args(argv)
    for name, sha256 in SHA256.items():
        path = fetch_missing(URL, name, args.source)
        check_sha256([path], sha256, str(path), unpacked=True)
    return prep_images(["mnist", "--source", str(args.source), *rest])


if __name__ == "__main__":
    raise SystemExit(main(None))
