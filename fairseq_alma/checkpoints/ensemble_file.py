"""Checkpoint file of an ensemble: format, functions that join and load members, and the mean of predictions.

The file is a fairseq checkpoint with ``cfg.model`` ``{"_name": "alma_ensemble", …, "members": [...]}``. The ellipsis
represents the sizes common to all members (`shared_outputs`). Each member is a single model. The entry of a member has
a ``weight`` (all weights sum to 1), the ``sha256`` of the member's file, and the keys of the storage mode:

- reference: ``path`` of the member's file, relative to the folder of the ensemble, and the fallback ``absolute_path``;
- embedded: ``origin``, the name of the member's file, and ``config``, the member's ``cfg.model``. The weights of the
  member are in ``model``, with the prefix ``decoder.members.N.``.
"""

import os
import re
from copy import deepcopy
from pathlib import Path
from typing import Any, Collection, Iterable, Mapping, Optional, Sequence

import torch
from torch import Tensor, nn

from fairseq_alma.checkpoints.checkpoint_file import (
    DICTIONARY_KEY,
    ENSEMBLE_ARCH,
    Checkpoint,
    read_checkpoint,
    untrained_checkpoint,
)
from fairseq_alma.data.stream import file_sha256
from fairseq_alma.errors import AlmaError

_REMEDY = (
    "members need the same dictionary (text), or the same number of classes and image size (images); train all "
    "members on one stream"
)
_EMBEDDINGS = re.compile(r"embed_tokens(\.embeddings\.\d+\.0)?\.weight$")


def member_file(entry: Mapping[str, Any], folder: Optional[Path]) -> Path:
    """Return the file of a member stored by reference. Raises AlmaError if the file is missing or has changed.

    Args:
        entry: element of ``cfg.model.members`` of the ensemble's checkpoint.
        folder: folder of the ensemble's checkpoint, or None if unknown.
    """
    candidates = [*([] if folder is None else [folder / entry["path"]]), Path(entry["absolute_path"])]
    path = next((each for each in candidates if each.is_file()), None)
    if path is None:
        raise AlmaError(
            f"{' or '.join(dict.fromkeys(map(str, candidates)))}: file of an ensemble member not found; restore the "
            "file, or make the ensemble again with alma-ensemble (--embed writes all weights into one file)"
        )
    if (found := file_sha256(path)) != entry["sha256"]:
        raise AlmaError(
            f"{path}: changed since the ensemble was made (expected sha256 {entry['sha256'][:12]}…, found "
            f"{found[:12]}…); restore the file, or make the ensemble again with alma-ensemble"
        )
    return path


def read_member(path: Path) -> Checkpoint:
    """Read the checkpoint of a member. Raises AlmaError if the file is not a checkpoint of a single model."""
    checkpoint = read_checkpoint(path)
    if checkpoint["cfg"]["model"]["_name"] == ENSEMBLE_ARCH:
        raise AlmaError(f"{path}: an ensemble cannot be a member of an ensemble; give the single models")
    return checkpoint


def join_checkpoints(paths: Sequence[Path], weights: Sequence[float], out: Path, embed: bool = False) -> Checkpoint:
    """Return the checkpoint of an ensemble, with task state and ``cfg`` (except ``cfg.model``) of the first member.

    Args:
        paths: checkpoints of the members.
        weights: weight of each member, at least 0, not all 0.
        out: path where the caller writes the ensemble; stored member paths are relative to the folder of ``out``.
        embed: whether to store the weights of the members instead of paths to the files of the members.

    Raises:
        AlmaError: a member is not a checkpoint of a single model, differs from the previous members in sizes or
            dictionary, or is the file ``out``.
    """
    checkpoints = [read_member(path) for path in paths]
    state = dict(checkpoints[0].get("task_state", {}))
    entries: list[dict[str, Any]] = []
    joined: dict[str, Tensor] = {}
    for index, (path, checkpoint, weight) in enumerate(zip(paths, checkpoints, weights, strict=True)):
        if path.resolve() == out.resolve():
            raise AlmaError(f"--out {out}: this file is a member of the ensemble; give another file")
        if (dictionary := checkpoint.get("task_state", {}).get(DICTIONARY_KEY)) is not None:
            known = state.get(DICTIONARY_KEY) or dictionary
            if dictionary != known:
                raise AlmaError(
                    f"{path}: expected dictionary {known[:12]}… as in previous members, found {dictionary[:12]}…; "
                    f"{_REMEDY}"
                )
            state[DICTIONARY_KEY] = dictionary
        entry = {"weight": weight / sum(weights), "sha256": file_sha256(path)}
        if embed:
            entry.update(origin=path.name, config=checkpoint["cfg"]["model"])
            joined |= {f"decoder.members.{index}.{name}": tensor for name, tensor in checkpoint["model"].items()}
        else:
            absolute = path.parent.resolve() / path.name
            entry.update(path=os.path.relpath(absolute, out.parent.resolve()), absolute_path=str(absolute))
        entries.append(entry)
    config = {"_name": ENSEMBLE_ARCH, **shared_outputs(paths, checkpoints), "members": entries}
    cfg = {**deepcopy(checkpoints[0]["cfg"]), "model": config}
    if "vocab_size" in config:  # fairseq-validate uses this criterion; other criterions need the features of one model
        cfg["criterion"] = {"_name": "cross_entropy", "sentence_avg": False}
    return untrained_checkpoint(cfg, joined, state)


