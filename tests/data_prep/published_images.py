"""Write small files in the formats of published image data sets."""

import gzip
import struct
from pathlib import Path

import numpy as np

MNIST_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


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


def write_cifar(folder: Path, dataset: str, per_file: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Write the binary files; return all images ``(n, 3, 32, 32)`` and fine labels; a coarse one is a fifth of it."""
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    names = names if dataset == "cifar10" else ["train.bin", "test.bin"]
    count = len(names) * per_file
    images, labels = random_images(count, 3, 32, 32), np.arange(count) * 7 % (10 if dataset == "cifar10" else 100)
    columns = [labels] if dataset == "cifar10" else [labels // 5, labels]
    records = np.column_stack([*(each.astype(np.uint8) for each in columns), images.reshape(count, -1)])
    for number, name in enumerate(names):
        write(folder / name, records[number * per_file : (number + 1) * per_file].tobytes())
    return images, labels


def save_arrays(folder: Path, **arrays: np.ndarray) -> list[str]:
    """Save arrays; return the options of ``alma-prep-images arrays`` with their paths."""
    options = []
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
        options += [f"--{name.replace('_', '-')}", str(folder / f"{name}.npy")]
    return options
