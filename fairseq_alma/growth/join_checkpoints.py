"""Join checkpoints to the one checkpoint of an ensemble. The format is that of `ensemble_file`; no fairseq here."""

import os
from copy import deepcopy
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

from torch import Tensor

from fairseq_alma.data.manifest import file_sha256
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.checkpoint_file import DICTIONARY_KEY, Checkpoint, read_checkpoint
from fairseq_alma.growth.ensemble_file import ENSEMBLE, Config, Weights, member_prefix, members_of

EMBEDDING = "embed_tokens.weight"
"""Ends the name of the input embeddings, a row for each unit of the vocabulary, in every language model here."""


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
        AlmaError: if a member is no checkpoint of a language model, has another dictionary than the others, is the
            file to be written, or has members itself that are missing or changed.
    """
    checkpoints = [read_checkpoint(path) for path in paths]
    for path, checkpoint in zip(paths, checkpoints, strict=True):
        _refuse_to_replace(path, checkpoint, out)
    vocab_size, dictionary = _common_vocabulary(paths, checkpoints)
    entries: list[dict[str, Any]] = []
    joined: dict[str, Tensor] = {}
    for index, (path, checkpoint) in enumerate(zip(paths, checkpoints, strict=True)):
        entry = {"weight": weights[index] / sum(weights), "sha256": file_sha256(path)}
        if embed:
            config, content = _embed(checkpoint["cfg"]["model"], checkpoint["model"], path.parent)
            entry.update(origin=path.name, config=config)
            joined.update({member_prefix(index) + name: tensor for name, tensor in content.items()})
        else:
            place = path.parent.resolve() / path.name
            entry.update(path=os.path.relpath(place, out.parent.resolve()), absolute_path=str(place))
        entries.append(entry)
    config = {"_name": ENSEMBLE, "vocab_size": vocab_size, "members": entries}
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


def _embed(config: Config, weights: Weights, folder: Path) -> tuple[Config, Weights]:
    """Return a model's configuration and weights without any reference to another file."""
    if config["_name"] != ENSEMBLE:
        return config, weights
    entries: list[dict[str, Any]] = []
    joined: dict[str, Tensor] = {}
    for index, member in enumerate(members_of(config, weights, folder)):
        inner_folder = folder if member.file is None else member.file.parent
        inner_config, inner_weights = _embed(member.config, member.weights, inner_folder)
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
    if config["_name"] != ENSEMBLE:
        return
    for member in members_of(config, weights, folder):
        if member.file is not None:
            yield member.file
        yield from _referred_files(member.config, member.weights, folder)


def _common_vocabulary(paths: Sequence[Path], checkpoints: Sequence[Checkpoint]) -> tuple[int, Optional[str]]:
    """Return the number of units that all members have, and their dictionary's sha256 if one of them knows it."""
    sizes = [_vocab_size(path, checkpoint) for path, checkpoint in zip(paths, checkpoints, strict=True)]
    known: Optional[tuple[Path, str]] = None
    for path, checkpoint, size in zip(paths, checkpoints, sizes, strict=True):
        remedy = "the members of an ensemble must share their dictionary; train them on streams with one tokenizer"
        if size != sizes[0]:
            raise AlmaError(f"{path}: a vocabulary of {size} units, {paths[0]} has {sizes[0]}; {remedy}")
        sha256 = checkpoint.get("task_state", {}).get(DICTIONARY_KEY)
        if sha256 is None:
            continue
        if known is None:
            known = path, sha256
        elif sha256 != known[1]:
            raise AlmaError(
                f"{path}: trained with another dictionary ({sha256[:12]}…) than {known[0]} ({known[1][:12]}…); {remedy}"
            )
    return sizes[0], None if known is None else known[1]


def _vocab_size(path: Path, checkpoint: Checkpoint) -> int:
    config = checkpoint["cfg"]["model"]
    if config["_name"] == ENSEMBLE:
        return config["vocab_size"]
    for name, tensor in checkpoint["model"].items():
        if name.endswith(EMBEDDING):
            return tensor.size(0)
    raise AlmaError(f"{path}: architecture {config['_name']} has no input embeddings; give language models")
