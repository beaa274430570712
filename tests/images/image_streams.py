"""Small streams of learnable images: each class is a bright patch at its own position, with noise."""

from pathlib import Path

import numpy as np

from fairseq_alma.data.image_stream import ImageSet, write_image_stream

NUM_CLASSES = 4
Shape = tuple[int, int, int]


def make_images(num_images: int, seed: int, shape: Shape = (1, 8, 8)) -> tuple[np.ndarray, np.ndarray]:
    """Return (n, C, H, W) bytes and (n) labels."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(NUM_CLASSES, size=num_images)
    images = generator.integers(0, 120, size=(num_images, *shape), dtype=np.uint8)
    half = (shape[1] // 2, shape[2] // 2)
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[:, row * half[0] : (row + 1) * half[0], column * half[1] : (column + 1) * half[1]] += 60
    return images, labels.astype(np.int64)


def make_stream(
    root: Path, num_megabatches: int = 6, num_train: int = 240, shape: Shape = (1, 8, 8), augment: bool = False
) -> Path:
    """Write a stream with 100 test images."""
    images, labels = make_images(num_train + 100, 5, shape)
    data = ImageSet("patches", images, labels, num_train, NUM_CLASSES, augment)
    write_image_stream(root, data, num_megabatches, seed=1)
    return root
