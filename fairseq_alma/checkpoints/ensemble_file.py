"""Checkpoints that stand for several models: what is in them, and how their members are found again.

Such a file is a checkpoint of fairseq whose ``cfg.model`` is ``{"_name": "alma_ensemble", …, "members": [...]}``. In
place of the dots stands what the members share (`shared_outputs.SHARED`). There is one entry per member, with its
``weight`` (they sum to 1), the ``sha256`` of the file it came from, and

- by reference: ``path``, relative to the ensemble's own folder, and ``absolute_path``, where to look second;
- embedded: ``origin``, the file that it came from, and ``config``, its ``cfg.model``; its weights are in ``model``
  under ``decoder.members.N.`` plus their own names.

``join_checkpoints`` writes it. A member may be an ensemble itself. No fairseq here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional

from torch import Tensor

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.checkpoints.model_options import ENSEMBLE_ARCH
from fairseq_alma.checkpoints.model_weights import MAX_NESTING
from fairseq_alma.data.manifest import file_sha256
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
        path = _locate(entry, folder)
        if file_sha256(path) != entry["sha256"]:
            raise AlmaError(
                f"{path}: changed since the ensemble was made of it, its sha256 does not begin with "
                f"{entry['sha256'][:12]}; restore the file, or make the ensemble again with alma-ensemble"
            )
        checkpoint = read_checkpoint(path)
        found = with_absolute_paths(checkpoint["cfg"]["model"], path.parent, entry.get("depth", 0) + 1)
        yield MemberModel(found, checkpoint["model"], path)


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
