"""Base classes of the language models: attention with a cache, decoder layer, decoder, model, and model options.

Letters: B sequences, T positions, M model dim, H heads, D head dim, V vocabulary size.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Callable, ClassVar, Mapping, Optional, Sequence

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.incremental_decoding_utils import with_incremental_state
from fairseq.models import (
    ARCH_MODEL_NAME_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    MODEL_REGISTRY,
    FairseqIncrementalDecoder,
    FairseqLanguageModel,
)
from fairseq.tasks import FairseqTask
from omegaconf import II
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.checkpoints.model_options import StartOptions, starting_checkpoint
from fairseq_alma.errors import AlmaError
from fairseq_alma.moe.gate import Routing
from fairseq_alma.moe.switch_layer import SwitchLayer, SwitchStatistics
from fairseq_alma.training.stage_task import check_options

IncrementalState = dict[str, dict[str, Optional[Tensor]]]


@with_incremental_state
class CachedAttention(nn.Module):
    """Causal attention with a cache of keys and values for step-by-step decoding.

    Sequences must be padded on the right, as in fairseq's language modeling data, so that no token attends to padding.
    """

    get_incremental_state: Any  # added by the decorator
    set_incremental_state: Any

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, state: Optional[IncrementalState], dropout: float = 0.0
    ) -> Tensor:
        """Return the (B, T, H x D) output of causal attention.

        Queries are (B, H, T, D). Keys and values are (B, K, T, D) with K key-value heads, where K divides H. With a
        ``state``, the inputs contain only the newest position (T = 1), which this method appends to the cache.
        """
        if state is not None:
            cached = self.get_incremental_state(state, "attn_state")
            if cached is not None:
                key, value = torch.cat([cached["key"], key], dim=2), torch.cat([cached["value"], value], dim=2)
            self.set_incremental_state(state, "attn_state", {"key": key, "value": value})
        how: Any = {"dropout_p": dropout if self.training else 0.0, "enable_gqa": key.size(1) != query.size(1)}
        out = F.scaled_dot_product_attention(query, key, value, is_causal=state is None, **how)
        return out.transpose(1, 2).flatten(2)

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> None:
        """Reorder the cache for beam search; called by fairseq."""
        cached = self.get_incremental_state(incremental_state, "attn_state")
        if cached is not None:
            reordered = {name: tensor.index_select(0, new_order) for name, tensor in cached.items()}
            self.set_incremental_state(incremental_state, "attn_state", reordered)


class DecoderLayer(nn.Module):
    """Pre-norm Transformer layer: self-attention and a feed-forward network (FFN), with residual connections."""

    self_attn: nn.Module
    dropout: float

    def norms_and_ffn(self) -> tuple[nn.Module, nn.Module, Callable[..., Any]]:
        """Return the modules (attention norm, FFN norm, FFN), whose names in checkpoints depend on the subclass."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, padding: Tensor, state: Optional[IncrementalState], *positions: Tensor
    ) -> tuple[Tensor, Optional[Routing], Optional[SwitchStatistics]]:
        """Return ((B, T, M) output, routing of the B x T tokens, statistics); dense FFN: (output, None, None).

        ``padding`` (B, T) is True for padding tokens; ``positions`` is the second result of `Decoder.embed`.
        """
        attention_norm, norm, feed_forward = self.norms_and_ffn()
        residual = self.self_attn(attention_norm(x), state, *positions)
        x = x + F.dropout(residual, self.dropout, self.training)
        residual, routing, statistics = norm(x), None, None
        if isinstance(feed_forward, SwitchLayer):
            residual, routing, statistics = feed_forward(residual.flatten(0, 1), padding.flatten())
        else:
            residual = feed_forward(residual)
        return x + F.dropout(residual.view_as(x), self.dropout, self.training), routing, statistics


