"""``alma-export`` of a model of images: its weights as safetensors, and a ``config.json`` that says what they are.

``config.json`` has ``model``, the options of the architecture as fairseq has them (an ensemble has its members in it),
and ``images``: ``shape`` (C, H, W), ``num_classes``, ``mean`` and ``std`` of each channel in units 0 to 1, with which
images are normalised before. `images.image_classifier.load_exported_images` builds it again. No fairseq here.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Mapping, Optional

from msgspec import Meta, Struct
from torch import Tensor

from fairseq_alma.checkpoints import UnfitCheckpoint
from fairseq_alma.checkpoints.architecture import check_model
from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.checkpoints.ensemble_file import embedded
from fairseq_alma.data.manifest import Side
from fairseq_alma.errors import AlmaError
from fairseq_alma.exchange.exported_folder import (
    read_tensors,
    refuse_special,
    verify_sums,
    write_sums,
    write_tensors,
)
from fairseq_alma.files import Positive, as_record, new_folder, read_json_object
from fairseq_alma.runs.lookup import stream_of
from fairseq_alma.terminal import tell

FORMAT = "fairseq_alma images 1"
_REMEDY = "give a folder that alma-export wrote of a model of images"


class ImagesRecord(Struct):
    """What a model of images looks at."""

    shape: tuple[Side, Side, Side]
    num_classes: Positive
    mean: Annotated[list[float], Meta(min_length=1, max_length=1 << 20)]
    std: Annotated[list[float], Meta(min_length=1, max_length=1 << 20)]


class FolderRecord(Struct):
    """``config.json`` of such a folder."""

    format: str
    model: dict[str, Any]
    images: ImagesRecord


def export_images(path: Path, out: Path, stream_folder: Optional[Path] = None) -> int:
    """Write the checkpoint of a model of images, or of an ensemble of them, as a folder.

    Args:
        path: the checkpoint.
        out: the folder, which must not be there.
        stream_folder: the stream that it was trained on; None: the one that it names.

    Returns:
        Size of the weights' file, in bytes.

    Raises:
        AlmaError: it is no such checkpoint, or the stream is not there or not of images; nothing is written then.
    """
    checkpoint = read_checkpoint(path)
    config, weights = embedded(checkpoint["cfg"]["model"], checkpoint["model"], path.parent)
    images = stream_of(checkpoint, path, stream_folder, "images").images
    assert images is not None  # of a stream of images
    record = {
        "format": FORMAT,
        "model": config,
        "images": {
            "dataset": images.dataset,
            "shape": list(images.shape),
            "num_classes": images.num_classes,
            "mean": list(images.mean),
            "std": list(images.std),
        },
    }
    with new_folder(out, "--out ", "alma-export") as folder:
        write_tensors({name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        write_sums(folder)
    return (out / "model.safetensors").stat().st_size


def read_folder(folder: Path) -> tuple[FolderRecord, Mapping[str, Tensor]]:
    """Return what a folder says of its model, and the weights.

    Raises:
        AlmaError: it is no such folder, or its weights are not those of its configuration.
    """
    refuse_special(folder / "config.json")
    if not (folder / "config.json").is_file():
        raise AlmaError(f"{folder}: there is no config.json in it; {_REMEDY}")
    content = read_json_object(folder / "config.json", _REMEDY)
    if content.get("format") != FORMAT:
        raise AlmaError(f"{folder / 'config.json'}: format {content.get('format')!r:.60} found; {_REMEDY}")
    if note := verify_sums(folder):
        tell(note, sys.stderr)
    record = as_record(content, FolderRecord, folder / "config.json", _REMEDY)
    weights = read_tensors(folder / "model.safetensors")
    try:
        check_model(record.model, weights)
    except UnfitCheckpoint as error:
        raise AlmaError(f"{folder}: {error}; {_REMEDY}") from error
    return record, weights
