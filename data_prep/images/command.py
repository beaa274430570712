"""``alma-prep-images``: convert an image data set to a stream of mega-batches."""

import shlex
import sys
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Optional, Sequence

from data_prep.images.formats import (
    EMNIST_CLASSES,
    InputFiles,
    load_arrays,
    load_cifar,
    load_digits,
    load_folder,
    load_idx,
)
from fairseq_alma.data.image_stream import ImageSet, write_image_stream
from fairseq_alma.data.stream import Stream, publish_stream, refuse_other_command, split_name, stream_at
from fairseq_alma.files import MAX_MEGABATCHES, work_folder
from fairseq_alma.options import Options, flag, integer, opt, options_of, real, utf8_path, utf8_word
from fairseq_alma.terminal import Parser, command, print_line

_EPILOG = """examples:
  alma-prep-images mnist --source mnist/ --out stream --megabatches 500
  alma-prep-images emnist --split letters --source emnist/gzip --out stream --megabatches 100
  alma-prep-images arrays --images x.npy --labels y.npy --out stream --megabatches 10
  alma-prep-images folder --source photos/ --out stream --megabatches 10

Repeating a completed command changes nothing."""
_ARRAYS = ("images", "labels", "test_images", "test_labels")
_DATASETS = {  # data set -> (help text, options in addition to `_COMMON`)
    "mnist": ("MNIST: the four idx files, plain or .gz", ("source",)),
    "fashion-mnist": ("Fashion-MNIST: the four idx files, plain or .gz", ("source",)),
    "emnist": (
        "EMNIST: the idx files of one split, plain or .gz; the command corrects the transposed images",
        ("source", "split"),
    ),
    "cifar10": ("CIFAR-10: the files of the binary version", ("source",)),
    "cifar100": ("CIFAR-100: the files of the binary version", ("source", "coarse")),
    "digits": ("scikit-learn's 8 x 8 digits; by default from the installed package", ("source", "test_fraction")),
    "arrays": (
        "images and labels in .npy files",
        ("test_fraction", "name", "augment", *_ARRAYS, "channels", "num_classes"),
    ),
    "folder": (
        "image files of the same shape, in one subfolder for each class, optionally inside train/ and test/",
        ("source", "test_fraction", "name", "augment"),
    ),
}
_COMMON = ("out", "megabatches", "seed", "valid_fraction")
# The manifest does not record these options, because it records the sha256 of the files.
_FILES = ("out", "source", *_ARRAYS)
_DEFAULT_TEST_FRACTION = 0.2
_SHARE = real(0, 1, above=True, below=True)
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class ImagePrepOptions(Options):
    """Options of ``alma-prep-images``. Options that the data set does not support have default values."""

    out: Path = opt(MISSING, "stream folder to write", parse=utf8_path, metavar="STREAM")
    megabatches: int = opt(
        MISSING, "number of mega-batches of equal size; leftover training images are not used",
        range=integer(1, MAX_MEGABATCHES), metavar="B",
    )  # fmt: skip
    seed: int = opt(1, "random seed for assigning images to splits of the stream", range=integer(0, _LARGEST))
    valid_fraction: float = opt(
        0.1, "share of each mega-batch to hold out for validation (at least one image)", range=_SHARE, metavar="F"
    )
    source: Optional[Path] = opt(None, "folder that contains the files of the data set", metavar="DIR")
    test_fraction: Optional[float] = opt(
        None, f"share of images held out for testing (default: {_DEFAULT_TEST_FRACTION})", range=_SHARE, metavar="F"
    )
    split: str = opt("balanced", "split of EMNIST", choices=tuple(EMNIST_CLASSES))
    coarse: bool = opt(False, "use the 20 coarse classes instead of the 100 fine classes")
    name: Optional[str] = opt(
        None, "name of the data set in the manifest (default: the DATASET argument)", parse=utf8_word, metavar="NAME"
    )
    augment: bool = opt(False, "augment training images with random crops and flips")
    images: Optional[Path] = opt(None, "uint8 array (images, [channels,] height, width)", metavar="FILE.npy")
    labels: Optional[Path] = opt(None, "integer array (images,): labels from 0", metavar="FILE.npy")
    test_images: Optional[Path] = opt(
        None, "test images in the format of --images (default: a sample of --images)", metavar="FILE.npy"
    )
    test_labels: Optional[Path] = opt(None, "labels of the test images", metavar="FILE.npy")
    channels: str = opt("first", "position of the channel dimension in the image arrays", choices=("first", "last"))
    num_classes: Optional[int] = opt(
        None, "number of classes (default: largest label plus 1)", range=integer(1, _LARGEST), metavar="K"
    )
    dataset: str = ""


