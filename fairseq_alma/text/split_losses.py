"""Test one checkpoint on several splits in one process, instead of running fairseq-eval-lm for each split.

`main` takes the options of fairseq-eval-lm, with several splits in ``--gen-subset``. For a single model, the losses
equal those of fairseq-eval-lm bit for bit. For an ensemble, ``--out FILE`` stores the combined predictions of all
members, and ``--known FILE`` provides the combined predictions of the members tested earlier (see `joint_losses`).
"""

import argparse
import json
import math
import sys
import zipfile
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Optional, Sequence

import numpy as np
import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.sequence_scorer import SequenceScorer
from fairseq_cli import eval_lm

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.checkpoints.ensemble_file import ENSEMBLE_ARCH, member_file
from fairseq_alma.errors import in_one_line
from fairseq_alma.files import open_atomically
from fairseq_alma.training.stage_task import configuration_of

LogProbs = Callable[[int, Sequence[str]], Iterable[tuple[str, np.ndarray]]]
"""Function that takes (index of a member, splits) and yields (split, (N,) log-probabilities of its N tokens)."""


def joint_losses(
    text: str,
    members: Sequence[str],
    splits: Sequence[str],
    log_probs: LogProbs,
    known: Optional[Path] = None,
    out: Optional[Path] = None,
) -> dict[str, float]:
    """Return the loss of an ensemble for each split: cross entropy of the members' mean probability, in bits per token.

    A growing ensemble consists of the members of the previous stage and new members. Therefore a file stores, for
    each token, the log of the sum of the members' probabilities (8 bytes), and this function tests only new members.
    The mean over tokens excludes infinite losses, as in fairseq.

    Args:
        text: string that identifies the test data and the sequence length.
        members: sha256 of the members' checkpoints, in order.
        splits: names of the splits.
        log_probs: function that yields the log-probabilities of a member for each split.
        known: file with the log-sums of the first members, ignored if ``text`` or a member differs; None: no file.
        out: file for the log-sums of all members; if a matching file exists, ``known`` is ignored. None: no file.
    """
    num_known, stored = next(filter(None, (_read_sums(path, text, members) for path in (out, known) if path)), (0, {}))
    log_sums = {split: stored[split] for split in splits if split in stored}
    for number in range(len(members)):
        todo = [split for split in splits if number >= num_known or split not in stored]
        for split, found in log_probs(number, todo) if todo else ():
            found = found.astype(np.float64)
            log_sums[split] = np.logaddexp(log_sums[split], found) if split in log_sums else found
    if out is not None:
        arrays: dict[str, Any] = {"head": np.array(json.dumps([text, [*members]])), **log_sums}
        with open_atomically(out) as file:
            np.savez(file, **arrays)
    losses = {}
    for split, sums in log_sums.items():
        means = sums[np.isfinite(sums)] - math.log(len(members))
        losses[split] = float(-means.mean() / math.log(2)) if len(means) else 0.0
    return losses


def _read_sums(path: Path, text: str, members: Sequence[str]) -> Optional[tuple[int, dict[str, np.ndarray]]]:
    """Return (number of members, log-sums by split); None if no readable file matches ``text`` and ``members``."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        text_of_file, known = json.loads(str(arrays.pop("head")))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    is_known = text_of_file == text and known == [*members[: len(known)]]
    return (len(known), arrays) if is_known else None


@in_one_line()
def main() -> dict[str, float]:
    """Parse the options in ``sys.argv``; return the loss of the checkpoint for each split, in bits per token."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--known", type=Path)
    own.add_argument("--out", type=Path)
    given, sys.argv[1:] = own.parse_known_args()  # the task also reads sys.argv
    cfg = configuration_of(options.parse_args_and_arch(options.get_eval_lm_parser()))
    path, splits, task = cfg.common_eval.path, cfg.dataset.gen_subset.split(","), tasks.setup_task(cfg.task)
    config = read_checkpoint(path)["cfg"]["model"]
    members = config["members"] if config["_name"] == ENSEMBLE_ARCH else []

    def load(path: str) -> Any:
        (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([path], task=task)
        if torch.cuda.is_available() and not cfg.common.cpu:
            torch.cuda.set_device(cfg.distributed_training.device_id)
            model.cuda()
        model.prepare_for_inference_(cfg)
        return model

    def batches(split: str, model: Any) -> Iterator[dict[str, Any]]:
        """Yield the batches of a split, then close the split's files, because there may be thousands of splits."""
        task.load_dataset(split)
        yield from task.eval_lm_dataloader(
            dataset=task.datasets.pop(split),
            max_tokens=cfg.dataset.max_tokens or 36000,
            batch_size=cfg.dataset.batch_size,
            max_positions=model.max_positions(),
            num_workers=cfg.dataset.num_workers,
            data_buffer_size=cfg.dataset.data_buffer_size,
        )
        task.dataset_to_epoch_iter.clear()

    def log_probs(number: int, splits: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        model = load(str(member_file(members[number], Path(path).parent)))
        scorer = SequenceScorer(task.target_dictionary)
        for split in splits:
            parts = []
            for batch in batches(split, model):
                batch = utils.move_to_cuda(batch, device=next(model.parameters()).device)
                parts += [hypothesis["positional_scores"] for (hypothesis,) in scorer.generate([model], batch)]
            yield split, torch.cat(parts).float().cpu().numpy()

    # The members of ensembles that alma-stream writes are files, and have equal weights.
    if members and all("path" in each and each["weight"] == members[0]["weight"] for each in members):
        stream = task.stream
        held_out = [file.sha256 for split in ("valid", "test") for file in stream.split(split).files]
        text = repr((stream.dictionary_sha256, task.args.tokens_per_sample, held_out))
        losses = joint_losses(text, [each["sha256"] for each in members], splits, log_probs, given.known, given.out)
    else:
        model, losses = load(path), {}
        dictionaries = {"source_dictionary": task.source_dictionary, "target_dictionary": task.target_dictionary}
        for split in splits:
            found = eval_lm.eval_lm(models=[model], batch_iterator=batches(split, model), **dictionaries)
            losses[split] = float(found["loss"])
    for split, loss in losses.items():
        eval_lm.logger.info(f"{split}: {loss:.4f} bits per token")
    return losses
