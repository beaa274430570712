"""Test one checkpoint on several splits in one process; fairseq-eval-lm tests one split.

The options are the options of fairseq-eval-lm, with several names in ``--gen-subset``. A single model gives the same
loss as fairseq-eval-lm, bit for bit. For an ensemble, ``--known FILE`` has the joint predictions of members that were
tested before, and ``--out FILE`` stores the joint predictions of all members (`KeptPredictions`).
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
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.sequence_scorer import SequenceScorer
from fairseq_cli import eval_lm
from omegaconf import DictConfig

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.checkpoints.ensemble_file import ENSEMBLE_ARCH, member_file
from fairseq_alma.errors import in_one_line
from fairseq_alma.files import open_atomically

LogProbs = Callable[[int, Sequence[str]], Iterable[tuple[str, np.ndarray]]]


class KeptPredictions:
    """Joint predictions of the members of an ensemble for each test token, kept for the ensemble of the next stage.

    A growing ensemble consists of the members of the previous stage and new members. The log of the sum of the member
    probabilities of the previous stage (8 bytes per token) is stored; only new members need a test.

    Args:
        text: description of the test text and of the sequence length.
        members: sha256 of the members' checkpoints, in order.

    Attributes:
        log_sums: for each split, log of the sum of the member probabilities of each token, (N,) float64.
    """

    def __init__(self, text: str, members: list[str]) -> None:
        self.text, self.members = text, members
        self.log_sums: dict[str, np.ndarray] = {}

    def add_missing(self, splits: Sequence[str], files: Iterable[Path], log_probs: LogProbs) -> None:
        """Compute `log_sums` for some splits.

        Args:
            splits: names of the splits.
            files: files with sums over the first members; the first file with the same text and members is used.
            log_probs: function (member index, splits) that yields (split, log-probabilities of the tokens, (N,)).
        """
        num_known, known = next(filter(None, map(self._read, files)), (0, {}))
        self.log_sums = {split: known[split] for split in splits if split in known}
        for number in range(len(self.members)):
            todo = [split for split in splits if number >= num_known or split not in known]
            for split, found in log_probs(number, todo) if todo else ():
                found = found.astype(np.float64)
                self.log_sums[split] = np.logaddexp(self.log_sums[split], found) if split in self.log_sums else found

    def write(self, path: Path) -> None:
        """Write text, members and sums to a file, atomically."""
        arrays: dict[str, Any] = {"head": np.array(json.dumps([self.text, self.members])), **self.log_sums}
        with open_atomically(path) as file:
            np.savez(file, **arrays)

    def _read(self, path: Path) -> Optional[tuple[int, dict[str, np.ndarray]]]:
        """Return (number of members, sums); None if the file is damaged or belongs to other text or members."""
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            text, members = json.loads(str(arrays.pop("head")))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        is_known = text == self.text and members == self.members[: len(members)]
        return (len(members), arrays) if is_known else None

    def losses(self) -> Iterator[tuple[str, float]]:
        """Yield (split, loss of the mean probability in bits per token); skip infinite losses, as fairseq does."""
        for split, log_sums in self.log_sums.items():
            log_probs = log_sums[np.isfinite(log_sums)] - math.log(len(self.members))
            yield split, float(-log_probs.mean() / math.log(2)) if len(log_probs) else 0.0


@in_one_line()
def test(cfg: DictConfig, known: Optional[Path] = None, out: Optional[Path] = None) -> dict[str, float]:
    """Return the loss of a checkpoint in bits per token for each split of ``--gen-subset``.

    Args:
        cfg: configuration of fairseq-eval-lm.
        known: file with the sums over the first members of an ensemble; None: no such file.
        out: file to write the sums over all members to; None: do not write.
    """
    utils.import_user_module(cfg.common)
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
        """Yield the batches of a split, then close the files of the split, as there may be thousands of splits."""
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

    def losses() -> Iterator[tuple[str, float]]:
        model = load(path)
        dictionaries = {"source_dictionary": task.source_dictionary, "target_dictionary": task.target_dictionary}
        for split in splits:
            found = eval_lm.eval_lm(models=[model], batch_iterator=batches(split, model), **dictionaries)
            yield split, float(found["loss"])

    def log_probs(number: int, splits: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (split, log-probability of each token under a member, (N,) in the order of the split)."""
        model = load(str(member_file(members[number], Path(path).parent)))
        scorer = SequenceScorer(task.target_dictionary)
        for split in splits:
            parts = []
            for batch in batches(split, model):
                batch = utils.move_to_cuda(batch, device=next(model.parameters()).device)
                parts += [hypothesis["positional_scores"] for (hypothesis,) in scorer.generate([model], batch)]
            yield split, torch.cat(parts).float().cpu().numpy()

    # Ensembles of a run have equal weights and refer to member files.
    is_of_run = bool(members) and all("path" in each and each["weight"] == members[0]["weight"] for each in members)
    tested = losses()
    if is_of_run:
        stream, cut = task.stream, (task.args.tokens_per_sample, str(task.args.sample_break_mode))
        held_out = [file.sha256 for split in ("valid", "test") for file in stream.split(split).files]
        text = repr((stream.dictionary_sha256, (*cut, bool(task.args.add_bos_token)), held_out))
        kept = KeptPredictions(text, [each["sha256"] for each in members])
        kept.add_missing(splits, [file for file in (out, known) if file is not None], log_probs)
        if out is not None:
            kept.write(out)
        tested = kept.losses()
    found = {}
    for split, loss in tested:
        found[split] = loss
        eval_lm.logger.info(f"{split}: {loss:.4f} bits per token")
    return found


def main() -> dict[str, float]:
    """Parse the options of fairseq-eval-lm, ``--known`` and ``--out``, and return the result of `test`."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--known", type=Path)
    own.add_argument("--out", type=Path)
    given, sys.argv[1:] = own.parse_known_args()  # the task also reads sys.argv
    arguments = options.parse_args_and_arch(options.get_eval_lm_parser())
    return test(convert_namespace_to_omegaconf(arguments), given.known, given.out)