def parse_options(argv: Optional[Sequence[str]]) -> ImagePrepOptions:
    """Parse the command line and return the options. Exit with status 2 on a usage error."""
    parser = Parser(
        prog="alma-prep-images",
        description="Convert an image data set to a stream: a test set and B mega-batches of equal size, each split "
        "into training and validation images.",
        epilog=_EPILOG,
    )
    datasets = parser.add_subparsers(dest="dataset", metavar="DATASET", required=True)
    for dataset, (text, own) in _DATASETS.items():
        group = datasets.add_parser(dataset, help=text, description=f"{text[0].upper()}{text[1:]}.")
        for name in (*_COMMON, *own):
            option = options_of(ImagePrepOptions)[name]
            is_required = name in ("images", "labels") or (name == "source" and dataset != "digits")
            (replace(option, default=MISSING) if is_required else option).add_to(group)
    args = parser.parse_args(argv)
    options = ImagePrepOptions.read(args, dataset=args.dataset)
    if (options.test_images is None) != (options.test_labels is None):
        missing, given = ("images", "labels") if options.test_images is None else ("labels", "images")
        parser.error(f"--test-{missing}: missing; add this option, or remove --test-{given}")
    if options.test_images is not None and options.test_fraction is not None:
        parser.error("--test-fraction: not allowed with --test-images; remove --test-fraction")
    parts = [Path(options.source or "") / part for part in ("train", "test")]
    if args.dataset == "folder" and options.test_fraction and all(part.is_dir() for part in parts):
        parser.error(f"--test-fraction: {options.source} has a folder test; remove --test-fraction or the folder")
    fraction = options.test_fraction
    if "test_fraction" in _DATASETS[args.dataset][1] and options.test_images is None:
        fraction = fraction or _DEFAULT_TEST_FRACTION
    return replace(options, test_fraction=fraction, name=options.name or args.dataset)


def prepare(options: ImagePrepOptions) -> Optional[tuple[Stream, ImageSet]]:
    """Write a stream of images and return (stream, data set). Return None if the same command has already completed."""
    stream_at(options.out, "images")  # raises an error before any input file is read
    with work_folder(options.out, "alma-prep-images") as root:
        existing = stream_at(options.out, "images")  # Another process may have held the lock and written a stream.
        files = InputFiles()
        dataset, source = options.dataset, options.source or Path()
        if dataset == "arrays":
            images = load_arrays(files, options)
        elif dataset == "digits":
            images = load_digits(files, options)
        elif dataset == "folder":
            images = load_folder(files, options)
        elif dataset.startswith("cifar"):
            images = load_cifar(files, source, dataset, options.coarse)
        else:
            images = load_idx(files, source, dataset, options.split)
        names = [name for name in (*_COMMON, *_DATASETS[dataset][1]) if name not in _FILES]
        given = {"DATASET": dataset, **{flag(name): getattr(options, name) for name in names}}
        record = {"command": "create", "options": given, "inputs": files.records}
        if existing is not None:
            refuse_other_command(options.out, existing.history, record, "choose another --out, or remove the stream")
            existing.verify(split.name for split in existing.splits)
            return None
        how = options.megabatches, options.seed, options.valid_fraction, (record,)
        built = write_image_stream(root / "stream", images, *how)
        stream = replace(built, root=options.out)
        publish_stream(root / "stream", stream)
    return stream, images


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Convert an image data set to a stream, and print a summary."""
    run(parse_options(argv))
    return 0


def run(options: ImagePrepOptions) -> None:
    """Write the stream of ``options``, and print a summary. Raises AlmaError as `prepare` does."""
    prepared = prepare(options)
    if prepared is None:
        print_line(f"{options.out}: the same command has already completed; nothing to do", sys.stdout)
        return
    stream, images = prepared
    names = (stream.megabatch(0).name, split_name(0, "valid"), "test")
    num_train, num_valid, num_test = (stream.split(name).num_images for name in names)
    unused = images.num_train - stream.num_megabatches * (num_train + num_valid)
    for line in (
        f"{images.dataset}: {images.num_train:,} training and {num_test:,} test images of shape "
        f"{' x '.join(map(str, images.images.shape[1:]))}, {images.num_classes} classes",
        *images.remarks,
        f"{stream.num_megabatches} mega-batches, each with {num_train:,} training and {num_valid:,} validation images",
        *([f"{unused:,} training images not used, because all mega-batches have equal size"] if unused else []),
        f"written: {options.out}; next: alma-stream --stream {shlex.quote(str(options.out))} --run RUN",
    ):
        print_line(line, sys.stdout)