class Decoder(FairseqIncrementalDecoder):
    """Decoder with embeddings, layers, a final norm and an output projection.

    A subclass sets the attributes that this class declares, and implements `embed`. The criterion
    ``alma_switch_cross_entropy`` calls `forward` with ``features_only`` and applies the output projection itself.

    Args:
        dictionary: vocabulary.
        cfg: options of the model.
        max_positions: maximum sequence length in tokens.
    """

    embed_tokens: nn.Embedding
    layers: nn.ModuleList
    output_projection: nn.Linear
    norm_name: ClassVar[str]
    """Name of the final norm, as an attribute of the decoder and in checkpoints."""
    logit_bias: Optional[Tensor]
    """(V,) bias of the logits: -30 for symbols of fairseq that an imported vocabulary lacks, else 0; None: no bias."""

    def __init__(self, dictionary: Dictionary, cfg: Any, max_positions: int) -> None:
        super().__init__(dictionary)
        self.padding_idx = dictionary.pad()
        self.max_target_positions = max_positions
        self.dropout, self.checkpoint_activations = cfg.dropout, cfg.checkpoint_activations
        self.register_buffer("logit_bias", None, persistent=False)

    def embed(self, tokens: Tensor, state: Optional[IncrementalState]) -> tuple[Tensor, Sequence[Tensor]]:
        """Return ((B, T, M) input of the first layer, position tensors that all attention layers share).

        If ``state`` is given, embed only the newest position (T = 1).
        """
        raise NotImplementedError

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: Optional[IncrementalState] = None,
        features_only: bool = False,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Predict the next token at each position.

        Args:
            prev_output_tokens: (B, T) int64, padded on the right.
            encoder_out: unused; fairseq passes this argument to every decoder.
            incremental_state: cache of earlier positions; if given, compute only the newest position (T = 1).
            features_only: return the (B, T, M) features instead of the (B, T, V) logits.
            unused: further arguments of fairseq's generator (``src_lengths``).

        Returns:
            (logits or features, dictionary with the lists ``routing`` and ``switch``). For each Switch layer,
            ``routing`` has one `Routing`, and ``switch`` has one `SwitchStatistics`.
        """
        x, positions = self.embed(prev_output_tokens, incremental_state)
        x = F.dropout(x, self.dropout, self.training)
        padding = prev_output_tokens[:, -x.size(1) :].eq(self.padding_idx)
        extra: dict[str, Any] = {"attn": [None], "routing": [], "switch": []}
        for layer in self.layers:
            given = (x, padding, incremental_state, *positions)
            if self.checkpoint_activations and self.training:
                x, routing, statistics = checkpoint(layer, *given, use_reentrant=False)
            else:
                x, routing, statistics = layer(*given)
            if routing is not None:
                extra["routing"].append(routing)
                extra["switch"].append(statistics)
        x = getattr(self, self.norm_name)(x)
        return (x if features_only else F.linear(x, self.output_projection.weight, self.logit_bias)), extra

    def max_positions(self) -> int:
        return self.max_target_positions


@dataclass
class LanguageModelConfig(StartOptions, FairseqDataclass):
    """Model options that fairseq copies from the option groups ``task`` and ``checkpoint``."""

    # The maximum length is --tokens-per-sample unless the task sets another limit, as in fairseq's transformer_lm.
    # Both fields are None if the task has no such options; build_model then raises an error.
    tokens_per_sample: Optional[int] = II("oc.select:task.tokens_per_sample")
    max_target_positions: Optional[int] = II("oc.select:task.max_target_positions")


class LanguageModel(FairseqLanguageModel):
    """A language model for ``--task alma_lm``.

    Args:
        decoder: decoder with all weights of the model.
        cfg: model options.

    Attributes:
        decoder_class: class of the decoder.
        sizes: model sizes by name of the architecture.
        inherited: options whose default is the value in the checkpoint that training starts from.
        fill_in_defaults: function that sets inherited options that are None to the defaults of an architecture.
        residual_outputs: name suffixes of parameters that write to the residual stream and are zero in a new layer.
        balance_loss_weight: weight of the load-balancing loss in the criterion.
        is_compiled: whether the criterion compiles the training step.
    """

    decoder_class: ClassVar[type[Decoder]]
    sizes: ClassVar[Mapping[str, Mapping[str, int]]]
    inherited: ClassVar[Sequence[str]]
    fill_in_defaults: ClassVar[Any]
    residual_outputs: ClassVar[tuple[str, ...]]

    def __init__(self, decoder: Decoder, cfg: Any) -> None:
        super().__init__(decoder)
        self.balance_loss_weight, self.is_compiled = cfg.balance_loss_weight, cfg.compile
        # The optimizers `fused_adam` and `muon` select the learning rate by this attribute.
        for module in decoder.modules():
            for each in module.parameters() if isinstance(module, (nn.Embedding, SwitchLayer)) else ():
                if each.dim() == 2:  # embeddings, gates, and biases of all experts
                    each.param_group = "adam"  # type: ignore[attr-defined]
        tables: Any = decoder.embed_tokens.weight, decoder.output_projection.weight
        if tables[0] is not tables[1]:
            tables[0].param_group, tables[1].param_group = "embedding", "adam"

    @classmethod
    def build_model(cls, cfg: Any, task: FairseqTask) -> "LanguageModel":
        """Build the model from the options ``cfg``.

        Raises:
            AlmaError: options contradict each other, or the checkpoint to start from cannot be read.
        """
        cls.complete_options(cfg, starting_checkpoint(cfg))
        check_options(cfg)
        max_positions = cfg.max_target_positions or cfg.tokens_per_sample
        if max_positions is None:
            raise AlmaError("--tokens-per-sample: the task has no such option; give --task alma_lm")
        return cls(cls.decoder_class(task.source_dictionary, cfg, max_positions), cfg)

    @classmethod
    def complete_options(cls, cfg: Any, start: Optional[str]) -> None:
        """Fill in missing options with values from the starting checkpoint, then with defaults of the architecture.

        Args:
            cfg: model options, changed in place.
            start: checkpoint that training starts or resumes from, or None.
        """
        options = {name: getattr(cfg, name) for name in cls.inherited}
        found = {} if start is None or None not in options.values() else read_checkpoint(start)["cfg"]["model"]
        if found.get("_name") in cls.sizes:
            for name, given in options.items():
                options[name] = found.get(name) if given is None or given is False else given
        cls.fill_in_defaults(options, cfg._name if cfg._name in cls.sizes else next(iter(cls.sizes)))
        for name, value in options.items():
            setattr(cfg, name, value)


def build_from_config(config: Mapping[str, Any], vocab_size: int, device: str = "meta") -> Any:
    """Build a language model with random weights; on device ``meta``, weights take no memory.

    Args:
        config: ``cfg["model"]`` of a checkpoint of ``alma_switch_lm`` or ``alma_transformer_lm``.
        vocab_size: size of the vocabulary, including fairseq's four special symbols.
        device: device of the weights.
    """
    dictionary = Dictionary()
    for token in range(vocab_size - len(dictionary)):
        dictionary.add_symbol(f"token{token}")
    name = ARCH_MODEL_NAME_REGISTRY[config["_name"]]
    kind = MODEL_DATACLASS_REGISTRY[name]
    options = kind(**{name: value for name, value in config.items() if name in kind.__dataclass_fields__})
    with torch.device(device):
        return MODEL_REGISTRY[name].build_model(options, SimpleNamespace(source_dictionary=dictionary))
