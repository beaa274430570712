"""Test one checkpoint on several splits in one process; fairseq-eval-lm takes one split.

The options are those of fairseq-eval-lm, with several names in ``--gen-subset``. A model is tested by fairseq's own
function, to the same bits. Members of an ensemble are tested one by one, only those that ``--known FILE`` does not have
(`KeptPredictions`); ``--out FILE`` keeps their joint predictions.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Iterator, Optional, Sequence

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
from fairseq_alma.text.kept_predictions import KeptPredictions


@dataclass
class Tests:
    """The tests of one command.

    Attributes:
        cfg: configuration of fairseq-eval-lm.
        task: task of this configuration.
        splits: names of the splits.
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
        """Yield the batches of a split, whose files are open no longer than that, as there may be thousands."""
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
        tests: the tests of the command.
        path: the ensemble's checkpoint.
        members: its members, as in the checkpoint's configuration.
        known: file that may have the sums over the first members.
        out: file for those over all members.
    """
    stream, task = tests.task.stream, tests.task.args
    cut = (task.tokens_per_sample, str(task.sample_break_mode), bool(task.add_bos_token))
    held_out = [file.sha256 for split in ("valid", "test") for file in stream.split(split).files]
    kept = KeptPredictions(repr((stream.dictionary_sha256, cut, held_out)), [each["sha256"] for each in members])

    def log_probs(number: int, splits: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        return tests.log_probs(str(member_file(members[number], path.parent)), splits)

    kept.add_missing(tests.splits, [file for file in (out, known) if file is not None], log_probs)
    if out is not None:
        kept.write(out)
    return kept.losses()


@in_one_line()
def test(cfg: DictConfig, known: Optional[Path] = None, out: Optional[Path] = None) -> dict[str, float]:
    """Test the checkpoint of a configuration; return for each split of ``--gen-subset`` its loss, bits per token."""
    utils.import_user_module(cfg.common)
    path = cfg.common_eval.path
    tests = Tests(cfg, tasks.setup_task(cfg.task), cfg.dataset.gen_subset.split(","))
    model = read_checkpoint(path)["cfg"]["model"]
    members = model["members"] if model["_name"] == ENSEMBLE_ARCH else []
    # Members within the file, or that do not count alike, are no run's.
    is_of_run = bool(members) and all("path" in each and each["weight"] == members[0]["weight"] for each in members)
    losses = {}
    for split, loss in losses_of_ensemble(tests, Path(path), members, known, out) if is_of_run else tests.losses(path):
        losses[split] = loss
        eval_lm.logger.info(f"{split}: {loss:.4f} bits per token")
    return losses


def main() -> dict[str, float]:
    """Test with the options of fairseq-eval-lm and two more; see `test`."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--known", type=Path)
    own.add_argument("--out", type=Path)
    given, sys.argv[1:] = own.parse_known_args()  # the task looks there too
    arguments = options.parse_args_and_arch(options.get_eval_lm_parser())
    return test(convert_namespace_to_omegaconf(arguments), given.known, given.out)
