"""``alma_ensemble``: mean of the probabilities of several trained models (Ens and gEns of the paper).

The members are language models or image models that were trained separately. ``alma-ensemble`` writes an ensemble
checkpoint for fairseq commands. To load this checkpoint in Python:

    FairseqLanguageModel.from_pretrained(
        FOLDER, "ensemble.pt", data_name_or_path=STREAM, bpe="alma", path=f"{FOLDER}/ensemble.pt"
    ).sample("The", beam=1, sampling=True, max_len_b=30)

Letters: B sequences, T positions, V vocabulary size.
"""

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, Sequence

from fairseq import models
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel, FairseqIncrementalDecoder, FairseqLanguageModel, register_model
from omegaconf import OmegaConf
from torch import Tensor, nn

from fairseq_alma.checkpoints.ensemble_file import (
    ENSEMBLE_ARCH,
    load_embedded,
    log_of_mean,
    member_file,
    read_member,
)
from fairseq_alma.errors import AlmaError
from fairseq_alma.images.image_models import ImageEnsemble
from fairseq_alma.training.stage_task import refuse_other_weights


@dataclass
class AlmaEnsembleConfig(FairseqDataclass):
    """Configuration of an ensemble, stored in the ensemble checkpoint; see `checkpoints.ensemble_file`."""

    members: Any = field(default=None, metadata={"help": "one entry for each member; see checkpoints.ensemble_file"})
    vocab_size: int = field(default=0, metadata={"help": "vocabulary size, including fairseq's four special symbols"})
    num_classes: int = field(default=0, metadata={"help": "number of classes"})
    image_pixels: int = field(default=0, metadata={"help": "values per image (pixels x channels); 0: any number"})
    image_channels: int = field(default=0, metadata={"help": "channels per image; 0: any number"})


class EnsembleDecoder(FairseqIncrementalDecoder):
    """Decoder that predicts the weighted mean of the members' probabilities.

    All members share one incremental state. Its keys contain module ids, so each member has separate entries.

    Args:
        dictionary: vocabulary of all members.
        members: language models.
        weights: weight of each member, non-negative; the sum is 1.
    """

    members: Any  # an nn.ModuleList of language models; Any because mypy does not know their class

    def __init__(
        self, dictionary: Dictionary, members: Sequence[FairseqLanguageModel], weights: Sequence[float]
    ) -> None:
        super().__init__(dictionary)
        self.members, self.weights = nn.ModuleList(members), list(weights)

    def max_positions(self) -> int:
        return min(member.max_positions() for member in self.members)

    def forward(
        self, prev_output_tokens: Tensor, encoder_out: Any = None, incremental_state: Any = None, **unused: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return ((B, T, V) fp32 log-probabilities as logits, ``{"attn": [None]}``).

        Args:
            prev_output_tokens: token ids (B, T), int64, padded on the right.
            encoder_out: unused; fairseq passes this argument to every decoder.
            incremental_state: cache of earlier positions; None: no cache. With a cache, the output has T = 1.
            unused: other arguments that fairseq's generator passes, such as ``src_lengths``.
        """

        def log_probs(member: Any) -> Tensor:  # a function, so that the logits of a member are freed on return
            return member.get_normalized_probs(
                member(prev_output_tokens, incremental_state=incremental_state), log_probs=True
            )

        return log_of_mean(map(log_probs, self.members), self.weights), {"attn": [None]}


@register_model(ENSEMBLE_ARCH, dataclass=AlmaEnsembleConfig)
class AlmaEnsemble(FairseqLanguageModel):
    """Ensemble of trained language models, for evaluation and generation.

    Args:
        decoder: decoder with the members.
        embedded: indices of the members whose weights are in the ensemble checkpoint.
    """

    def __init__(self, decoder: EnsembleDecoder, embedded: Sequence[int]) -> None:
        super().__init__(decoder)
        self.embedded = frozenset(embedded)
        self.requires_grad_(False)

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add no options to fairseq commands, because ``alma-ensemble`` writes the configuration."""

    @classmethod
    def build_model(cls, cfg: AlmaEnsembleConfig, task: Any) -> BaseFairseqModel:
        """Build an ensemble of language models or image models, and load the members stored in separate files.

        Raises:
            AlmaError: a member file is missing or changed; the vocabulary size, number of classes or image size differs
                between ensemble and stream; or the command is fairseq-train.
        """
        if cfg.members is None:
            raise AlmaError(
                f"--arch {ENSEMBLE_ARCH}: an ensemble cannot be trained; train the members separately and join "
                "them with alma-ensemble, or train image models jointly with --arch alma_umix"
            )
        if cfg.num_classes:
            sizes = [
                ("classes", cfg.num_classes, task.num_classes),
                ("pixels per image", cfg.image_pixels, math.prod(task.image_shape)),
                ("channels", cfg.image_channels, task.image_shape[0]),
            ]
        else:
            sizes = [("tokens in the vocabulary", cfg.vocab_size, len(task.source_dictionary))]
        for name, size, found in sizes:
            if size not in (0, found):
                raise AlmaError(
                    f"the members of the ensemble have {size} {name}, but the stream has {found}; use the stream on "
                    "which the members were trained"
                )
        path = getattr(task, "checkpoint_path", None)  # tasks of fairseq have no such attribute
        folder = None if path is None else Path(path).parent
        entries: list[Any] = [OmegaConf.to_container(entry) for entry in cfg.members]
        embedded = [index for index, entry in enumerate(entries) if "config" in entry]
        members: list[Any] = []
        for index, entry in enumerate(entries):
            file = None if index in embedded else member_file(entry, folder)
            checkpoint = {"cfg": {"model": entry["config"]}} if file is None else read_member(file)
            member = models.build_model(OmegaConf.create(checkpoint["cfg"]["model"]), task, from_checkpoint=True)
            refuse_other_weights(member, str(file or f"member {index} of the ensemble"))
            if file is not None:
                member.load_state_dict(dict(checkpoint["model"]))
            members.append(member)
        weights = [each.weight for each in cfg.members]
        if cfg.num_classes:
            return ImageEnsemble(members, weights, embedded)
        return cls(EnsembleDecoder(task.source_dictionary, members, weights), embedded)

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> None:
        load_embedded(self.decoder.members, self.embedded, state_dict, strict)
