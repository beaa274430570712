"""Checkpoints that stand for several models: what is in them, how they are joined, how members are found and loaded.

Such a file is a checkpoint of fairseq whose ``cfg.model`` is ``{"_name": "alma_ensemble", …, "members": [...]}``. In
place of the dots stands what the members share (`SHARED`). There is one entry per member, with its ``weight`` (they sum
to 1), the ``sha256`` of the file it came from, and

- by reference: ``path``, relative to the ensemble's own folder, and ``absolute_path``, where to look second;
- embedded: ``origin``, the file that it came from, and ``config``, its ``cfg.model``; its weights are in ``model``
  under ``decoder.members.N.`` plus their own names.

A member may be an ensemble itself. No fairseq here.
"""

import os
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence

import torch
from torch import Tensor, nn

from fairseq_alma.checkpoints.architecture import ENSEMBLE_ARCH, MAX_NESTING
from fairseq_alma.checkpoints.checkpoint_file import DICTIONARY_KEY, Checkpoint, read_checkpoint, untrained_checkpoint
from fairseq_alma.data.stream import Stream, file_sha256
from fairseq_alma.errors import AlmaError

Weights = Mapping[str, Tensor]
Config = dict[str, Any]


@dataclass(frozen=True)
class MemberModel:
    """One member of an ensemble, or of a model that was trained jointly.

    Attributes:
        config: its ``cfg.model``; paths of its own members, if it is an ensemble, are absolute.
        weights: its ``model``, tensors still on disk.
        file: where it is referred to, or None if it is embedded.
    """

    config: Config
    weights: Weights
    file: Optional[Path]


def member_prefix(index: int) -> str:
    """Return what stands before the names of a member's weights."""
    return f"decoder.members.{index}."


def weights_of_member(weights: Weights, index: int) -> dict[str, Tensor]:
    """Return the weights of one member under their own names."""
    prefix = member_prefix(index)
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def members_of(config: Mapping[str, Any], weights: Weights, folder: Optional[Path]) -> Iterator[MemberModel]:
    """Look up the members of an ensemble one by one.

    Args:
        config: the ensemble's ``cfg.model``.
        weights: its ``model``; may be left empty by who needs the configuration of embedded members alone.
        folder: the ensemble's own, where relative paths start; None: not known.

    Raises:
        AlmaError: if a member's file is missing or is not the one that the ensemble was made of.
    """
    for index, entry in enumerate(config["members"]):
        if entry.get("depth", 0) > MAX_NESTING:
            raise AlmaError(f"{entry['path']}: a member of a member of an ensemble, more than {MAX_NESTING} deep")
        if "config" in entry:
            yield MemberModel(entry["config"], weights_of_member(weights, index), None)
            continue
        path = member_file(entry, folder)
        checkpoint = read_checkpoint(path)
        found = with_absolute_paths(checkpoint["cfg"]["model"], path.parent, entry.get("depth", 0) + 1)
        yield MemberModel(found, checkpoint["model"], path)


def member_file(entry: Mapping[str, Any], folder: Optional[Path]) -> Path:
    """Return the file of a member that is referred to.

    Args:
        entry: what the ensemble says of it.
        folder: see `members_of`.

    Raises:
        AlmaError: as `members_of`.
    """
    path = _locate(entry, folder)
    if file_sha256(path) != entry["sha256"]:
        raise AlmaError(
            f"{path}: changed since the ensemble was made of it, its sha256 does not begin with "
            f"{entry['sha256'][:12]}; restore the file, or make the ensemble again with alma-ensemble"
        )
    return path


def _locate(entry: Mapping[str, Any], folder: Optional[Path]) -> Path:
    beside = [folder / entry["path"]] if folder is not None else []
    places = [*beside, Path(entry["absolute_path"])]
    for place in places:
        if place.is_file():
            return place
    raise AlmaError(
        f"{places[0]}: this member of the ensemble is missing"
        + (f", and it is not at {places[1]} either" if places[0] != places[-1] else "")
        + "; put it back, or make the ensemble again with alma-ensemble (--embed puts all weights into one file)"
    )


def with_absolute_paths(config: Config, folder: Path, depth: int = 0) -> Config:
    """Return a model's configuration that means the same members wherever it is read; other models' as they are.

    Args:
        config: ``cfg.model``.
        folder: of its file.
        depth: ensembles that it is a member of; noted with each of its own members.
    """
    if config["_name"] != ENSEMBLE_ARCH:
        return config
    root = folder.resolve()
    members = [
        {**entry, "path": str(root / entry["path"]), "depth": depth} if "path" in entry else entry
        for entry in config["members"]
    ]
    return {**config, "members": members}


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


def refers_to(path: Path, members: Sequence[Path]) -> bool:
    """Tell whether a file is an ensemble that refers to these files, and to no others, all counting alike."""
    if not path.is_file():
        return False
    config = read_checkpoint(path)["cfg"]["model"]
    if config["_name"] != ENSEMBLE_ARCH or any("path" not in each for each in config["members"]):
        return False
    found = [Path(os.path.normpath(path.parent.resolve() / each["path"])) for each in config["members"]]
    return found == [_place(each) for each in members] and len({each["weight"] for each in config["members"]}) == 1