def shared_outputs(paths: Sequence[Path], checkpoints: Sequence[Checkpoint]) -> dict[str, int]:
    """Return the input and output sizes that all members share.

    Keys: ``vocab_size`` for language models, ``num_classes`` and ``image_channels`` for convolutional networks,
    ``num_classes`` and ``image_pixels`` for fully connected networks.

    Raises:
        AlmaError: the sizes of a member differ from the sizes of the previous members.
    """
    shared: dict[str, int] = {}
    for path, checkpoint in zip(paths, checkpoints, strict=True):
        weights = checkpoint["model"]
        # An adaptive input layer has a table for each band of the vocabulary.
        vocab_sizes = [tensor.size(0) for name, tensor in weights.items() if _EMBEDDINGS.search(name)]
        if vocab_sizes:
            found = {"vocab_size": sum(vocab_sizes)}
        else:  # linear weights have shape (N, O, I), convolutions (N, O, I, 3, 3)
            shapes = [tensor.shape for name, tensor in weights.items() if name.startswith("network.")]
            linear, convolutions = ([shape for shape in shapes if len(shape) == length] for length in (3, 5))
            first = {"image_channels": convolutions[0][2]} if convolutions else {"image_pixels": linear[0][2]}
            found = {"num_classes": linear[-1][1], **first}
        if shared and (not found.keys() & shared.keys() or {**shared, **found} != {**found, **shared}):
            sizes, others = (", ".join(f"{name} {size}" for name, size in each.items()) for each in (found, shared))
            raise AlmaError(f"{path}: expected {others} as in the previous members, found {sizes}; {_REMEDY}")
        shared |= found
    return shared


def load_embedded(
    members: Iterable[nn.Module], embedded: Collection[int], weights: Mapping[str, Tensor], strict: bool
) -> None:
    """Load the weights of embedded members from the ensemble's checkpoint.

    Args:
        members: all members; the models of the members stored by reference have their weights already.
        embedded: indices of the embedded members.
        weights: ``model`` of the ensemble's checkpoint.
        strict: whether the names of weights must match, as in torch.
    """
    for index, member in enumerate(members):
        prefix = f"decoder.members.{index}."
        own = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
        if own or index in embedded:
            member.load_state_dict(own, strict)


def log_of_mean(log_probs: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the logarithm of the weighted mean of probabilities.

    Args:
        log_probs: N tensors (…, V) of log-probabilities, of any dtype; fp32 tensors are modified in place. If
            ``log_probs`` is a generator, at most two tensors are in memory.
        weights: N non-negative floats that sum to 1; not a tensor, because --fp16 would round a tensor.

    Returns:
        fp32 tensor (…, V), which can also be used as logits: the softmax of the tensor is the weighted mean.
    """
    log_weights = torch.tensor(weights, dtype=torch.float64).log().tolist()
    total: Optional[Tensor] = None
    for each, log_weight in zip(log_probs, log_weights, strict=True):
        each = each.float().add_(log_weight)
        total = each if total is None else torch.logaddexp(total, each, out=total)
        del each  # frees the memory before the next member is computed
    assert total is not None
    return total
