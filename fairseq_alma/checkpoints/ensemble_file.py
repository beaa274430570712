"""Ensembles as one checkpoint file: its content, how members are joined, found and loaded.

Such a file is a checkpoint of fairseq whose ``cfg.model`` is ``{"_name": "alma_ensemble", …, "members": [...]}``. The
dots are the sizes that the members share (`shared_outputs`). There is one entry per member, a single model, with its
``weight`` (they sum to 1), the ``sha256`` of the file it came from, and

- by reference: ``path``, relative to the ensemble's own folder, and ``absolute_path``, where to look second;
- embedded: ``origin``, the file that it came from, and ``config``, its ``cfg.model``; its weights are in ``model``
  under ``decoder.members.N.`` plus their own names.
"""

import os
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence

import torch
from torch import Tensor, nn

from fairseq_alma.checkpoints.architecture import ENSEMBLE_ARCH, Weights
from fairseq_alma.checkpoints.checkpoint_file import DICTIONARY_KEY, Checkpoint, read_checkpoint, untrained_checkpoint
from fairseq_alma.data.stream import Stream, file_sha256
from fairseq_alma.errors import AlmaError


@dataclass(frozen=True)
class MemberModel:
    """One member of an ensemble.

    Attributes:
        config: its ``cfg.model``.
        weights: its ``model``, tensors still on disk.
        file: where it is referred to, or None if it is embedded.
    """

    config: dict[str, Any]
    weights: Weights
    file: Optional[Path]


def weights_of_member(weights: Weights, index: int) -> dict[str, Tensor]:
    """Return the weights of one member under their own names."""
    prefix = f"decoder.members.{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def members_of(config: Mapping[str, Any], weights: Weights, folder: Optional[Path]) -> Iterator[MemberModel]:
    """Look up the members of an ensemble one by one.

    Args:
        config: the ensemble's ``cfg.model``.
        weights: its ``model``; may be left empty by who needs the configuration of embedded members alone.
        folder: the ensemble's own, where relative paths start; None: not known.

    Raises:
        AlmaError: if a member's file is missing, is not the one that the ensemble was made of, or an ensemble itself.
    """
    for index, entry in enumerate(config["members"]):
        if "config" in entry:
            yield MemberModel(entry["config"], weights_of_member(weights, index), None)
            continue
        path = member_file(entry, folder)
        checkpoint = read_checkpoint(path)
        _refuse_ensemble(path, checkpoint)
        yield MemberModel(checkpoint["cfg"]["model"], checkpoint["model"], path)


def member_file(entry: Mapping[str, Any], folder: Optional[Path]) -> Path:
    """Return the file of a member that is referred to; arguments and errors as of `members_of`."""
    places = [*([folder / entry["path"]] if folder is not None else []), Path(entry["absolute_path"])]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise AlmaError(
            f"{places[0]}: this member of the ensemble is missing"
            + (f", and it is not at {places[1]} either" if places[0] != places[-1] else "")
            + "; put it back, or make the ensemble again with alma-ensemble (--embed puts all weights into one file)"
        )
    if file_sha256(path) != entry["sha256"]:
        raise AlmaError(
            f"{path}: changed since the ensemble was made of it, its sha256 does not begin with "
            f"{entry['sha256'][:12]}; restore the file, or make the ensemble again with alma-ensemble"
        )
    return path


def _refuse_ensemble(path: Path, checkpoint: Checkpoint) -> None:
    if checkpoint["cfg"]["model"]["_name"] == ENSEMBLE_ARCH:
        raise AlmaError(f"{path}: an ensemble itself, which cannot be a member; give its members instead")


def join_checkpoints(paths: Sequence[Path], weights: Sequence[float], out: Path, embed: bool = False) -> Checkpoint:
    """Build the checkpoint of an ensemble.

    Args:
        paths: the members' checkpoints.
        weights: what each member counts, at least 0, not all 0.
        out: where the result will be written.
        embed: put the members' weights inside, rather than refer to their files.

    Returns:
        The content for `write_checkpoint`; all but the model is the first member's.

    Raises:
        AlmaError: if a member is no checkpoint of a single model here, predicts something else than the others, or is
            the file to be written.
    """
    checkpoints = [read_checkpoint(path) for path in paths]
    entries: list[dict[str, Any]] = []
    joined: dict[str, Tensor] = {}
    for index, (path, checkpoint, weight) in enumerate(zip(paths, checkpoints, weights, strict=True)):
        _refuse_ensemble(path, checkpoint)
        if path.resolve() == out.resolve():
            raise AlmaError(f"--out {out}: is a member of the ensemble, and would be replaced by it; give another file")
        entry = {"weight": weight / sum(weights), "sha256": file_sha256(path)}
        if embed:
            entry.update(origin=path.name, config=checkpoint["cfg"]["model"])
            joined |= {f"decoder.members.{index}.{name}": tensor for name, tensor in checkpoint["model"].items()}
        else:
            place = _place(path)
            entry.update(path=os.path.relpath(place, out.parent.resolve()), absolute_path=str(place))
        entries.append(entry)
    config = {"_name": ENSEMBLE_ARCH, **shared_outputs(paths, checkpoints), "members": entries}
    dictionary = shared_dictionary(paths, checkpoints)
    state = {**checkpoints[0].get("task_state", {}), **({} if dictionary is None else {DICTIONARY_KEY: dictionary})}
    return untrained_checkpoint({**deepcopy(checkpoints[0]["cfg"]), "model": config}, joined, state)


