"""CIFAR-100 (169 MB, 60,000 natural images, 100 classes): fetch, check, and make a stream of it.

    python -m data_prep.cifar100 --out STREAM --megabatches 50

Every option but the ones of ``--help`` goes to ``alma-prep-images cifar100``. Source: the author's page (Krizhevsky
2009), the binary version.
"""

from typing import Optional, Sequence

from data_prep.cifar_archive import CifarArchive, prepare_cifar
from data_prep.images.cifar import CIFAR100
from fairseq_alma.cli.entry import command

ARCHIVE = CifarArchive(
    dataset="cifar100",
    layout=CIFAR100,
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    # As several public repositories quote it for this address; the author's page has its MD5 sum,
    # 03b5dce01913d631647c71ecec9e9cb8.
    sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
)


@command
def main(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Fetch the archive unless it is there, check it, unpack it and hand it on."""
    return prepare_cifar(ARCHIVE, __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main(None))
