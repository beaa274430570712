"""``alma_transformer_lm``: the default language model, dense or with experts, with its options and named sizes."""

from dataclasses import dataclass
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqLanguageModel, register_model, register_model_architecture
from fairseq.tasks import FairseqTask
from omegaconf import II

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.checkpoints.model_options import (
    ALMA_TRANSFORMER,
    TRANSFORMER_SIZES,
    Beginning,
    complete_sizes,
    starting_checkpoint,
)
from fairseq_alma.data.tokens import absent_ids
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import trees_of_layers
from fairseq_alma.options import options_of
from fairseq_alma.text.feature_decoder import mark_for_optimizers
from fairseq_alma.text.transformer import AlmaTransformerDecoder
from fairseq_alma.training.fairseq_options import check_options, fairseq_config

_Options: Any = fairseq_config("AlmaTransformer", FairseqDataclass, ALMA_TRANSFORMER)


@dataclass
class AlmaTransformerLMConfig(_Options, Beginning):
    """Options of ``alma_transformer_lm``."""

    # None where the task has no such option, which build_model refuses.
    tokens_per_sample: Optional[int] = II("oc.select:task.tokens_per_sample")
    max_target_positions: Optional[int] = II("oc.select:task.max_target_positions")


@register_model("alma_transformer_lm", dataclass=AlmaTransformerLMConfig)
class AlmaTransformerLM(FairseqLanguageModel):
    """A language model of today's parts, for ``--task alma_lm``; see `text.transformer`.

    Args:
        decoder: the model itself.
        balance_loss_weight: what the criterion multiplies the load-balancing loss with.
        is_compiled: whether the criterion lets ``torch.compile`` fuse what both do in training.
    """

    residual_outputs = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
    """Endings of the names of the weights that write to the residual stream; zero in a new layer."""

    def __init__(self, decoder: AlmaTransformerDecoder, balance_loss_weight: float, is_compiled: bool = False) -> None:
        super().__init__(decoder)
        self.balance_loss_weight = balance_loss_weight
        self.is_compiled = is_compiled
        mark_for_optimizers(decoder)

    @classmethod
    def build_model(cls, cfg: AlmaTransformerLMConfig, task: FairseqTask) -> "AlmaTransformerLM":
        """Build the model that the options describe.

        Raises:
            AlmaError: if options do not fit together, or the checkpoint to start from cannot be read.
        """
        cls.complete_options(cfg)
        check_options(cfg)
        max_positions = cfg.max_target_positions or cfg.tokens_per_sample
        if max_positions is None:
            raise AlmaError("--tokens-per-sample: the task has no such option; give --task alma_lm")
        trees = trees_of_layers(cfg) if cfg.num_experts > 1 else [None] * cfg.decoder_layers
        absent = absent_ids(cfg.symbol_ids) if cfg.symbol_ids else ()
        decoder = AlmaTransformerDecoder(cfg, task.source_dictionary, trees, max_positions, absent)
        return cls(decoder, cfg.balance_loss_weight, cfg.compile)

    @classmethod
    def complete_options(cls, cfg: AlmaTransformerLMConfig, continue_once: Optional[str] = None) -> None:
        """Fill in what the command line left open: as in the checkpoint to start from, else the defaults.

        Args:
            cfg: filled in here.
            continue_once: value of ``--continue-once``, which models do not see.
        """
        names = [name for each in ALMA_TRANSFORMER for name, option in options_of(each).items() if option.shape]
        options = {name: getattr(cfg, name) for name in names}
        start = starting_checkpoint(cfg, continue_once)
        found = read_checkpoint(start)["cfg"]["model"] if start is not None and None in options.values() else {}
        if found.get("_name") in TRANSFORMER_SIZES:
            options = {
                name: found[name] if given is None or given is False else given for name, given in options.items()
            }
        complete_sizes(options, cfg._name if cfg._name in TRANSFORMER_SIZES else "alma_transformer_lm")
        for name, value in options.items():
            setattr(cfg, name, value)


for _arch in list(TRANSFORMER_SIZES)[1:]:  # the first is registered with the model
    register_model_architecture("alma_transformer_lm", _arch)(lambda args: None)  # `complete_options` knows the sizes
