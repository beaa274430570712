"""Describe, repair and remove the checkpoints of the language models of a stage.

fairseq writes ``checkpoint_E_U.pt`` atomically, and then copies this file to ``checkpoint_last.pt``. If fairseq is
killed during the copy, ``checkpoint_last.pt`` is truncated, and fairseq would try to resume from this file.

Functions that read weights import torch, which takes seconds; ``alma-stream`` calls them in forked processes.
"""

import re
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Collection, Mapping, Optional, Sequence, Union

from fairseq_alma.checkpoints import FIRST_UPDATE, LAST_CHECKPOINT, TASK_STATE, TRAIN_TOKENS
from fairseq_alma.checkpoints.model_options import SWITCH_SIZES, TRANSFORMER_SIZES
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import archive_fault, once_per_file, open_atomically, synchronise
from fairseq_alma.training.feature import BATCHES


@dataclass(frozen=True)
class Progress:
    """Training progress at a checkpoint.

    Attributes:
        num_updates: number of updates since the beginning of the stage.
        num_epochs: number of complete epochs.
        train_tokens: number of training tokens since the beginning of the stage, summed over epochs.
        first_update: number of optimizer updates before the stage.
        batches: one record for the first update and for each change of the batch size; see `feature.BATCHES`.
        megabatch: newest mega-batch of the training data, numbered from 0; None: unknown.
        has_optimizer: whether the checkpoint has an optimizer state; without it, more updates are not possible.
    """

    num_updates: int
    num_epochs: int
    train_tokens: int
    first_update: int = 0
    batches: Sequence[Mapping[str, Any]] = ()
    megabatch: Optional[int] = None
    has_optimizer: bool = True

    def has_reached(self, max_update: Optional[int], max_epoch: Optional[int]) -> bool:
        """Return whether training has reached a limit. If resumed there, fairseq-train would make another update."""
        return (max_update is not None and self.num_updates >= max_update) or (
            max_epoch is not None and self.num_epochs >= max_epoch
        )


@dataclass(frozen=True)
class ModelFacts:
    """Number of parameters, number of experts and FLOPs per token of a model.

    FLOPs include only matrix products. A multiply-add is two FLOPs, as in ``torch.utils.flop_counter``. FLOPs of
    attention include masked positions (complete T x T products). A token uses one expert of each Switch layer.
    """

    num_params: int  # number of parameters; a shared parameter is counted once
    num_experts: int  # number of experts in each Switch layer; 1 for a dense model
    test_flops_per_token: int  # FLOPs of a forward pass per token


@once_per_file
def is_complete(path: Path) -> bool:
    """Return whether a checkpoint is a zip file that is not truncated (a zip file ends with its directory)."""
    try:
        with zipfile.ZipFile(path) as archive:
            return bool(archive.namelist())
    except Exception:  # a damaged directory raises errors of many types
        return False


def is_sound(path: Path) -> bool:
    """Return whether all checksums in a checkpoint are correct, which requires reading the entire file."""
    try:
        return archive_fault(path) is None
    except OSError:
        return False


def repair_last(folder: Path) -> Optional[Path]:
    """Replace a damaged ``checkpoint_last.pt`` with the newest undamaged checkpoint of the folder.

    Args:
        folder: save directory of one model, which may not exist yet.

    Returns:
        The checkpoint to resume from; None if the stage must start again.
    """
    for unfinished in folder.glob("checkpoint*.pt.tmp"):
        unfinished.unlink()
    last = folder / LAST_CHECKPOINT
    if is_sound(last):
        return last
    last.unlink(missing_ok=True)
    interval = r"checkpoint_\d+_(\d+)\.pt"
    found = [(int(match[1]), path) for path in folder.glob("*.pt") if (match := re.fullmatch(interval, path.name))]
    for _, path in sorted(found, reverse=True):
        if is_sound(path):
            # Copy the file: fairseq's next write to a hard link would change both files.
            with open_atomically(last) as copy, open(path, "rb") as source:
                shutil.copyfileobj(source, copy)
            return last
    return None


