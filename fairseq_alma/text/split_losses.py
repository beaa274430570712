"""Test one checkpoint on several splits in one process: what fairseq-eval-lm does, which takes one split.

    python -P -m fairseq_alma.text.split_losses STREAM … --path CHECKPOINT --gen-subset valid,test,matrix

takes the options of fairseq-eval-lm; ``matrix`` stands for the held-out and the training slice of every mega-batch. A
model is tested by fairseq's own function, to the same bits. Members of an ensemble are tested one by one, those alone
that ``--known FILE`` does not have (`KeptPredictions`), and ``--out FILE`` keeps what all predict together.

A growing ensemble has the members of the stage before and new ones. The log of the sum of its members' probabilities of
a token, 8 bytes, is all that the next stage needs: whatever its number of members, it tests the new ones. Without the
file, or with one of other members or of other text, all are tested, to the same bits. See also `images.model_store`.
"""

import argparse
import contextlib
import logging
import math
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable, Iterator, Optional

import numpy as np
import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.sequence_scorer import SequenceScorer
from fairseq_cli import eval_lm
from omegaconf import DictConfig

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.checkpoints.ensemble_file import ENSEMBLE_ARCH, member_file
from fairseq_alma.data.stream import holdout_name, slice_name
from fairseq_alma.errors import in_one_line
from fairseq_alma.files import open_atomically
from fairseq_alma.text.fork_server import leave
from fairseq_alma.text.text_steps import MATRIX

_ARRAYS = ("about", "members", "splits", "sizes", "log_sums")


@dataclass
class KeptPredictions:
    """Sums over members, split by split.

    Attributes:
        about: what else decides them: text, and how it is cut into sequences.
        members: sha256 of the members' checkpoints, in the order in which they were added.
        log_sums: by the name of a split, (N,) float64: the log of the sum of the members' probabilities of each token.
    """

    about: str
    members: tuple[str, ...]
    log_sums: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Optional[KeptPredictions]":
        """Read a file; None where it is not there, or damaged."""
        with contextlib.suppress(OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError):
            with np.load(path, allow_pickle=False) as file:
                about, members, splits, sizes, log_sums = (file[name] for name in _ARRAYS)
            if sizes.sum() == len(log_sums) and len(sizes) == len(splits):
                parts = np.split(log_sums.astype(np.float64, copy=False), np.cumsum(sizes)[:-1])
                names = [name.decode() for name in splits.tolist()]
                sums = dict(zip(names, parts, strict=True))
                return cls(str(about.item().decode()), tuple(each.decode() for each in members.tolist()), sums)
        return None

    def write(self, path: Path) -> None:
        """Write the file, atomically."""
        sizes = np.array([len(each) for each in self.log_sums.values()], dtype=np.int64)
        parts = np.concatenate([*self.log_sums.values()]) if self.log_sums else np.zeros(0)
        names = (np.array([each.encode() for each in names]) for names in (self.members, [*self.log_sums]))
        with open_atomically(path) as file:
            arrays: dict[str, Any] = dict(
                zip(_ARRAYS, (np.array(self.about.encode()), *names, sizes, parts), strict=True)
            )
            np.savez(file, **arrays)

    def is_begun_by(self, before: "Optional[KeptPredictions]") -> bool:
        """Tell whether these are of the same text, and of the members of ``before`` and perhaps further ones."""
        return (
            before is not None and before.about == self.about and before.members == self.members[: len(before.members)]
        )

    def add(self, split: str, log_probs: np.ndarray) -> None:
        """Add a member's (N,) log-probabilities of the tokens of a split; members come in their order."""
        found = log_probs.astype(np.float64)
        before = self.log_sums.get(split)
        self.log_sums[split] = found if before is None else np.logaddexp(before, found)

    def loss(self, split: str) -> float:
        """Return the loss of the members' mean probability, bits per token; as fairseq's, without infinite ones."""
        log_probs = self.log_sums[split] - math.log(len(self.members))
        log_probs = log_probs[~np.isinf(log_probs)]
        return float(-log_probs.sum() / len(log_probs) / math.log(2)) if len(log_probs) else 0.0


