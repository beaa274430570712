"""EMNIST (562 MB, up to 814,255 letters and digits): fetch, check, and make a stream of one of its splits.

    python -m data_prep.emnist --split letters --out STREAM --megabatches 100

Every option but the ones of ``--help`` goes to ``alma-prep-images emnist``. Source: the authors' page at NIST (Cohen et
al. 2017). Only the split's four files are unpacked.
"""

import argparse
from pathlib import Path
from typing import Optional, Sequence

from data_prep.download import check_sha256, fetch, unpack
from data_prep.images.command import main as prep_images
from data_prep.images.idx import EMNIST_CLASSES, emnist_names
from fairseq_alma.cli.entry import command
from fairseq_alma.cli.parser import Parser

URL = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
# As several public repositories quote it for this address, beside the MD5 sum 58c8d27c78d21e728a6bc7b3cc06412e.
SHA256 = "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e"


@command
def main(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Fetch the archive unless it is there, check it, unpack a split and hand it on."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", choices=tuple(EMNIST_CLASSES), default="balanced", help="default: %(default)s")
    parser.add_argument(
        "--archive",
        type=Path,
        default=Path("corpora/emnist-gzip.zip"),
        help="the published gzip.zip; fetched if not there (default: %(default)s)",
    )
    parser.add_argument(
        "--source", type=Path, help="folder of the files already unpacked; nothing is fetched or checked"
    )
    args, rest = parser.parse_known_args(argv)
    source = args.source
    if source is None:
        fetch(URL, args.archive)
        check_sha256([args.archive], SHA256, str(args.archive))
        source = args.archive.with_suffix("")
        unpack(args.archive, [f"gzip/{name}.gz" for name in emnist_names(args.split)], source)
    return prep_images(["emnist", "--split", args.split, "--source", str(source), *rest])


if __name__ == "__main__":
    raise SystemExit(main(None))
