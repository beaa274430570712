"""Join checkpoints to the one checkpoint of an ensemble. The format is that of `ensemble_file`; no fairseq here."""

import os
from copy import deepcopy
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

from torch import Tensor

from fairseq_alma.checkpoints.checkpoint_file import DICTIONARY_KEY, Checkpoint, read_checkpoint
from fairseq_alma.checkpoints.ensemble_file import ENSEMBLE_ARCH, Config, Weights, member_prefix, members_of
from fairseq_alma.checkpoints.shared_outputs import shared_dictionary, shared_outputs
from fairseq_alma.data.manifest import file_sha256
from fairseq_alma.errors import AlmaError


def join_checkpoints(paths: Sequence[Path], weights: Sequence[float], out: Path, embed: bool) -> Checkpoint:
    """Build the checkpoint of an ensemble.

    Args:
        paths: the members' checkpoints; they may be ensembles themselves.
        weights: what each member counts, at least 0, not all 0.
        out: where the result will be written.
        embed: put the members' weights inside, rather than refer to their files.

    Returns:
        What `write_checkpoint` takes; what is not the ensemble's own is the first member's.

    Raises:
        AlmaError: if a member is no checkpoint of a model here, predicts something else than the others, is the file
            to be written, or has members itself that are missing or changed.
    """
    checkpoints = [read_checkpoint(path) for path in paths]
    for path, checkpoint in zip(paths, checkpoints, strict=True):
        _refuse_to_replace(path, checkpoint, out)
    outputs = shared_outputs(paths, checkpoints)
    dictionary = shared_dictionary(paths, checkpoints)
    entries: list[dict[str, Any]] = []
    joined: dict[str, Tensor] = {}
    for index, (path, checkpoint) in enumerate(zip(paths, checkpoints, strict=True)):
        entry = {"weight": weights[index] / sum(weights), "sha256": file_sha256(path)}
        if embed:
            config, content = embedded(checkpoint["cfg"]["model"], checkpoint["model"], path.parent)
            entry.update(origin=path.name, config=config)
            joined.update({member_prefix(index) + name: tensor for name, tensor in content.items()})
        else:
            place = path.parent.resolve() / path.name
            entry.update(path=os.path.relpath(place, out.parent.resolve()), absolute_path=str(place))
        entries.append(entry)
    config = {"_name": ENSEMBLE_ARCH, **outputs, "members": entries}
    return _checkpoint(checkpoints[0], config, joined, dictionary)


def _checkpoint(first: Checkpoint, config: Config, weights: Weights, dictionary: Optional[str]) -> Checkpoint:
    cfg = deepcopy(first["cfg"])
    cfg["model"] = config
    known = {} if dictionary is None else {DICTIONARY_KEY: dictionary}
    return {
        "args": None,
        "cfg": cfg,
        "model": dict(weights),
        "criterion": None,
        # fairseq expects this of every checkpoint, though nothing was trained here
        "optimizer_history": [
            {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {"best": None}, "num_updates": 0}
        ],
        "task_state": {**first.get("task_state", {}), **known},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
    }


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
            raise AlmaError(
                f"--out {out}: is a member of the ensemble, by way of {path}; an ensemble cannot contain itself, give "
                "another file"
            )


def _referred_files(config: Config, weights: Weights, folder: Path) -> Iterator[Path]:
    """Look up all files that an ensemble needs, its members' members included."""
    if config["_name"] != ENSEMBLE_ARCH:
        return
    for member in members_of(config, weights, folder):
        if member.file is not None:
            yield member.file
        yield from _referred_files(member.config, member.weights, folder)