@dataclass
class Tests:
    """The tests of one command.

    Attributes:
        cfg: of fairseq-eval-lm.
        task: set up for it.
        splits: the names of what is tested on.
    """

    cfg: DictConfig
    task: Any
    splits: list[str]

    def losses(self, path: str) -> Iterator[tuple[str, float]]:
        """Yield for each split the loss of a model, bits per token, as fairseq-eval-lm finds it."""
        model = self._load(path)
        for split in self.splits:
            found = eval_lm.eval_lm(
                models=[model],
                source_dictionary=self.task.source_dictionary,
                batch_iterator=self._batches(split, model),
                target_dictionary=self.task.target_dictionary,
            )
            yield split, float(found["loss"])

    def log_probs(self, path: str, splits: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield for each split the log-probability of every token under a model, (N,) in the order of the data set."""
        model = self._load(path)
        scorer = SequenceScorer(self.task.target_dictionary)
        for split in splits:
            parts = []
            for batch in self._batches(split, model):
                batch = utils.move_to_cuda(batch, device=next(model.parameters()).device)
                parts += [hypothesis["positional_scores"] for (hypothesis,) in scorer.generate([model], batch)]
            yield split, torch.cat(parts).float().cpu().numpy()

    def _load(self, path: str) -> Any:
        (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([path], task=self.task)
        if torch.cuda.is_available() and not self.cfg.common.cpu:
            torch.cuda.set_device(self.cfg.distributed_training.device_id)
            model.cuda()
        model.prepare_for_inference_(self.cfg)
        return model

    def _batches(self, split: str, model: Any) -> Iterator[dict[str, Any]]:
        """Yield the batches of a split, whose files are open no longer than that: a matrix has thousands."""
        self.task.load_dataset(split)
        yield from self.task.eval_lm_dataloader(
            dataset=self.task.datasets.pop(split),
            max_tokens=self.cfg.dataset.max_tokens or 36000,
            batch_size=self.cfg.dataset.batch_size,
            max_positions=model.max_positions(),
            num_workers=self.cfg.dataset.num_workers,
            data_buffer_size=self.cfg.dataset.data_buffer_size,
        )
        self.task.dataset_to_epoch_iter.clear()


def losses_of_ensemble(
    tests: Tests, path: Path, members: list[dict[str, Any]], known: Optional[Path], out: Optional[Path]
) -> Iterator[tuple[str, float]]:
    """Yield for each split the loss of the mean of the members' probabilities, bits per token.

    Args:
        tests: of its members.
        path: of the ensemble.
        members: what it says of them.
        known: has sums over the first members, perhaps.
        out: where to keep those over all.
    """
    sums = KeptPredictions(_about(tests), tuple(each["sha256"] for each in members))
    kept = [found for file in (out, known) if file is not None and (found := KeptPredictions.read(file)) is not None]
    before = next((each for each in kept if sums.is_begun_by(each)), None)
    if before is not None:
        sums.log_sums = {split: before.log_sums[split] for split in tests.splits if split in before.log_sums}
    again = [split for split in tests.splits if split not in sums.log_sums]
    for number, entry in enumerate(members):
        splits = again if before is not None and number < len(before.members) else tests.splits
        if splits:
            for split, log_probs in tests.log_probs(str(member_file(entry, path.parent)), splits):
                sums.add(split, log_probs)
    if out is not None:
        sums.log_sums = {split: sums.log_sums[split] for split in tests.splits}
        sums.write(out)
    yield from ((split, sums.loss(split)) for split in tests.splits)


def _about(tests: Tests) -> str:
    """Return what decides a member's log-probabilities beside its weights."""
    stream, task = tests.task.stream, tests.task.args
    cut = (task.tokens_per_sample, str(task.sample_break_mode), bool(task.add_bos_token))
    held_out = [file.sha256 for split in ("valid", "test") for file in stream.split(split).files]
    return repr((stream.dictionary_sha256, cut, held_out))


def split_names(subset: str, num_megabatches: int) -> list[str]:
    """Return the splits that ``--gen-subset`` names, separated by commas."""
    slices = [name(t) for name in (holdout_name, slice_name) for t in range(num_megabatches)]
    return [split for name in subset.split(",") for split in (slices if name == MATRIX else [name])]


@in_one_line()
def test(cfg: DictConfig, known: Optional[Path], out: Optional[Path]) -> None:
    """Test the checkpoint of a configuration, and print a line for each split."""
    utils.import_user_module(cfg.common)
    task = tasks.setup_task(cfg.task)
    path = cfg.common_eval.path
    tests = Tests(cfg, task, split_names(cfg.dataset.gen_subset, task.stream.num_megabatches))
    model = read_checkpoint(path)["cfg"]["model"]
    members = model["members"] if model["_name"] == ENSEMBLE_ARCH else []
    # Members within the file, or that do not count alike, are no run's.
    is_of_run = bool(members) and all("path" in each and each["weight"] == members[0]["weight"] for each in members)
    found = losses_of_ensemble(tests, Path(path), members, known, out) if is_of_run else tests.losses(path)
    for split, loss in found:
        eval_lm.logger.info(f"{split}: {loss:.4f} bits per token")


def main() -> int:
    """Run the command."""
    logging.basicConfig(
        format="%(asctime)s | %(levelname)s | %(name)s | %(message)s", level=logging.INFO, stream=sys.stdout, force=True
    )
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--known", type=Path)
    own.add_argument("--out", type=Path)
    given, words = own.parse_known_args()
    sys.argv[1:] = words  # where the task looks too
    arguments = options.parse_args_and_arch(options.get_eval_lm_parser())
    test(convert_namespace_to_omegaconf(arguments), given.known, given.out)
    return 0


if __name__ == "__main__":
    leave(SystemExit(main()))