def _place(path: Path) -> Path:
    return path.parent.resolve() / path.name


def shared_outputs(paths: Sequence[Path], checkpoints: Sequence[Checkpoint]) -> dict[str, int]:
    """Return the sizes that members share: of language models ``vocab_size``, of image models those of their images.

    A convolutional network takes images of any number of pixels, a fully connected one of any number of channels.

    Raises:
        AlmaError: a member predicts or takes something else than those before it.
    """
    shared: dict[str, int] = {}
    for path, checkpoint in zip(paths, checkpoints, strict=True):
        found = _outputs(checkpoint["model"])
        if shared and (not found.keys() & shared.keys() or {**shared, **found} != {**found, **shared}):
            sizes, others = (", ".join(f"{name} {size}" for name, size in each.items()) for each in (found, shared))
            raise AlmaError(f"{path}: {sizes}; the members before it have {others}; {_ALIKE}")
        shared |= found
    return shared


def _outputs(weights: Weights) -> dict[str, int]:
    for name, tensor in weights.items():
        if name.endswith("embed_tokens.weight"):
            return {"vocab_size": tensor.size(0)}
    # Linear maps are (N, O, I), convolutions (N, O, I, 3, 3).
    shapes = [tensor.shape for name, tensor in weights.items() if name.startswith("network.")]
    linear = [shape for shape in shapes if len(shape) == 3]
    convolutions = [shape for shape in shapes if len(shape) == 5]
    first = {"image_channels": convolutions[0][2]} if convolutions else {"image_pixels": linear[0][2]}
    return {"num_classes": linear[-1][1], **first}


_ALIKE = "members must share dictionary, or classes and images: train them on streams of one tokenizer or data set"


def shared_dictionary(paths: Sequence[Path], checkpoints: Sequence[Checkpoint]) -> Optional[str]:
    """Return the sha256 of the members' dictionary, or None if none of them knows it; raise AlmaError if two differ."""
    found = [checkpoint.get("task_state", {}).get(DICTIONARY_KEY) for checkpoint in checkpoints]
    known = [(path, sha256) for path, sha256 in zip(paths, found, strict=True) if sha256 is not None]
    for path, sha256 in known:
        if sha256 != known[0][1]:
            raise AlmaError(
                f"{path}: trained with another dictionary ({sha256[:12]}…) than {known[0][0]} ({known[0][1][:12]}…); "
                f"{_ALIKE}"
            )
    return known[0][1] if known else None


def check_dictionary(checkpoint: Checkpoint, path: Optional[str], stream: Stream) -> None:
    """Raise AlmaError if a checkpoint says that its model knows another vocabulary than the stream's."""
    found = checkpoint.get("task_state", {}).get(DICTIONARY_KEY, stream.dictionary_sha256)
    if found != stream.dictionary_sha256:
        raise AlmaError(
            f"{path}: trained with another tokenizer (dict.txt {found[:12]}…) than {stream.root} has "
            f"({stream.dictionary_sha256[:12]}…); give the stream it was trained on, or one prepared with its "
            "tokenizer (alma-prep-text --tokenizer)"
        )


class TrainedMembers:
    """Put before a fairseq model among the base classes, so that it loads members from an ensemble's checkpoint.

    Attributes:
        embedded: numbers of the members whose weights are in the ensemble's own checkpoint.
    """

    embedded: frozenset[int]

    def trained_members(self) -> Sequence[nn.Module]:
        """Return the members, in their order."""
        raise NotImplementedError

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> None:
        """Load the embedded members; the others have had their weights since they were built.

        Args:
            state_dict: the checkpoint's ``model``.
            strict: every weight of an embedded member must be there, and no other.
            model_cfg: unused; each member has a configuration of its own.
            args: unused, as before.
        """
        for index, member in enumerate(self.trained_members()):
            weights = weights_of_member(state_dict, index)
            if weights or index in self.embedded:
                member.load_state_dict(weights, strict)


def log_of_mean(log_probs: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the log of the weighted mean of probabilities.

    Args:
        log_probs: N tensors of one shape, (…, V), in any precision; changed in place, and asked for one by one, so that
            no more than two of them need memory at a time.
        weights: N numbers of at least 0, in all 1. Python floats, as --fp16 would round a tensor of the model.

    Returns:
        (…, V) fp32; they serve as logits, as their softmax is the mean itself.
    """
    log_weights = torch.tensor(weights, dtype=torch.float64).log().tolist()
    total: Optional[Tensor] = None
    for each, log_weight in zip(log_probs, log_weights, strict=True):
        each = each.float().add_(log_weight)
        total = each if total is None else torch.logaddexp(total, each, out=total)
        del each  # else it lives while the next member computes
    assert total is not None
    return total
