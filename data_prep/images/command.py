"""``alma-prep-images``: published image files to a stream of mega-batches."""

import sys
from typing import Optional, Sequence

from data_prep.images.image_set import ImageSet
from data_prep.images.options import parse_options
from data_prep.images.prepare import prepare
from fairseq_alma.cli.entry import command
from fairseq_alma.data.stream import Stream, megabatch_valid_name
from fairseq_alma.terminal import tell


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


if __name__ == "__main__":
    sys.exit(main(None))