@once_per_file
def read_progress(path: Path) -> Progress:
    """Read the training progress from a checkpoint."""
    from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint

    state = read_checkpoint(
        path,
        remedy="remove this file to resume the stage from the previous checkpoint",
        needed=("extra_state", "optimizer_history"),
    )
    iterator, counts = (state["extra_state"].get(key) for key in ("train_iterator", TASK_STATE))
    if iterator is None or not isinstance(counts, dict) or not isinstance(counts.get(TRAIN_TOKENS), int):
        raise AlmaError(
            f"{path}: expected a token count, found none (not a checkpoint of fairseq-train --task alma_lm); remove "
            f"{path.parent} to train the stage again"
        )
    first_update = int(counts.get(FIRST_UPDATE, 0))
    return Progress(
        num_updates=int(state["optimizer_history"][-1]["num_updates"]) - first_update,
        num_epochs=int(iterator["epoch"]) - 1,  # the iterator stores the epoch of the next update, numbered from 1
        train_tokens=int(counts[TRAIN_TOKENS]),
        first_update=first_update,
        batches=tuple(counts.get(BATCHES, ())),
        megabatch=(state["cfg"].get("task") or {}).get("megabatch"),
        has_optimizer="last_optimizer_state" in state,
    )


def describe_checkpoint(path: Union[str, Path]) -> ModelFacts:
    """Return sizes and FLOPs of a checkpoint's model. Raises AlmaError as `read_checkpoint` and `describe_model` do."""
    from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint

    checkpoint = read_checkpoint(path)
    return describe_model(checkpoint["cfg"]["model"], checkpoint["model"], Path(path))


def describe_model(config: Mapping[str, Any], weights: Mapping[str, Any], path: Path) -> ModelFacts:
    """Return sizes and FLOPs of a model, given ``cfg.model`` and ``model`` of the checkpoint ``path``.

    FLOPs depend only on ``tokens_per_sample`` and on names and shapes of the weights. The output projection of
    attention is ``out_proj`` in ``alma_switch_lm`` and ``o_proj`` in ``alma_transformer_lm``. Stacked experts have the
    shape (E, …).

    Raises:
        AlmaError: the architecture is not a language model of this package.
    """
    if config["_name"] not in (*SWITCH_SIZES, *TRANSFORMER_SIZES):
        raise AlmaError(f"{path}: cannot count FLOPs of {config['_name']}; train alma_transformer_lm or alma_switch_lm")
    num_experts, flops = 1, 0
    for name, tensor in weights.items():
        if tensor.dim() == 3:
            num_experts = max(num_experts, len(tensor))
            flops += 2 * tensor.numel() // len(tensor)
        elif tensor.dim() == 2 and not name.endswith("bias") and ".embed_" not in name:
            flops += 2 * tensor.numel()
            if name.endswith(("o_proj.weight", "out_proj.weight")):
                flops += 2 * 2 * config["tokens_per_sample"] * tensor.size(1)
    unique = {tensor.data_ptr(): tensor.numel() for tensor in weights.values()}
    return ModelFacts(sum(unique.values()), num_experts, flops)


def drop_optimizer_state(path: Path) -> None:
    """Remove the optimizer state (about two thirds of the file) from a checkpoint."""
    from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint, write_checkpoint

    state = read_checkpoint(path)
    if state.pop("last_optimizer_state", None) is not None:
        write_checkpoint(state, path)


def remove(folder: Path, kept: Collection[str] = ()) -> None:
    """Remove the checkpoints of a save directory, including truncated files, and then the directory if it is empty.

    ``kept`` contains the names of files to keep. If ``kept`` is not empty, fsync the last checkpoint first.
    """
    if kept:
        synchronise(folder / LAST_CHECKPOINT, folder)
    for path in [*folder.glob("checkpoint*.pt*"), *folder.glob(".checkpoint*.tmp")]:
        if path.name not in kept:
            path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
