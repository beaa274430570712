"""CIFAR-10 (170 MB, 60,000 natural images, 10 classes): fetch, check, and make a stream of it.

    python -m data_prep.cifar10 --out STREAM --megabatches 50

Every option but the ones of ``--help`` goes to ``alma-prep-images cifar10``. Source: the author's page (Krizhevsky
2009), the binary version.
"""

from typing import Optional, Sequence

from data_prep.cifar_archive import CifarArchive, prepare_cifar
from data_prep.images.cifar import CIFAR10
from fairseq_alma.cli.entry import command

ARCHIVE = CifarArchive(
    dataset="cifar10",
    layout=CIFAR10,
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    # As several public repositories quote it for this address; the author's page has its MD5 sum,
    # c32a1d4ab5d03f1284b67883e8d87530.
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)


@command
def main(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Fetch the archive unless it is there, check it, unpack it and hand it on."""
    return prepare_cifar(ARCHIVE, __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main(None))
