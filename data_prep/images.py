"""``alma-prep-images``: convert an image data set to a stream of mega-batches.

Formats of image data sets:

- idx: a magic number, the sizes of the dimensions, then bytes (http://yann.lecun.com/exdb/mnist/). In EMNIST (Cohen et
  al. 2017), the images are transposed.
- binary version of CIFAR-10 and CIFAR-100 (Krizhevsky 2009): for each image, the label bytes, then the pixels, channels
  first.
- scikit-learn's digits: ``digits.csv.gz``, with 64 pixels from 0 to 16 and a label in each row.
- ``.npy`` files: one array of images and one array of labels.
- Folders with one subfolder of image files for each class; Pillow reads the files.
"""

import importlib.util
import io
import math
import os
import shlex
import struct
import sys
import warnings
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any, Optional, Sequence

import numpy as np

from fairseq_alma.data.image_stream import ImageSet, read_npy, write_image_stream
from fairseq_alma.data.stream import (
    MANIFEST,
    file_sha256,
    recorded_name,
    refuse_other_command,
    split_name,
    stream_at,
)
from fairseq_alma.errors import AlmaError, refuse_no_file, refusing_damage
from fairseq_alma.files import MAX_MEGABATCHES, publish, read_file, work_folder
from fairseq_alma.options import Options, flag, integer, opt, options_of, real, utf8_path, utf8_word
from fairseq_alma.terminal import Parser, command, print_line

