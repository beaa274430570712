"""The course of ``alma-prep-images``: read, deal, write, publish."""

from dataclasses import replace
from typing import Optional

from data_prep.build_folder import BuildFolder
from data_prep.existing_stream import refuse_other_command, stream_at
from data_prep.images.datasets import load
from data_prep.images.image_set import ImageSet
from data_prep.images.input_files import InputFiles
from data_prep.images.options import ImagePrepOptions
from fairseq_alma.data.image_writer import write_image_stream
from fairseq_alma.data.stream import Stream

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
        images = load(options, files)
        record = {"command": "create", "options": options.that_decide(), "inputs": files.records}
        if there is not None:
            refuse_other_command(options.out, there.history[0], record, _ADVICE)
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
        build.publish(stream)
    return stream, images