def join_checkpoints(
    paths: Sequence[Path], weights: Sequence[float], out: Path, embed: bool = False, before: Optional[Path] = None
) -> Checkpoint:
    """Build the checkpoint of an ensemble.

    Args:
        paths: the members' checkpoints; they may be ensembles themselves.
        weights: what each member counts, at least 0, not all 0.
        out: where the result will be written.
        embed: put the members' weights inside, rather than refer to their files.
        before: an ensemble whose members come first, their files not being read again; each member counts 1 then.

    Returns:
        What `write_checkpoint` takes; what is not the ensemble's own is the first member's.

    Raises:
        AlmaError: if a member is no checkpoint of a model here, predicts something else than the others, is the file
            to be written, or has members itself that are missing or changed.
    """
    new, paths = paths, [*([before] if before is not None else []), *paths]
    checkpoints = [read_checkpoint(path) for path in paths]
    members = list(zip(new, checkpoints[-len(new) :], strict=True))
    for path, checkpoint in members:
        _refuse_to_replace(path, checkpoint, out)
    outputs = shared_outputs(paths, checkpoints)
    dictionary = shared_dictionary(paths, checkpoints)
    entries: list[dict[str, Any]] = [] if before is None else _entries_again(before, checkpoints[0], out)
    joined: dict[str, Tensor] = {}
    weights = [*(1.0 for _ in entries), *weights]
    for entry in entries:
        entry["weight"] = 1.0 / sum(weights)
    for index, (path, checkpoint) in enumerate(members, start=len(entries)):
        entry = {"weight": weights[index] / sum(weights), "sha256": file_sha256(path)}
        if embed:
            config, content = embedded(checkpoint["cfg"]["model"], checkpoint["model"], path.parent)
            entry.update(origin=path.name, config=config)
            joined.update({member_prefix(index) + name: tensor for name, tensor in content.items()})
        else:
            entry.update(_reference(_place(path), out))
        entries.append(entry)
    config = {"_name": ENSEMBLE_ARCH, **outputs, "members": entries}
    return _checkpoint(checkpoints[0], config, joined, dictionary)


def _place(path: Path) -> Path:
    return path.parent.resolve() / path.name


def _reference(place: Path, out: Path) -> dict[str, str]:
    return {"path": os.path.relpath(place, out.parent.resolve()), "absolute_path": str(place)}


def _entries_again(before: Path, ensemble: Checkpoint, out: Path) -> list[dict[str, Any]]:
    """Return what an ensemble says of its members, as in another file. Raises AlmaError if they are inside."""
    config = ensemble["cfg"]["model"]
    found = config["members"] if config["_name"] == ENSEMBLE_ARCH else []
    if not found or any("path" not in entry for entry in found) or len({entry["weight"] for entry in found}) > 1:
        raise AlmaError(
            f"--extend {before}: no ensemble whose members are files of their own and count alike; give all members "
            "instead"
        )
    root = before.parent.resolve()
    places = [Path(os.path.normpath(root / entry["path"])) for entry in found]
    if _place(out) in places:
        raise AlmaError(_contains_itself(before, out))
    return [{**entry, **_reference(place, out)} for entry, place in zip(found, places, strict=True)]


def _checkpoint(first: Checkpoint, config: Config, weights: Weights, dictionary: Optional[str]) -> Checkpoint:
    known = {} if dictionary is None else {DICTIONARY_KEY: dictionary}
    cfg = {**deepcopy(first["cfg"]), "model": config}
    return untrained_checkpoint(cfg, weights, {**first.get("task_state", {}), **known})


def embedded(config: Config, weights: Weights, folder: Path) -> tuple[Config, Weights]:
    """Return a model's configuration and weights without any reference to another file."""
    if config["_name"] != ENSEMBLE_ARCH:
        return config, weights
    entries: list[dict[str, Any]] = []
    joined: dict[str, Tensor] = {}
    for index, member in enumerate(members_of(config, weights, folder)):
        inner_folder = folder if member.file is None else member.file.parent
        inner_config, inner_weights = embedded(member.config, member.weights, inner_folder)
        entry = config["members"][index]
        origin = entry["origin"] if member.file is None else member.file.name
        entries.append({"weight": entry["weight"], "sha256": entry["sha256"], "origin": origin, "config": inner_config})
        joined.update({member_prefix(index) + name: tensor for name, tensor in inner_weights.items()})
    return {**config, "members": entries}, joined


def _refuse_to_replace(path: Path, checkpoint: Checkpoint, out: Path) -> None:
    for file in [path, *_referred_files(checkpoint["cfg"]["model"], checkpoint["model"], path.parent)]:
        if file.resolve() == out.resolve():
            raise AlmaError(_contains_itself(path, out))


def _contains_itself(path: Path, out: Path) -> str:
    return (
        f"--out {out}: is a member of the ensemble, by way of {path}; an ensemble cannot contain itself, give another "
        "file"
    )


def _referred_files(config: Config, weights: Weights, folder: Path) -> Iterator[Path]:
    """Look up all files that an ensemble needs, its members' members included."""
    if config["_name"] != ENSEMBLE_ARCH:
        return
    for member in members_of(config, weights, folder):
        if member.file is not None:
            yield member.file
        yield from _referred_files(member.config, member.weights, folder)


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
        """Load the embedded members; the others have their weights since they were built.

        Args:
            state_dict: the checkpoint's ``model``.
            strict: every weight of an embedded member must be there, and none beside.
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