_EPILOG = """examples:
  alma-prep-images mnist --source mnist/ --out stream --megabatches 500
  alma-prep-images emnist --split letters --source emnist/gzip --out stream --megabatches 100
  alma-prep-images arrays --images x.npy --labels y.npy --out stream --megabatches 10
  alma-prep-images folder --source photos/ --out stream --megabatches 10

Repeating a completed command changes nothing."""
_ARRAYS = ("images", "labels", "test_images", "test_labels")
_COMMON = ("out", "megabatches", "seed", "valid_fraction")
_SHARE = real(0, 1, above=True, below=True)
_LARGEST = 2**63 - 1
IDX_NAMES: tuple[str, ...] = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
EMNIST_CLASSES = {"balanced": 47, "letters": 26, "digits": 10, "byclass": 62, "bymerge": 47, "mnist": 10}
CIFAR = {  # data set -> (file names, folder in the archive, number of classes of each label byte)
    "cifar10": (
        (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"),
        "cifar-10-batches-bin",
        [10],
    ),
    "cifar100": (("train.bin", "test.bin"), "cifar-100-binary", [20, 100]),
}
_CIFAR_SHAPE = (3, 32, 32)
_MOST_CHANNELS = 4
# training or test set: (images ``(n, C, H, W)``, uint8; labels ``(n,)``, int64 from 0)
Part = tuple[np.ndarray, np.ndarray]


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
    test_fraction: Optional[float] = opt(0.2, "share of images held out for testing", range=_SHARE, metavar="F")
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
    for dataset, (text, _, own) in _DATASETS.items():
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
    if options.test_images is not None and args.test_fraction is not None:
        parser.error("--test-fraction: not allowed with --test-images; remove --test-fraction")
    if (
        args.dataset == "folder"
        and args.test_fraction is not None
        and all((args.source / part).is_dir() for part in ("train", "test"))
    ):
        parser.error(f"--test-fraction: {args.source} has a folder test; remove --test-fraction or the folder")
    fraction = None if options.test_images is not None else options.test_fraction
    return replace(options, test_fraction=fraction, name=options.name or args.dataset)


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    """Convert an image data set to a stream, and print a summary."""
    run(parse_options(argv))


def run(options: ImagePrepOptions) -> None:
    """Write the stream of ``options``, and print a summary.

    Raises:
        AlmaError: the input, the options or the files at ``--out`` are invalid.
    """
    stream_at(options.out, "images")  # raises an error before any input file is read
    with work_folder(options.out, "alma-prep-images") as root:
        existing = stream_at(options.out, "images")  # Another process may have held the lock and written a stream.
        files = InputFiles()
        _, load, own = _DATASETS[options.dataset]
        images = load(files, options)
        # The manifest does not record the options for files, because it records the sha256 of the files.
        names = [name for name in (*_COMMON, *own) if name not in ("out", "source", *_ARRAYS)]
        record = {
            "command": "create",
            "options": {"DATASET": options.dataset, **{flag(name): getattr(options, name) for name in names}},
            "inputs": files,
        }
        if existing is not None:
            refuse_other_command(options.out, existing.history, record, "choose another --out, or remove the stream")
            existing.verify(split.name for split in existing.splits)
            print_line(f"{options.out}: the same command has already completed; nothing to do", sys.stdout)
            return
        stream = write_image_stream(
            root / "stream", images, options.megabatches, options.seed, options.valid_fraction, [record]
        )
        publish(root / "stream", options.out)
    sizes = {split.name: split.num_images for split in stream.splits}
    num_train, num_valid, num_test = sizes[split_name(0)], sizes[split_name(0, "valid")], sizes["test"]
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


def find_file(source: Path, name: str, folder: str = "") -> Optional[Path]:
    """Return the path of a file, plain or ``.gz``, in ``source`` or in ``source/folder``; None if there is no file."""
    candidates = [source / part / f"{name}{end}" for part in ("", folder) for end in ("", ".gz")]
    return next((each for each in candidates if each.is_file()), None)


class InputFiles(list[dict[str, Any]]):
    """Name, size in bytes and sha256 of each input file of a command, for the manifest."""

    def add(self, path: Path, option: str, folder: str = "") -> Path:
        """Record a file in a class ``folder``, and return ``path``. Raises AlmaError if it is not a regular file."""
        refuse_no_file(path, option, "give another path")
        self.append(
            {"name": recorded_name(Path(folder, path.name)), "size": path.stat().st_size, "sha256": file_sha256(path)}
        )
        return path

    def find(self, source: Path, names: Sequence[str], folder: str = "") -> list[Path]:
        """Find and record files as `find_file` does.

        Returns:
            One path for each name in ``names``.

        Raises:
            AlmaError: a file is missing.
        """
        paths = []
        for name in names:
            if (path := find_file(source, name, folder)) is None:
                raise AlmaError(
                    f"--source {source}: expected {name} or {name}.gz in this folder, found neither; give the folder "
                    f"that contains {', '.join(names)}{f' or {folder}/' if folder else ''}"
                )
            paths.append(self.add(path, "--source"))
        return paths


def _checked(images: np.ndarray, labels: np.ndarray, paths: Sequence[Path], num_classes: int, first: int = 0) -> Part:
    """Check a training or test set whose smallest valid label is ``first``. Return (images, labels - ``first``)."""
    images_path, labels_path = paths[0], paths[-1]
    if not len(images):
        raise AlmaError(f"{images_path}: expected at least 1 image, found none; give a file with images")
    if len(images) != len(labels):
        raise AlmaError(
            f"{labels_path}: expected one label for each of the {len(images)} images in {images_path}, found "
            f"{len(labels)} labels; give the labels of these images"
        )
    wrong = np.flatnonzero((labels < first) | (labels >= first + num_classes))
    if len(wrong):
        raise AlmaError(
            f"{labels_path}: expected labels from {first} to {first + num_classes - 1}, found {labels[wrong[0]]} at "
            f"image {wrong[0]} (numbered from 0); correct the labels, or download the file again"
        )
    return images, labels.astype(np.int64) - first


def join_parts(
    dataset: str,
    parts: Sequence[Part],
    num_classes: int,
    augment: bool = False,
    remarks: Sequence[str] = (),
    test_fraction: Optional[float] = None,
    seed: int = 0,
) -> ImageSet:
    """Join the training sets and the test set of a data set. If ``parts`` has no test set, sample one from the images.

    Args:
        dataset: name of the data set in the manifest.
        parts: images and labels of each training set, then of the test set. A single part is a training set.
        num_classes: number of classes.
        augment: whether training uses random crops and flips.
        remarks: lines for the printed summary.
        test_fraction: share of the images to sample; required if ``parts`` has no test set.
        seed: random seed for sampling the test set.
    """
    if len(parts) > 1:
        images, labels = (np.concatenate(each) for each in zip(*parts, strict=True))
        num_test = len(parts[-1][0])
    else:
        images, labels = parts[0]
        num_test = min(max(round((test_fraction or 0) * len(images)), 1), len(images) - 1)
        # The second seed makes the test set independent of the mega-batches.
        order = np.random.Generator(np.random.PCG64([seed, 1])).permutation(len(images))
        order = np.concatenate([np.sort(order[num_test:]), np.sort(order[:num_test])])
        images, labels = images[order], labels[order]
        remarks = (*remarks, f"no test set given: {num_test:,} images are held out as the test set (seed {seed})")
    return ImageSet(dataset, images, labels, len(images) - num_test, num_classes, augment, tuple(remarks))


def read_idx(path: Path, num_dimensions: int) -> np.ndarray:
    """Return the array of unsigned bytes in an idx file, plain or ``.gz``. Raises AlmaError if the file is damaged."""
    content = read_file(path)
    header = struct.Struct(f">{1 + num_dimensions}I")
    magic = struct.pack(">HBB", 0, 8, num_dimensions)
    if len(content) < header.size or not content.startswith(magic):
        begins = content[:4].hex(" ") if len(content) >= header.size else f"{len(content)} bytes"
        raise AlmaError(
            f"{path}: expected an idx file of bytes with {num_dimensions} dimensions (first bytes "
            f"{magic.hex(' ')}), found {begins}; download the file again"
        )
    sizes = header.unpack_from(content)[1:]
    needed, found = math.prod(sizes), len(content) - header.size
    if found != needed:
        shape = " x ".join(map(str, sizes))
        raise AlmaError(f"{path}: expected {shape} = {needed} bytes of data, found {found}; download the file again")
    return np.frombuffer(content, np.uint8, offset=header.size).reshape(sizes)


def load_idx(files: InputFiles, given: Any) -> ImageSet:
    """Load MNIST, Fashion-MNIST, or a split of EMNIST from ``given.source``."""
    names, folder, num_classes, first = IDX_NAMES, "", 10, 0
    dataset, remarks, parts = given.dataset, [], []
    if is_emnist := dataset == "emnist":
        names, folder, num_classes = emnist_names(given.split), "gzip", EMNIST_CLASSES[given.split]
        dataset, first = f"emnist-{given.split}", int(given.split == "letters")
        remarks = ["images transposed: the published files have rows and columns exchanged"]
        remarks += ["labels changed from 1-26 in the published files to 0-25"] if first else []
    paths = files.find(given.source, names, folder)
    for pair in (paths[:2], paths[2:]):
        images = read_idx(pair[0], 3)
        if images.shape[1:] != (28, 28):
            size = " x ".join(map(str, images.shape[1:]))
            raise AlmaError(f"{pair[0]}: expected images of 28 x 28 pixels, found {size}; download the file again")
        images = images.swapaxes(1, 2) if is_emnist else images
        parts.append(_checked(images[:, None], read_idx(pair[1], 1), pair, num_classes, first))
    return join_parts(dataset, parts, num_classes, remarks=remarks)


def emnist_names(split: str) -> tuple[str, ...]:
    """Return the file names of an EMNIST split: training images, training labels, test images, test labels."""
    return tuple(f"emnist-{split}-{name.replace('t10k', 'test')}" for name in IDX_NAMES)


def load_cifar(files: InputFiles, given: Any) -> ImageSet:
    """Load the binary version of CIFAR-10 or CIFAR-100. ``given.coarse`` selects the coarse labels of CIFAR-100."""
    names, folder, classes = CIFAR[given.dataset]
    column = 0 if given.coarse else len(classes) - 1
    size = len(classes) + math.prod(_CIFAR_SHAPE)
    parts = []
    for path in files.find(given.source, names, folder):
        content = read_file(path)
        if not content or len(content) % size:
            raise AlmaError(
                f"{path}: expected a multiple of {size} bytes (label bytes per image: {len(classes)}, pixel bytes: "
                f"{math.prod(_CIFAR_SHAPE)}), found {len(content)} bytes; download the file again"
            )
        records = np.frombuffer(content, np.uint8).reshape(-1, size)
        images = records[:, len(classes) :].reshape(-1, *_CIFAR_SHAPE)
        parts.append(_checked(images, records[:, column], [path], classes[column]))
    return join_parts(
        f"{given.dataset}-coarse" if given.coarse else given.dataset, parts, classes[column], augment=True
    )


def load_digits(files: InputFiles, given: Any) -> ImageSet:
    """Load scikit-learn's 8 x 8 digits from ``--source`` or the installed package. Scale the pixels to 0-255."""
    source = given.source
    if source is None:
        spec = importlib.util.find_spec("sklearn")
        if spec is None or spec.origin is None:
            raise AlmaError(
                "digits: scikit-learn is not installed; run pip install scikit-learn, or give --source "
                "with the folder that contains digits.csv.gz"
            )
        source = Path(spec.origin).parent / "datasets" / "data"
    (path,) = files.find(source, ["digits.csv"])
    with (
        refusing_damage(f"{path}: not a table of integers", "download the file again"),
        warnings.catch_warnings(action="ignore"),
    ):
        rows = np.loadtxt(io.BytesIO(read_file(path)), delimiter=",", ndmin=2, dtype=np.int64)
    pixels, labels = rows[:, :-1], rows[:, -1]
    if len(rows) < 2 or pixels.shape[1] != 64 or pixels.min() < 0 or pixels.max() > 16:
        raise AlmaError(
            f"{path}: expected at least 2 rows of 64 pixels from 0 to 16, found {len(rows)} rows of {pixels.shape[1]} "
            f"pixels from {pixels.min(initial=0)} to {pixels.max(initial=0)}; download the file again"
        )
    images = ((2 * 255 * pixels + 16) // 32).astype(np.uint8).reshape(-1, 1, 8, 8)  # rounds 255 / 16 * pixels
    parts, remarks = [_checked(images, labels, [path], 10)], ["pixels scaled from 0-16 to 0-255"]
    return join_parts("digits", parts, 10, False, remarks, given.test_fraction, given.seed)


def load_arrays(files: InputFiles, given: Any) -> ImageSet:
    """Load ``.npy`` files of images and labels. ``given`` contains the options of ``alma-prep-images arrays``."""
    parts = [_read_arrays(files, given, given.images, given.labels, "")]
    if given.test_images is not None:
        parts.append(_read_arrays(files, given, given.test_images, given.test_labels, "test-"))
        if parts[1][0].shape[1:] != parts[0][0].shape[1:]:
            raise AlmaError(
                f"--test-images {given.test_images}: expected images of shape {parts[0][0].shape[1:]} as in --images, "
                f"found {parts[1][0].shape[1:]}; give arrays with the same image shape"
            )
    elif len(parts[0][0]) < 2:
        raise AlmaError(f"--images {given.images}: expected at least 2 images, found 1; give more images")
    labels = np.concatenate([labels for _, labels in parts])
    least, most = labels.min(), labels.max()
    num_classes = given.num_classes or int(most) + 1
    remarks = []
    if (num_found := len(np.unique(labels))) < num_classes:
        remarks = [f"only {num_found} of {num_classes} classes have images (labels {least} to {most})"]
    if least > 0:
        remarks = [
            f"the labels range from {least} to {most}: class 0 of {num_classes} classes has no images; if the first "
            f"class is {least}, subtract {least} from the labels"
        ]
    return join_parts(given.name, parts, num_classes, given.augment, remarks, given.test_fraction, given.seed)


def _read_arrays(files: InputFiles, given: Any, images_path: Path, labels_path: Path, part: str) -> Part:
    images, labels = (
        read_npy(
            files.add(path, option), f"{option} {path}: not a .npy file of numbers", "write the array with numpy.save"
        )
        for option, path in ((f"--{part}images", images_path), (f"--{part}labels", labels_path))
    )
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape:
        raise AlmaError(
            f"--{part}images {images_path}: expected a non-empty uint8 array (images, height, width) or (images, "
            f"channels, height, width), found {images.dtype} {images.shape}; convert the array and save it again"
        )
    if images.ndim == 3:
        images = images[:, None]
    elif given.channels == "last":
        images = images.transpose(0, 3, 1, 2)
    if images.shape[1] > _MOST_CHANNELS:
        other = "first" if given.channels == "last" else "last"
        raise AlmaError(
            f"--{part}images {images_path}: expected at most {_MOST_CHANNELS} channels, found {images.shape[1]}; if "
            f"the channel dimension is {other}, give --channels {other}"
        )
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise AlmaError(
            f"--{part}labels {labels_path}: expected one integer per image, found {labels.dtype} {labels.shape}; "
            "convert the array and save it again"
        )
    # Without --num-classes, a larger label is probably a mistake.
    return _checked(images, labels, [images_path, labels_path], given.num_classes or 100_000)


def load_folder(files: InputFiles, given: Any) -> ImageSet:
    """Load image files from the class subfolders of ``--source``, or of ``--source/train`` and ``--source/test``.

    Without ``test``, ``train`` is a split only if it has subfolders. ``given`` contains the options of the command.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise AlmaError("image folders require Pillow; run pip install pillow") from error
    source = given.source

    def visible(folder: Path) -> list[Path]:  # Earlier commands may have written streams into the folder.
        streams = {*map(os.path.realpath, [given.out, *(each.parent for each in folder.glob(f"*/{MANIFEST}"))])}
        return sorted(path for path in folder.glob("[!.]*") if os.path.realpath(path) not in streams)

    found = [path.name for path in visible(source) if path.is_dir()]
    is_split = "train" in found and ("test" in found or any(path.is_dir() for path in visible(source / "train")))
    folders = [source / name for name in ("train", "test") if name in found] if is_split else [source]
    subfolders = [[path.name for path in visible(folder) if path.is_dir()] for folder in folders]
    classes = subfolders[0]
    if not classes:
        raise AlmaError(f"--source {source}: no subfolders found; give a folder with a subfolder for each class")
    parts: list[Part] = []
    first: Optional[tuple[Path, tuple[int, ...]]] = None
    for folder, names in zip(folders, subfolders, strict=True):
        images, labels = [], []
        if unknown := [name for name in names if name not in classes]:
            raise AlmaError(
                f"{folder}: expected only the classes of {folders[0]}, found {', '.join(unknown)[:200]}; add "
                "training images of these classes, or remove these folders"
            )
        for label, name in enumerate(classes):
            for path in visible(folder / name):
                files.add(path, "--source", name)
                with (
                    refusing_damage(f"{path}: Pillow cannot read this file", "convert the file to PNG, or remove it"),
                    Image.open(path) as stored,
                ):
                    opened = ImageOps.exif_transpose(stored)
                    mode = opened.mode
                    pixels = np.asarray(opened.convert("L" if mode in ("1", "L", "LA") else "RGB"))
                if mode.startswith(("I", "F")):  # conversion would clip the values
                    raise AlmaError(
                        f"{path}: expected 8 bits per channel, found mode {mode}; convert the file to 8 bits"
                    )
                image = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
                first = first or (path, image.shape)
                if image.shape != first[1]:
                    raise AlmaError(
                        f"{path}: expected an image of shape {first[1]} as in {first[0]}, found {image.shape}; convert "
                        "all images to the same size and color mode"
                    )
                images.append(image)
                labels.append(label)
        if len(images) < 2:
            raise AlmaError(f"{folder}: expected at least 2 images, found {len(images)}; give more images")
        parts.append((np.stack(images), np.array(labels, np.int64)))
    remarks = [f"classes in order: {', '.join(classes)[:200]}"]
    if is_split and (unused := sorted({*found} - {"train", "test"})):
        remarks.append(f"folders not used: {', '.join(unused)[:200]}")
    return join_parts(given.name, parts, len(classes), given.augment, remarks, given.test_fraction, given.seed)


_DATASETS: dict[str, tuple[str, Any, tuple[str, ...]]] = {  # help text, loader, options in addition to `_COMMON`
    "mnist": ("MNIST: the four idx files, plain or .gz", load_idx, ("source",)),
    "fashion-mnist": ("Fashion-MNIST: the four idx files, plain or .gz", load_idx, ("source",)),
    "emnist": (
        "EMNIST: the idx files of one split, plain or .gz; the command corrects the transposed images",
        load_idx,
        ("source", "split"),
    ),
    "cifar10": ("CIFAR-10: the files of the binary version", load_cifar, ("source",)),
    "cifar100": ("CIFAR-100: the files of the binary version", load_cifar, ("source", "coarse")),
    "digits": (
        "scikit-learn's 8 x 8 digits; by default from the installed package",
        load_digits,
        ("source", "test_fraction"),
    ),
    "arrays": (
        "images and labels in .npy files",
        load_arrays,
        ("test_fraction", "name", "augment", *_ARRAYS, "channels", "num_classes"),
    ),
    "folder": (
        "image files of the same shape, in one subfolder for each class, optionally inside train/ and test/",
        load_folder,
        ("source", "test_fraction", "name", "augment"),
    ),
}
