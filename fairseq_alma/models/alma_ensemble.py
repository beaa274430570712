"""An ensemble that predicts with the mean of its members' probabilities (the paper's Ens and gEns).

Its members, language models or image models, were trained one by one; ``alma-ensemble`` writes the one checkpoint
that stands for all of them, which the stock commands then read. From Python:

    FairseqLanguageModel.from_pretrained(
        FOLDER, "ensemble.pt", data_name_or_path=STREAM, bpe="alma", path=f"{FOLDER}/ensemble.pt"
    ).sample("The", beam=1, sampling=True, max_len_b=30)

Letters: B sequences, T positions, V vocabulary size.
"""

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Sequence

from fairseq import models
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel, FairseqIncrementalDecoder, FairseqLanguageModel, register_model
from omegaconf import OmegaConf
from torch import Tensor, nn

from fairseq_alma.checkpoints.ensemble_file import ENSEMBLE_ARCH, TrainedMembers, log_of_mean, members_of
from fairseq_alma.errors import AlmaError
from fairseq_alma.training.loading import refuse_other_weights


@dataclass
class AlmaEnsembleConfig(FairseqDataclass):
    """The members as in a checkpoint, see `checkpoints.ensemble_file`; not options of a command."""

    members: Any = field(default=None, metadata={"help": "list of the members"})
    vocab_size: int = field(default=0, metadata={"help": "tokens that all members know, fairseq's four included"})
    num_classes: int = field(default=0, metadata={"help": "classes that all members know"})
    image_pixels: int = field(default=0, metadata={"help": "pixels, over all channels, of the members' images; 0: any"})
    image_channels: int = field(default=0, metadata={"help": "channels of the members' images; 0: any"})


class EnsembleDecoder(FairseqIncrementalDecoder):
    """Compute the log of the weighted mean of the members' probabilities.

    fairseq keeps the cache of decoding step by step in one dictionary, under keys that belong to one module each, so
    all members share it; and it reorders the cache by walking over all modules.

    Args:
        dictionary: the vocabulary that all members share.
        members: the models.
        weights: what each member counts, at least 0, in all 1.
    """

    members: Any  # an nn.ModuleList, which hides from mypy that these modules are language models

    def __init__(
        self, dictionary: Dictionary, members: Sequence[FairseqLanguageModel], weights: Sequence[float]
    ) -> None:
        super().__init__(dictionary)
        self.members, self.weights = nn.ModuleList(members), list(weights)

    def max_positions(self) -> int:
        """Return the longest sequence that every member can take, in tokens."""
        return min(member.max_positions() for member in self.members)

    def forward(
        self, prev_output_tokens: Tensor, encoder_out: Any = None, incremental_state: Any = None, **unused: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Predict the next token at every position.

        Args:
            prev_output_tokens: (B, T) int64, padded on the right.
            encoder_out: unused; fairseq passes it to every decoder.
            incremental_state: cache of earlier positions, shared by all members; then T = 1 position is predicted.
            unused: further arguments of fairseq's generator (``src_lengths``).

        Returns:
            (B, T, V) fp32 log-probabilities, which serve as logits. Beside them a dictionary that says that there is no
            attention to report.
        """
        each = (self._log_probs(member, prev_output_tokens, incremental_state) for member in self.members)
        return log_of_mean(each, self.weights), {"attn": [None]}

    @staticmethod
    def _log_probs(member: Any, tokens: Tensor, incremental_state: Any) -> Tensor:
        """Return (B, T, V); the member's logits are freed when this returns."""
        return member.get_normalized_probs(member(tokens, incremental_state=incremental_state), log_probs=True)


@register_model(ENSEMBLE_ARCH, dataclass=AlmaEnsembleConfig)
class AlmaEnsemble(TrainedMembers, FairseqLanguageModel):
    """Several trained language models as one, for every stock command that does not train.

    Args:
        decoder: holds the members.
        embedded: the members whose weights are in the ensemble's own checkpoint.
    """

    def __init__(self, decoder: EnsembleDecoder, embedded: Sequence[int]) -> None:
        super().__init__(decoder)
        self.embedded = frozenset(embedded)
        self.requires_grad_(False)

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add no options: ``alma-ensemble`` decides what the members are."""

    @classmethod
    def build_model(cls, cfg: AlmaEnsembleConfig, task: Any) -> BaseFairseqModel:
        """Build the members, and load those that are in files of their own.

        Returns:
            An ensemble of language models, or what the members' own class makes of them.

        Raises:
            AlmaError: if a member is missing or changed or knows other tokens or classes, or if this is to be trained.
        """
        if cfg.members is None:
            raise AlmaError(
                f"--arch {ENSEMBLE_ARCH}: an ensemble is not trained as one; train its members one by one and join "
                "them with alma-ensemble, or train several jointly with --arch alma_umix"
            )
        _check_task(cfg, task)
        entries = [OmegaConf.to_container(entry) for entry in cfg.members]
        members: list[Any] = []
        embedded = []
        for index, found in enumerate(members_of({"members": entries}, {}, _folder(task))):
            member = models.build_model(OmegaConf.create(found.config), task, from_checkpoint=True)
            refuse_other_weights(member, str(found.file or f"member {index} of the ensemble"))
            if found.file is None:
                embedded.append(index)
            else:
                member.load_state_dict(dict(found.weights))
            members.append(member)
        weights = [entry.weight for entry in cfg.members]
        if hasattr(members[0], "build_ensemble"):
            return members[0].build_ensemble(members, weights, embedded)
        return cls(EnsembleDecoder(task.source_dictionary, members, weights), embedded)

    def trained_members(self) -> Sequence[nn.Module]:
        return self.decoder.members


def _check_task(cfg: AlmaEnsembleConfig, task: Any) -> None:
    """Raise AlmaError unless the stream has the members' tokens, or their classes and images of their shape."""
    remedy = "give the stream that they were trained on"
    if not cfg.num_classes:
        if cfg.vocab_size != len(task.source_dictionary):
            raise AlmaError(
                f"the ensemble's members know {cfg.vocab_size} tokens, the stream's dict.txt has "
                f"{len(task.source_dictionary)} with fairseq's four; {remedy}"
            )
        return
    shape = task.image_shape
    given = (task.num_classes, math.prod(shape), shape[0])
    known = (cfg.num_classes, cfg.image_pixels, cfg.image_channels)
    for what, needed, found in zip(("classes", "pixels per image", "channels"), known, given, strict=True):
        if needed not in (0, found):
            raise AlmaError(f"the ensemble's members know {needed} {what}, the stream has {found}; {remedy}")


def _folder(task: Any) -> Optional[Path]:
    """Return the ensemble's own folder, where a task knows it; stock tasks do not."""
    path = task.checkpoint_path if hasattr(task, "checkpoint_path") else None
    return None if path is None else Path(path).parent
