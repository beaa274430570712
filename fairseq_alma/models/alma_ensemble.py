"""An ensemble of language models that predicts with the mean of its members' probabilities (the paper's Ens and gEns).

Its members were trained one by one; ``alma-ensemble`` writes the one checkpoint that stands for all of them, which the
stock commands then read. From Python:

    FairseqLanguageModel.from_pretrained(
        FOLDER, "ensemble.pt", data_name_or_path=STREAM, bpe="alma", path=f"{FOLDER}/ensemble.pt"
    ).sample("The", beam=1, sampling=True, max_len_b=30)

Letters: B sequences, T positions, V units of the vocabulary.
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

import torch
from fairseq import models
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqLanguageModel, register_model
from fairseq.tasks import FairseqTask
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.ensemble_file import ENSEMBLE, members_of, weights_of_member
from fairseq_alma.models.member_decoder import MemberDecoder
from fairseq_alma.modules.causal_self_attention import IncrementalState


@dataclass
class AlmaEnsembleConfig(FairseqDataclass):
    """What a checkpoint says of its members; not options of a command. `growth.ensemble_file` describes them."""

    members: Any = field(default=None, metadata={"help": "list of the members"})
    vocab_size: int = field(default=0, metadata={"help": "units that all members know, fairseq's four included"})


class EnsembleDecoder(MemberDecoder):
    """Compute the log of the weighted mean of the members' probabilities.

    Args:
        dictionary: the vocabulary that all members share.
        members: the models.
        weights: what each member counts, at least 0, in all 1.
    """

    def __init__(
        self, dictionary: Dictionary, members: Sequence[FairseqLanguageModel], weights: Sequence[float]
    ) -> None:
        super().__init__(dictionary, members)
        # Python floats, as --fp16 would round a tensor of the model
        self.log_weights = torch.tensor(weights, dtype=torch.float64).log().tolist()

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: Optional[IncrementalState] = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Predict the next token at every position.

        Args:
            prev_output_tokens: (B, T) int64, padded on the right.
            encoder_out: unused; fairseq passes it to every decoder.
            incremental_state: cache of earlier positions, shared by all members; then T = 1 position is predicted.
            unused: further arguments of fairseq's generator (``src_lengths``).

        Returns:
            (B, T, V) fp32 log-probabilities, in any precision of the members; they serve as logits, as their softmax
            is the mean itself. Beside them a dictionary that says that there is no attention to report.
        """
        total: Optional[Tensor] = None
        for member, log_weight in zip(self.members, self.log_weights, strict=True):
            output = member(prev_output_tokens, incremental_state=incremental_state)
            log_probs = member.get_normalized_probs(output, log_probs=True).float().add_(log_weight)
            del output  # its logits: not one (B, T, V) array more than needed lives while the next member computes
            total = log_probs if total is None else torch.logaddexp(total, log_probs, out=total)
        assert total is not None
        return total, {"attn": [None]}


@register_model(ENSEMBLE, dataclass=AlmaEnsembleConfig)
class AlmaEnsemble(FairseqLanguageModel):
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
    def build_model(cls, cfg: AlmaEnsembleConfig, task: FairseqTask) -> "AlmaEnsemble":
        """Build the members, and load those that are in files of their own.

        Raises:
            AlmaError: if a member is missing or changed or knows another vocabulary, or if this is to be trained.
        """
        if cfg.members is None:
            raise AlmaError(
                f"--arch {ENSEMBLE}: an ensemble is not trained as one; train its members one by one and join them "
                "with alma-ensemble, or train several jointly with --arch alma_umix"
            )
        if cfg.vocab_size != len(task.source_dictionary):
            raise AlmaError(
                f"the ensemble's members know {cfg.vocab_size} units, the stream's dict.txt has "
                f"{len(task.source_dictionary)} with fairseq's four; give the stream that they were trained on"
            )
        entries = [OmegaConf.to_container(entry) for entry in cfg.members]
        members, embedded = [], []
        for index, found in enumerate(members_of({"members": entries}, {}, _folder(task))):
            member = models.build_model(OmegaConf.create(found.config), task, from_checkpoint=True)
            if found.file is None:
                embedded.append(index)
            else:
                member.load_state_dict(dict(found.weights))
            members.append(member)
        weights = [entry.weight for entry in cfg.members]
        return cls(EnsembleDecoder(task.source_dictionary, members, weights), embedded)

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> None:
        """Load the embedded members; the others have their weights since they were built.

        Args:
            state_dict: the checkpoint's ``model``.
            strict: every weight of an embedded member must be there, and none beside.
            model_cfg: unused; each member has a configuration of its own.
            args: unused, as before.
        """
        for index, member in enumerate(self.decoder.members):
            weights = weights_of_member(state_dict, index)
            if weights or index in self.embedded:
                member.load_state_dict(weights, strict)


def _folder(task: FairseqTask) -> Optional[Path]:
    """Return the ensemble's own folder, where a task knows it; stock tasks do not."""
    path = task.checkpoint_path if hasattr(task, "checkpoint_path") else None
    return None if path is None else Path(path).parent
