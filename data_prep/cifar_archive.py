"""What the scripts of CIFAR-10 and CIFAR-100 have in common: fetch, check and unpack an archive, and hand it on."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Sequence

from data_prep.download import check_sha256, fetch, unpack
from data_prep.images.cifar import CifarLayout
from data_prep.images.command import main as prep_images
from fairseq_alma.cli.parser import Parser


@dataclass(frozen=True)
class CifarArchive:
    """One of the two archives of the binary version.

    Attributes:
        dataset: what ``alma-prep-images`` calls it.
        layout: the names of its files.
        url: where the author publishes it.
        sha256: of the archive.
    """

    dataset: str
    layout: CifarLayout
    url: str
    sha256: str


def prepare_cifar(archive: CifarArchive, description: Optional[str], argv: Optional[Sequence[str]]) -> Optional[int]:
    """Run the script of one data set.

    Args:
        archive: see `CifarArchive`.
        description: the script's docstring, for ``--help``.
        argv: its command line.

    Raises:
        AlmaError: the archive cannot be fetched, or is not the published one.
    """
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--archive",
        type=Path,
        default=Path("corpora") / archive.url.rpartition("/")[2],
        help="the published archive; fetched if not there (default: %(default)s)",
    )
    parser.add_argument(
        "--source",
        type=Path,
        help="folder of the files already unpacked, binary or python version; nothing is fetched or checked",
    )
    args, rest = parser.parse_known_args(argv)
    source = args.source
    if source is None:
        fetch(archive.url, args.archive)
        check_sha256([args.archive], archive.sha256, str(args.archive))
        source = args.archive.with_name(args.archive.name.removesuffix(".tar.gz"))
        members = [f"{archive.layout.folders[0]}/{name}" for name in archive.layout.binary_names]
        unpack(args.archive, members, source)
    return prep_images([archive.dataset, "--source", str(source), *rest])
