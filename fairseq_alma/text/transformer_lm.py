"""``alma_transformer_lm``, the default model: RMSNorm, rotary position embeddings, SwiGLU, optional Switch layers.

The base classes of both language models come first: attention with a cache, decoder layer, decoder, and model.

Modules have the same names and compute the same functions as in Qwen3 (dense) and Qwen3-MoE of transformers. Therefore
an export copies the weights of the layers. Initial weights:

- matrices: uniform with variance 1 / (number of inputs); zero if the matrix writes to the residual stream
- first head of the first two layers, and norms of queries and keys there: see `init_induction_head`
- embeddings: standard normal; if shared with the output projection, normal with std min(0.02, 1 / M)
- output projection: almost zero, so that the initial loss is about log V
- in training with the task ``alma_lm``, unless embeddings are shared: see `init_from_bigrams`

With induction head and bigrams, small models learn faster.

Letters: B sequences, T positions, M model dim, H query heads, K key-value heads, D head dim, V vocabulary size.
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
    register_model,
    register_model_architecture,
)
from fairseq.tasks import FairseqTask
from omegaconf import II
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.checkpoints.model_options import ALMA_TRANSFORMER, TRANSFORMER_SIZES, StartOptions
from fairseq_alma.data.tokens import absent_ids
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree, trees_of_layers
from fairseq_alma.growth.tensors import init_uniform
from fairseq_alma.moe import Routing, SwitchLayer, SwitchStatistics
from fairseq_alma.options import options_of
from fairseq_alma.text.train_options import complete_sizes
from fairseq_alma.training.stage_task import check_options, fairseq_config, starting_checkpoint

# Numbers of tokens and dimensions that are enough for `init_from_bigrams`; more only take more memory and time.
MAX_TOKENS, MAX_RANK = 2**22, 128
# Share of the embedding dimensions, constant c, and penalty of the ridge regression in `init_from_bigrams`.
SHARE, PSEUDOCOUNT, RIDGE = 0.9, 60.0, 0.01
# Maximum number of sequences, and maximum length, of the sample of text in `init_from_bigrams`.
SAMPLE = (128, 128)
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
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout if self.training else 0.0,
            is_causal=state is None,
            enable_gqa=key.size(1) != query.size(1),
        )
        return out.transpose(1, 2).flatten(2)

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> None:
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
        if isinstance(feed_forward, SwitchLayer):
            residual, routing, statistics = feed_forward(norm(x).flatten(0, 1), padding.flatten())
        else:
            residual, routing, statistics = feed_forward(norm(x)), None, None
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
    # Name of the final norm, as an attribute of the decoder and in checkpoints.
    norm_name: ClassVar[str]
    # (V,) bias of the logits: -30 for symbols of fairseq that an imported vocabulary lacks, else 0; None: no bias.
    logit_bias: Optional[Tensor]

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


def linear(in_features: int, out_features: int, is_zero: bool = False) -> nn.Linear:
    """Return a linear layer without bias; the weights are zero or initialized by `init_uniform`."""
    made = nn.Linear(in_features, out_features, bias=False)
    (nn.init.zeros_ if is_zero else init_uniform)(made.weight)
    return made


def rotation_angles(head_dim: int, theta: float, device: Optional[torch.device] = None) -> Tensor:
    """Return the (D / 2) angles per position by which rotary embeddings rotate the pairs of dimensions."""
    return theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to queries or keys (B, T, H, D); dimensions i and i + D/2 form a pair, as in Qwen3."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class HeadNorm(nn.RMSNorm):
    """RMSNorm in the data type of the weights: under autocast, torch has no fused norm of a bf16 input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class GroupedQueryAttention(CachedAttention):
    """Grouped-query attention with RMSNorm and rotary position embeddings for queries and keys."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.head_dim, model_dim = cfg.head_dim, cfg.decoder_embed_dim
        query_dim, kv_dim = cfg.decoder_attention_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        self.q_proj, self.k_proj = linear(model_dim, query_dim), linear(model_dim, kv_dim)
        self.v_proj, self.o_proj = linear(model_dim, kv_dim), linear(query_dim, model_dim, is_zero=True)
        self.q_norm, self.k_norm = HeadNorm(cfg.head_dim, cfg.norm_eps), HeadNorm(cfg.head_dim, cfg.norm_eps)

    def forward(self, x: Tensor, state: Optional[IncrementalState], cos: Tensor, sin: Tensor) -> Tensor:
        """Return the (B, T, M) output for the (B, T, M) input; ``cos`` and ``sin`` are (T, 1, D / 2)."""
        heads = (*x.shape[:2], -1, self.head_dim)
        query = rotate(self.q_norm(self.q_proj(x).view(heads)), cos, sin).transpose(1, 2)  # (B, H, T, D)
        key = rotate(self.k_norm(self.k_proj(x).view(heads)), cos, sin).transpose(1, 2)  # (B, K, T, D)
        return self.o_proj(self.attend(query, key, self.v_proj(x).view(heads).transpose(1, 2), state))


class GatedFeedForward(nn.Module):
    """SwiGLU feed-forward network (Shazeer 2020) without biases: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, model_dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(model_dim, ffn_dim), linear(model_dim, ffn_dim)
        self.down_proj = linear(ffn_dim, model_dim, is_zero=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TransformerDecoderLayer(DecoderLayer):
    """Transformer layer with RMSNorm; the FFN is a Switch layer if a gate tree is given, otherwise dense."""

    def __init__(self, cfg: Any, tree: Optional[GateTree]) -> None:
        super().__init__()
        model_dim, ffn_dim, self.dropout = cfg.decoder_embed_dim, cfg.decoder_ffn_embed_dim, cfg.dropout
        self.input_layernorm = nn.RMSNorm(model_dim, cfg.norm_eps)
        self.self_attn = GroupedQueryAttention(cfg)
        self.post_attention_layernorm = nn.RMSNorm(model_dim, cfg.norm_eps)
        self.mlp: Any
        if tree is None:
            self.mlp = GatedFeedForward(model_dim, ffn_dim)
        else:
            self.mlp = SwitchLayer(model_dim, ffn_dim, tree, cfg.capacity_factor, cfg.eval_capacity_factor, gated=True)
            init_uniform(self.mlp.experts.gate_proj)
            init_uniform(self.mlp.experts.up_proj)

    def norms_and_ffn(self) -> tuple[nn.Module, nn.Module, Callable[..., Any]]:
        return self.input_layernorm, self.post_attention_layernorm, self.mlp


class TransformerDecoder(Decoder):
    """Decoder with rotary position embeddings and, with ``--share-decoder-input-output-embed``, tied embeddings."""

    norm_name = "norm"

    def __init__(self, dictionary: Dictionary, cfg: Any, max_positions: int) -> None:
        super().__init__(dictionary, cfg, max_positions)
        model_dim, self.norm_eps = cfg.decoder_embed_dim, cfg.norm_eps
        self.head_dim, self.rope_theta, self.norms_embeddings = cfg.head_dim, cfg.rope_theta, not cfg.no_embedding_norm
        trees = trees_of_layers(cfg) if cfg.num_experts > 1 else [None] * cfg.decoder_layers
        absent = absent_ids(cfg.symbol_ids) if cfg.symbol_ids else ()
        self.embed_tokens = nn.Embedding(len(dictionary), model_dim)
        self.layers = nn.ModuleList(TransformerDecoderLayer(cfg, tree) for tree in trees)
        self.norm = nn.RMSNorm(model_dim, cfg.norm_eps)
        self.output_projection = nn.Linear(model_dim, len(dictionary), bias=False)
        if cfg.share_decoder_input_output_embed:
            self.output_projection.weight = self.embed_tokens.weight
            # The layers initially add zero, so that the logit of the input token is about std * M.
            nn.init.normal_(self.embed_tokens.weight, std=min(0.02, 1 / model_dim))
        else:
            nn.init.normal_(self.embed_tokens.weight)
            nn.init.normal_(self.output_projection.weight, std=0.001)
        if cfg.decoder_layers > 1:
            init_induction_head(self)
        if absent:
            # Finite, because some tokenizers read the name of the EOS token in a text as this token.
            self.logit_bias = torch.zeros(len(dictionary)).index_fill_(0, torch.tensor(absent), -30.0)

    def embed(self, tokens: Tensor, state: Optional[IncrementalState]) -> tuple[Tensor, Sequence[Tensor]]:
        stop = tokens.size(1)
        start = 0 if state is None else stop - 1
        x = self.embed_tokens(tokens[:, start:])
        if self.norms_embeddings:
            x = F.rms_norm(x, x.shape[-1:], eps=self.norm_eps)
        positions = torch.arange(start, stop, device=x.device, dtype=torch.float32)
        angles = torch.outer(positions, rotation_angles(self.head_dim, self.rope_theta, x.device))[:, None]
        return x, (angles.cos(), angles.sin())


AlmaTransformerLMConfig: Any = fairseq_config("AlmaTransformerLMConfig", LanguageModelConfig, ALMA_TRANSFORMER)


@register_model("alma_transformer_lm", dataclass=AlmaTransformerLMConfig)
class AlmaTransformerLM(LanguageModel):
    """Language model ``alma_transformer_lm``: a Transformer decoder with the layers of Qwen3 or Qwen3-MoE."""

    decoder_class, sizes = TransformerDecoder, TRANSFORMER_SIZES
    inherited = tuple(name for each in ALMA_TRANSFORMER for name, option in options_of(each).items() if option.shape)
    fill_in_defaults = staticmethod(complete_sizes)
    residual_outputs = ("o_proj.weight", "down_proj.weight", "experts.down_proj")

    def init_from_text(self, tokens: Tensor) -> None:
        """Initialize a new model from the (N,) tokens of its first training text."""
        if self.decoder.embed_tokens.weight is not self.decoder.output_projection.weight:
            init_from_bigrams(self.decoder, tokens)


for _arch in list(TRANSFORMER_SIZES)[1:]:  # the first architecture is registered with the model
    register_model_architecture("alma_transformer_lm", _arch)(lambda args: None)  # `complete_options` sets the sizes


@torch.no_grad()
def init_induction_head(decoder: Any) -> None:
    """Initialize the first head of the first two layers so that the model can learn early to copy earlier text.

    The head of the first layer attends to the previous token and adds its embedding to the residual stream. The head of
    the second layer attends to tokens whose previous token is the current token. Such induction heads (Olsson et al.
    2022, "In-context learning and induction heads") form late or never in small models that start from random weights.
    The idea is from Trockman and Kolter 2023, "Mimetic initialization of self-attention layers".
    """
    attention: list[Any] = [layer.self_attn for layer in decoder.layers[:2]]
    first, second = attention
    dim, pairs = decoder.head_dim, torch.arange(decoder.head_dim // 2)
    angles = rotation_angles(dim, decoder.rope_theta)
    # Positions are compared in the fastest pairs, embeddings in the slow pairs, where distance matters little.
    fast, slow = pairs < max(1, len(pairs) // 4), pairs >= len(pairs) // 3
    # The query at t equals the key at t - 1: an input dimension is constant, and the key is rotated by one position.
    table = decoder.embed_tokens.weight
    std = table.std()
    table[:, 0] = 2 * std
    for projection, angle in ((first.q_proj, 0 * angles), (first.k_proj, angles)):
        projection.weight[:dim] = 0
        projection.weight[:dim, 0] = torch.cat([fast * angle.cos(), fast * angle.sin()])
    read = first.v_proj.weight[:dim]
    write = torch.empty_like(read)
    init_uniform(write)
    first.o_proj.weight[:, :dim] = (1 if decoder.norms_embeddings else std) * write.t()
    second.q_proj.weight[:dim] = read * slow.repeat(2).unsqueeze(1)
    second.k_proj.weight[:dim] = write * slow.repeat(2).unsqueeze(1)
    # Norms limit the logits to sqrt(D) times the product of their weights, too little to attend to a single token.
    for each in attention:
        each.q_norm.weight[:], each.k_norm.weight[:] = 2**0.5, 2**0.5


@torch.no_grad()
def init_from_bigrams(decoder: Any, tokens: Tensor) -> None:
    """Initialize embeddings and output projection so that the model approximately predicts the bigrams of a text.

    Let N(a, b) be the number of occurrences of token b after token a, p(b) the frequency of b, and c a constant. The
    last 90 % of the embedding dimensions (at most 128) are left singular vectors of the matrix log(1 + N(a, b) / (c
    p(b))), which is similar to the pointwise mutual information (Levy and Goldberg 2014, "Neural word embedding as
    implicit matrix factorization"). The output projection is a ridge regression from the model's hidden states in a
    sample of the text to the logits log p(b | a).

    Args:
        decoder: new decoder, whose layers add almost nothing to the embeddings.
        tokens: (N,) int64, the training text.
    """
    table, vocab_size = decoder.embed_tokens.weight, decoder.embed_tokens.num_embeddings
    frequency = torch.bincount(tokens, minlength=vocab_size) + 0.5
    frequency /= frequency.sum()
    pairs, counts = torch.unique(tokens[:-1] * vocab_size + tokens[1:], return_counts=True)
    rows, columns = pairs // vocab_size, pairs % vocab_size
    values = torch.log1p(counts / (PSEUDOCOUNT * frequency[columns]))

    def matrix(values: Tensor) -> Tensor:
        shape = (vocab_size, vocab_size)
        return torch.sparse_coo_tensor(torch.stack([rows, columns]), values, shape, check_invariants=True).coalesce()

    weighted = matrix(values * (frequency[rows] * frequency[columns]).sqrt())
    left, scale, _ = torch.svd_lowrank(weighted, min(int(SHARE * table.size(1)), vocab_size, MAX_RANK))
    left *= scale.sqrt() / frequency.sqrt().unsqueeze(1)
    norms = left.norm(dim=1, keepdim=True)
    table[:, -left.size(1) :] = left.size(1) ** 0.5 * left / (norms + 0.1 * norms.square().mean().sqrt() + 1e-6)

    length = min(SAMPLE[1], len(tokens), decoder.max_positions())
    sample = tokens[: len(tokens) // length * length].view(-1, length)
    sample = sample[:: -(-len(sample) // SAMPLE[0])]
    decoder.eval()
    hidden = decoder(sample, features_only=True)[0].flatten(0, 1)
    decoder.train()
    gram = hidden.t() @ hidden + RIDGE * len(hidden) * torch.eye(hidden.size(1))
    sums = torch.zeros_like(table).index_add_(0, sample.flatten(), hidden)
    logits = matrix(values)
    moments = (
        logits.t() @ sums
        - (logits @ frequency) @ sums
        + torch.outer(frequency.log() - (frequency * frequency.log()).sum(), hidden.sum(0))
    )
    decoder.output_projection.weight[:] = torch.linalg.solve(gram.double(), moments.double().t()).t()
