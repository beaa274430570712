"""What the members of an ensemble must share: the things whose probabilities are averaged, and what they look at.

Language models share a vocabulary, image models their classes and the shape of the images. All but the dictionary
is read from weights: a checkpoint of an image model does not say which images it was trained on. No fairseq here.
"""

from pathlib import Path
from typing import Mapping, Optional, Sequence

from fairseq_alma.checkpoints.checkpoint_file import DICTIONARY_KEY, Checkpoint
from fairseq_alma.checkpoints.ensemble_file import ENSEMBLE_ARCH, Weights
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError

EMBEDDING = "embed_tokens.weight"
"""Ends the name of the input embeddings, a row for each token of the vocabulary, in every language model here."""
NETWORK = "network."
"""Begins the name of each weight of an image model; linear maps are (N, O, I), convolutions (N, O, I, 3, 3)."""
SHARED = {
    "vocab_size": "a vocabulary of {} tokens",
    "num_classes": "{} classes",
    "image_pixels": "images of {} pixels in all channels",
    "image_channels": "images of {} channels",
}
"""What members may have in common, in words. A convolutional network takes images of any number of pixels."""


def shared_outputs(paths: Sequence[Path], checkpoints: Sequence[Checkpoint]) -> dict[str, int]:
    """Return what is known of what members share, by the names in `SHARED`.

    Args:
        paths: the members' files, for messages.
        checkpoints: their contents.

    Raises:
        AlmaError: a member predicts or takes something else than those before it, or is neither a language model nor
            one of images.
    """
    shared: dict[str, int] = {}
    source: dict[str, Path] = {}
    for path, checkpoint in zip(paths, checkpoints, strict=True):
        found = _outputs(path, checkpoint)
        if shared and ("vocab_size" in found) != ("vocab_size" in shared):
            raise AlmaError(f"{path}: {_kind(found)}, {paths[0]} {_kind(shared)}; an ensemble has members of one kind")
        for name, number in found.items():
            if shared.setdefault(name, number) != number:
                here, there = SHARED[name].format(number), SHARED[name].format(shared[name])
                raise AlmaError(f"{path}: {here}, {source[name]} has {there}; {_remedy(shared)}")
            source.setdefault(name, path)
    return shared


def shared_dictionary(paths: Sequence[Path], checkpoints: Sequence[Checkpoint]) -> Optional[str]:
    """Return the sha256 of the members' dictionary, or None if none of them knows it.

    Raises:
        AlmaError: two members know different ones.
    """
    known: Optional[tuple[Path, str]] = None
    for path, checkpoint in zip(paths, checkpoints, strict=True):
        sha256 = checkpoint.get("task_state", {}).get(DICTIONARY_KEY)
        if sha256 is None:
            continue
        if known is None:
            known = path, sha256
        elif sha256 != known[1]:
            remedy = _remedy({"vocab_size": 0})
            raise AlmaError(
                f"{path}: trained with another dictionary ({sha256[:12]}…) than {known[0]} ({known[1][:12]}…); {remedy}"
            )
    return None if known is None else known[1]


def _outputs(path: Path, checkpoint: Checkpoint) -> dict[str, int]:
    config, weights = checkpoint["cfg"]["model"], checkpoint["model"]
    if config["_name"] == ENSEMBLE_ARCH:
        return {name: config[name] for name in SHARED if config.get(name)}
    for name, tensor in weights.items():
        if name.endswith(EMBEDDING):
            return {"vocab_size": tensor.size(0)}
    outputs = _of_images(weights)
    if not outputs:
        raise AlmaError(
            f"{path}: architecture {config['_name']} has neither input embeddings nor a network for images; give "
            "language models, or image models"
        )
    return outputs


def _of_images(weights: Weights) -> dict[str, int]:
    shapes = [tensor.shape for name, tensor in weights.items() if name.startswith(NETWORK)]
    linear = [shape for shape in shapes if len(shape) == 3]
    convolutions = [shape for shape in shapes if len(shape) == 5]
    if not linear:
        return {}
    first = {"image_channels": convolutions[0][2]} if convolutions else {"image_pixels": linear[0][2]}
    return {"num_classes": linear[-1][1], **first}


def _kind(outputs: Mapping[str, int]) -> str:
    return "is a language model" if "vocab_size" in outputs else "classifies images"


def _remedy(outputs: Mapping[str, int]) -> str:
    if "vocab_size" in outputs:
        return "the members of an ensemble must share their dictionary; train them on streams with one tokenizer"
    return "the members of an ensemble must share classes and shape of their images; train them on one data set"


def check_dictionary(checkpoint: Checkpoint, path: Optional[str], stream: Stream) -> None:
    """Raise AlmaError if a checkpoint says that its model knows another vocabulary than the stream's."""
    found = checkpoint.get("task_state", {}).get(DICTIONARY_KEY, stream.dictionary_sha256)
    if found != stream.dictionary_sha256:
        raise AlmaError(
            f"{path}: trained with another tokenizer (dict.txt {found[:12]}…) than {stream.root} has "
            f"({stream.dictionary_sha256[:12]}…); give the stream it was trained on, or one prepared with its "
            "tokenizer (alma-prep-text --tokenizer)"
        )
