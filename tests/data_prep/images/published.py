"""Small files in the formats in which image data sets are published."""

import gzip
import struct
from pathlib import Path
from typing import Optional

import numpy as np

MNIST_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def random_images(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write(path: Path, content: bytes, packed: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.with_name(f"{path.name}.gz") if packed else path
    path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    return path


def write_mnist(
    folder: Path,
    num_train: int = 40,
    num_test: int = 10,
    num_classes: int = 10,
    packed: bool = True,
    names: tuple[str, ...] = MNIST_NAMES,
    first_label: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Write the four files; return all images ``(n, 28, 28)`` and labels, training first."""
    images = random_images(num_train + num_test, 28, 28)
    labels = np.arange(num_train + num_test) % num_classes + first_label
    parts = (images[:num_train], labels[:num_train], images[num_train:], labels[num_train:])
    for name, part in zip(names, parts, strict=True):
        write(folder / name, idx_bytes(part), packed)
    return images, labels


def python2_pickle(**content: object) -> bytes:
    """Spell a dictionary as Python 2 and its NumPy did: what the python version of CIFAR consists of."""
    items = b"".join(_value(key.encode()) + _value(value) for key, value in content.items())
    return b"\x80\x02}(" + items + b"u."


def _value(value: object) -> bytes:
    if isinstance(value, bytes):
        return b"T" + struct.pack("<i", len(value)) + value
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, list):
        return b"](" + b"".join(_value(one) for one in value) + b"e"
    assert isinstance(value, np.ndarray) and value.dtype == np.uint8
    make = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"(" + b"".join(_value(size) for size in value.shape) + b"t"
    return make + b"(K\x01" + shape + kind + b"\x89" + _value(value.tobytes()) + b"tb"


def write_cifar10(folder: Path, version: str, per_file: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Write six files of the binary or python version; return all images ``(n, 3, 32, 32)`` and labels."""
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    images, labels = random_images(6 * per_file, 3, 32, 32), np.arange(6 * per_file) % 10
    for number, name in enumerate(names):
        part = slice(number * per_file, (number + 1) * per_file)
        pixels = images[part].reshape(per_file, -1)
        if version == "binary":
            write(folder / f"{name}.bin", np.column_stack([labels[part].astype(np.uint8), pixels]).tobytes())
        else:
            names_of_images = [b"a.png"] * per_file
            write(
                folder / name,
                python2_pickle(data=pixels, labels=labels[part].tolist(), filenames=names_of_images, batch_label=b"x"),
            )
    return images, labels


def write_cifar100(folder: Path, version: str, counts: tuple[int, int] = (30, 10)) -> tuple[np.ndarray, np.ndarray]:
    """Write two files; return all images and fine labels; the coarse label is a fifth of the fine one."""
    images, fine = random_images(sum(counts), 3, 32, 32), np.arange(sum(counts)) * 7 % 100
    start = 0
    for name, count in zip(("train", "test"), counts, strict=True):
        part = slice(start, start + count)
        pixels = images[part].reshape(count, -1)
        if version == "binary":
            records = np.column_stack([(fine[part] // 5).astype(np.uint8), fine[part].astype(np.uint8), pixels])
            write(folder / f"{name}.bin", records.tobytes())
        else:
            content = python2_pickle(
                data=pixels, fine_labels=fine[part].tolist(), coarse_labels=(fine[part] // 5).tolist()
            )
            write(folder / name, content)
        start += count
    return images, fine


def save_arrays(folder: Path, **arrays: Optional[np.ndarray]) -> list[str]:
    """Save arrays and return the options of ``alma-prep-images arrays`` that name them."""
    options = []
    for name, array in arrays.items():
        if array is not None:
            np.save(folder / f"{name}.npy", array)
            options += [f"--{name.replace('_', '-')}", str(folder / f"{name}.npy")]
    return options
