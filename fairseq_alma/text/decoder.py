"""Decoders of language models: a pre-norm layer of one, what all decoders have in common, and that of the Switch model.

Dropout, also of the weights of attention, has cheaper random numbers where training computes in bf16 on a CPU. With
products in bf16, torch's Bernoulli numbers (6 ns each) take longer than the attention that they thin out. Here the
generator's 64-bit words are cut into four numbers of 15 bits each (0.8 ns), so that a probability is met to 1/32768.
In fp32 and on a GPU dropout is torch's, digit for digit.

Letters: B sequences, T positions, M model dim, H heads, V vocabulary size.
"""

from typing import Any, Callable, Iterator, NamedTuple, Optional, Sequence, Union

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.incremental_decoding_utils import FairseqIncrementalState
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel
from fairseq.models.transformer import Embedding
from fairseq.modules import LayerNorm, PositionalEmbedding
from torch import Size, Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.moe.gate import Routing
from fairseq_alma.moe.short_copies import Linear, ShortNorm, ShortVectors, short_dtype
from fairseq_alma.moe.switch_layer import SwitchLayer, SwitchStatistics

LEVELS = 2**15
BLOCK = 256  # queries


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Set values to zero at random, and scale the others so that the expectation stays.

    Args:
        x: any shape.
        probability: of dropping a value, 0 to 1.
        training: False: return ``x``.

    Returns:
        The shape and precision of ``x``.
    """
    if training and uses_short_numbers(x, probability):
        return _Dropout.apply(x, probability)
    return F.dropout(x, probability, training)


def uses_short_numbers(x: Tensor, probability: float) -> bool:
    """Return whether dropout of this tensor draws the cheaper numbers, here and now."""
    in_bf16 = x.device.type == "cpu" and torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()
    return in_bf16 and 0 < kept_levels(probability) < LEVELS


def kept_levels(probability: float) -> int:
    """Return how many of the 32768 numbers mean that a value is kept."""
    return round((1 - probability) * LEVELS)


def random_15_bits(shape: Size) -> Tensor:
    """Return int16 numbers from 0 to 32767 of torch's generator."""
    count = shape.numel()
    words = torch.empty(-(-count // 4), dtype=torch.long).random_(-(2**63), None)
    return words.view(torch.int16)[:count].view(shape).bitwise_and_(LEVELS - 1)


def keep_bits(shape: Size, probability: float) -> Tensor:
    """Return int16 numbers whose bits are all one where a value is kept, all zero where it is dropped."""
    return random_15_bits(shape).sub_(kept_levels(probability)).bitwise_right_shift_(15)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float) -> Tensor:
        """Return what is left of ``x``."""
        kept = kept_levels(probability)
        is_dropped = random_15_bits(x.shape) >= kept
        ctx.save_for_backward(is_dropped)
        ctx.scale = LEVELS / kept
        return x.masked_fill(is_dropped, 0.0).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Drop and scale the gradient in the same places."""
        (is_dropped,) = ctx.saved_tensors
        return grads[0].masked_fill(is_dropped, 0.0).mul_(ctx.scale), None


def draw_kept(x: Tensor, number: int, probability: float, training: bool) -> Sequence[Optional[Tensor]]:
    """Draw, on a GPU and at once, which values of some tensors like one are kept, for `AddKept`.

    Args:
        x: any shape.
        number: of tensors.
        probability: of dropping a value.
        training: False: nothing is dropped.

    Returns:
        So many bool tensors of the shape of ``x``; or None, where `dropout` is to be called.
    """
    if not (training and x.is_cuda and 0 < probability < 1):
        return [None] * number
    return torch.empty(number, *x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - probability).unbind()


class AddKept(torch.autograd.Function):
    """A residual plus a branch with dropout, each way in one pass and without a cast, whatever their precisions.

    With `exact` the sum is kept in fp32 beside a copy in the residual's precision, which is what a layer norm reads and
    in which gradients go back from layer to layer: less goes through a GPU's memory, and no sum is of rounded sums.
    """

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        branch: Tensor,
        kept: Optional[Tensor],
        zero: Tensor,
        factor: float,
        exact: Optional[Tensor] = None,
    ) -> Union[Tensor, tuple[Tensor, Tensor]]:
        """Return ``residual + factor * branch`` where ``kept``, and ``residual`` elsewhere; all of one shape.

        Args:
            ctx: autograd's context.
            residual: gets a gradient.
            branch: likewise.
            kept: as `draw_kept` has it; None: all.
            zero: a scalar.
            factor: of the branch.
            exact: the residual in fp32, without a gradient; then the sum is returned in both precisions, too.
        """
        ctx.save_for_backward(kept, zero)
        ctx.factor, ctx.dtype = factor, branch.dtype
        ctx.set_materialize_grads(False)
        with torch.autocast(branch.device.type, enabled=False):  # which would copy the branch
            total = residual if exact is None else exact
            if kept is None:
                total = torch.add(total, branch, alpha=factor)
            else:
                total = torch.addcmul(total, branch, kept, value=factor)
        if exact is None:
            return total
        ctx.mark_non_differentiable(total)
        return total.to(residual.dtype), total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        """Compute the gradients of residual and branch."""
        kept, zero = ctx.saved_tensors
        grad = grads[0]
        if kept is None:
            of_branch = grad.to(ctx.dtype) if ctx.factor == 1 else (grad * ctx.factor).to(ctx.dtype)
        else:
            out = torch.empty_like(grad, dtype=ctx.dtype)
            of_branch = torch.addcmul(zero, grad, kept, value=ctx.factor, out=out)
        return grad, of_branch, None, None, None, None


class DroppedCausalAttention(torch.autograd.Function):
    """``dropout(softmax(query @ key.T / sqrt(D) + causal mask)) @ value``, for training in bf16 on a CPU.

    torch has a fused kernel for a CPU only without dropout; with it, `scaled_dot_product_attention` takes a dozen
    passes over all B x H x T x T weights, future positions included. Here blocks of queries see only the keys up to
    their own end, and each pass writes where the last one read.

    Letters: N sequences times heads, T positions, D dimension of a head, Q queries of a block, K keys up to its end.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, probability: float) -> Tensor:
        """Attend.

        Args:
            ctx: autograd's context.
            query: (…, T, D) bf16.
            key: (…, T, D) bf16.
            value: (…, T, D) bf16.
            probability: of dropping a weight, between 0 and 1.

        Returns:
            (…, T, D) bf16.
        """
        ctx.scale, ctx.keep_scale = query.size(-1) ** -0.5, LEVELS / kept_levels(probability)
        queries, keys, values = (each.reshape(-1, *each.shape[-2:]) for each in (query * ctx.scale, key, value))
        out = torch.empty_like(queries)
        blocks = []
        for start, end in _blocks(queries.size(1)):
            scores = torch.bmm(queries[:, start:end], keys[:, :end].transpose(1, 2))  # (N, Q, K)
            is_later = torch.ones(end - start, end - start, dtype=torch.bool).triu_(1)
            scores[:, :, start:].masked_fill_(is_later, -torch.inf)
            probs = torch.softmax(scores, dim=-1)
            bits = keep_bits(probs.shape, probability)
            out[:, start:end] = torch.bmm(_kept(probs, bits, out=scores), values[:, :end])
            blocks += [probs, bits]
        ctx.save_for_backward(queries, keys, values, *blocks)
        return out.mul_(ctx.keep_scale).view(query.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Compute the gradients of queries, keys and values."""
        queries, keys, values, *blocks = ctx.saved_tensors
        grad = (grads[0] * ctx.keep_scale).reshape(queries.shape)
        grad_queries, grad_keys, grad_values = (torch.zeros_like(each) for each in (queries, keys, values))
        for number, (start, end) in enumerate(_blocks(queries.size(1))):
            probs, bits = blocks[2 * number : 2 * number + 2]
            here = grad[:, start:end]
            grad_values[:, :end] += torch.bmm(_kept(probs, bits).transpose(1, 2), here)
            grad_probs = torch.bmm(here, values[:, :end].transpose(1, 2))
            grad_scores = torch._softmax_backward_data(_kept(grad_probs, bits, out=grad_probs), probs, -1, probs.dtype)
            grad_queries[:, start:end] = torch.bmm(grad_scores, keys[:, :end])
            grad_keys[:, :end] += torch.bmm(grad_scores.transpose(1, 2), queries[:, start:end])
        shape = grads[0].shape
        return grad_queries.mul_(ctx.scale).view(shape), grad_keys.view(shape), grad_values.view(shape), None


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    """Return where blocks of queries start and end; with blocks of 128, 300 gives (0, 128), (128, 256), (256, 300)."""
    for start in range(0, length, BLOCK):
        yield start, min(start + BLOCK, length)


def _kept(values: Tensor, bits: Tensor, out: Optional[Tensor] = None) -> Tensor:
    """Return bf16 values where all bits are one, and zero where they are zero, for less than a product."""
    into = None if out is None else out.view(torch.int16)
    return torch.bitwise_and(values.view(torch.int16), bits, out=into).view(values.dtype)


IncrementalState = dict[str, dict[str, Optional[Tensor]]]
ShortWeights = Optional[tuple[Tensor, Tensor]]


class Residual(NamedTuple):
    """What a layer adds to, where a GPU computes in a short precision.

    Attributes:
        short: (B, T, M), which layer norms read and gradients go through.
        exact: (B, T, M), the same in fp32, without a gradient.
    """

    short: Tensor
    exact: Tensor


class LayerShape(NamedTuple):
    """What all layers of one decoder share: sizes, dropout probabilities, capacity factors, activation.

    The last two are `maximal_update.UpdateFactors`: of what a layer norm gives, and of what is added to the residual.
    """

    model_dim: int
    ffn_dim: int
    num_heads: int
    dropout: float
    attention_dropout: float
    activation_dropout: float
    capacity_factor: float
    eval_capacity_factor: float
    activation: Callable[[Tensor], Tensor]
    feature_factor: float = 1.0
    branch_factor: float = 1.0


class CausalSelfAttention(FairseqIncrementalState, nn.Module):
    """Attend to the present and earlier positions, by PyTorch's fused kernels, with a cache for decoding step by step.

    Sequences must be padded on the right, as fairseq's language modeling data is: then no real position ever sees
    padding, and the kernels need no mask.

    Args:
        model_dim: M.
        num_heads: H; divides M.
        dropout: probability of dropping an attention weight.
    """

    get_incremental_state: Callable  # of FairseqIncrementalState; nn.Module hides their types from mypy
    set_incremental_state: Callable

    def __init__(self, model_dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv_proj = Linear(model_dim, 3 * model_dim)
        self.out_proj = Linear(model_dim, model_dim)
        for weight in self.qkv_proj.weight.data.chunk(3):  # as fairseq's MultiheadAttention initialises them
            nn.init.xavier_uniform_(weight, gain=2**-0.5)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.qkv_proj.bias)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Tensor, incremental_state: Optional[IncrementalState] = None) -> Tensor:
        """Attend.

        Args:
            x: (B, T, M); with a state, the newest position alone (T = 1).
            incremental_state: keys and values of earlier positions, extended in place.

        Returns:
            (B, T, M).
        """
        batch, length, model_dim = x.shape
        qkv = self.qkv_proj(x).view(batch, length, 3, self.num_heads, model_dim // self.num_heads)
        query, key, value = (each.transpose(1, 2) for each in qkv.unbind(2))  # three times (B, H, T, M/H)
        if incremental_state is not None:
            key, value = self._extend_cache(key, value, incremental_state)
        probability = self.dropout if self.training else 0.0
        if incremental_state is None and uses_short_numbers(query, probability):
            out = DroppedCausalAttention.apply(query, key, value, probability)
        else:
            causal = incremental_state is None
            out = F.scaled_dot_product_attention(query, key, value, dropout_p=probability, is_causal=causal)
        return self.out_proj(out.transpose(1, 2).reshape(batch, length, model_dim))

    def _extend_cache(self, key: Tensor, value: Tensor, incremental_state: IncrementalState) -> tuple[Tensor, Tensor]:
        cached = self.get_incremental_state(incremental_state, "attn_state")
        if cached is not None:
            key = torch.cat([cached["key"], key], dim=2)
            value = torch.cat([cached["value"], value], dim=2)
        self.set_incremental_state(incremental_state, "attn_state", {"key": key, "value": value})
        return key, value

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> None:
        """Reorder the cache as beam search reorders its hypotheses; fairseq calls this."""
        cached = self.get_incremental_state(incremental_state, "attn_state")
        if cached is not None:
            reordered = {name: tensor.index_select(0, new_order) for name, tensor in cached.items()}
            self.set_incremental_state(incremental_state, "attn_state", reordered)


class DecoderLayer(nn.Module):
    """Self-attention, then a feed-forward part, each behind a layer norm and beside a residual connection.

    Args:
        shape: sizes and probabilities.
        tree: the gate's choices of a Switch layer, or None for a dense feed-forward part.
    """

    zero: Tensor  # of `AddKept`; a GPU would have to make one for each gradient

    def __init__(self, shape: LayerShape, tree: Optional[GateTree]) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("zero", torch.zeros(1), persistent=False)
        self.self_attn = CausalSelfAttention(shape.model_dim, shape.num_heads, shape.attention_dropout)
        self.self_attn_layer_norm = LayerNorm(shape.model_dim)
        self.final_layer_norm = LayerNorm(shape.model_dim)
        if tree is None:
            self.switch = None
            self.fc1 = _linear(shape.model_dim, shape.ffn_dim)
            self.fc2 = _linear(shape.ffn_dim, shape.model_dim)
        else:
            self.switch = SwitchLayer(
                shape.model_dim,
                shape.ffn_dim,
                tree,
                shape.capacity_factor,
                shape.eval_capacity_factor,
                shape.activation,
                shape.activation_dropout,
            )

    def forward(
        self,
        x: Union[Tensor, Residual],
        padding: Optional[Tensor],
        incremental_state: Optional[IncrementalState] = None,
        kept: Sequence[Optional[Tensor]] = (None, None),
        numbers: Optional[Tensor] = None,
        norms: Sequence[ShortWeights] = (None, None),
    ) -> tuple[Union[Tensor, Residual], Optional[Routing], Optional[SwitchStatistics]]:
        """Apply the layer.

        Args:
            x: (B, T, M).
            padding: (B, T) bool, True where a token is padding, or None without padding.
            incremental_state: cache of the attention.
            kept: which values of the two branches dropout keeps; see `draw_kept`.
            numbers: as in `dispatch_tokens`.
            norms: what `short_weights` has for the two layer norms.

        Returns:
            (B, T, M), and of a Switch layer the routing of the B x T tokens (row by row) and its statistics.
        """
        x, normed = scaled_norm(self.self_attn_layer_norm, x, self.shape.feature_factor, norms[0])
        x = self._add(x, self.self_attn(normed, incremental_state), kept[0])
        x, normed = scaled_norm(self.final_layer_norm, x, self.shape.feature_factor, norms[1])
        routing, statistics = None, None
        if self.switch is None:
            hidden = self.shape.activation(self.fc1(normed))
            branch = self.fc2(dropout(hidden, self.shape.activation_dropout, self.training))
        else:
            flat_padding = None if padding is None else padding.flatten()
            flat, routing, statistics = self.switch(normed.flatten(0, 1), flat_padding, numbers)
            branch = flat.view_as(normed)
        return self._add(x, branch, kept[1]), routing, statistics

    def products(self) -> list[nn.Module]:
        """Return the modules that autocast computes in a short precision: all but layer norms and the gate."""
        return [self.self_attn, *([self.fc1, self.fc2] if self.switch is None else [self.switch.experts])]

    def _add(
        self, residual: Union[Tensor, Residual], branch: Tensor, kept: Optional[Tensor]
    ) -> Union[Tensor, Residual]:
        factor, probability = self.shape.branch_factor, self.shape.dropout
        if kept is None:
            branch = dropout(branch, probability, self.training)
        else:
            factor = factor / (1 - probability)
        if isinstance(residual, Residual):
            return Residual(*AddKept.apply(residual.short, branch, kept, self.zero, factor, residual.exact))
        if kept is None:
            return torch.add(residual, branch, alpha=factor)
        return AddKept.apply(residual, branch, kept, self.zero, factor)


def short_weights(norms: Sequence[nn.LayerNorm], factor: float, x: Tensor) -> Sequence[ShortWeights]:
    """Return weights and biases of layer norms, times the factor, for `ShortNorm`; None where `x` is not computed so.

    All at once: to a GPU each is one more operation.
    """
    dtype = short_dtype(x)
    if dtype is None:
        return [None] * len(norms)
    found = ShortVectors.apply(dtype, factor, *(each for norm in norms for each in (norm.weight, norm.bias)))
    return list(zip(found[::2], found[1::2], strict=True))


def scaled_norm(
    norm: nn.LayerNorm, x: Union[Tensor, Residual], factor: float, short: ShortWeights = None
) -> tuple[Union[Tensor, Residual], Tensor]:
    """Return (…, M) residuals and the factor times their layer norm; the factor goes to its weights, which are few."""
    if isinstance(x, Residual):
        assert short is not None
        residual, x_norm = ShortNorm.apply(x.short, *short, norm.eps)
        return x._replace(short=residual), x_norm
    if factor == 1.0:
        return x, norm(x)
    return x, F.layer_norm(x, norm.normalized_shape, norm.weight * factor, norm.bias * factor, norm.eps)


def _linear(in_features: int, out_features: int) -> Linear:
    linear = Linear(in_features, out_features)
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


class FeatureDecoder(FairseqIncrementalDecoder):
    """A decoder that computes features first, then the output layer, which the criterion leaves out.

    A subclass defines ``extract_features`` and ``output_layer``.
    """

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: Optional[IncrementalState] = None,
        features_only: bool = False,
        is_padded: bool = True,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Predict the next token at every position.

        Args:
            prev_output_tokens: (B, T) int64, padded on the right.
            encoder_out: unused; fairseq passes it to every decoder.
            incremental_state: cache of earlier positions; then only the newest position is computed (T = 1).
            features_only: return the (B, T, M) input of the output layer rather than its (B, T, V) output.
            is_padded: False: no position is padding, so that a GPU need not be asked.
            unused: further arguments of fairseq's generator (``src_lengths``).

        Returns:
            Logits or features, and a dictionary with ``routing`` and ``switch`` (`SwitchStatistics`), one entry for
            each Switch layer; on a GPU perhaps with ``embeddings``, for ``output_factors``.
        """
        features, extra = self.extract_features(prev_output_tokens, encoder_out, incremental_state, is_padded=is_padded)
        return (features if features_only else self.output_layer(features)), extra


class MemberDecoder(FairseqIncrementalDecoder):
    """Several language models behind one decoder.

    fairseq keeps the cache of decoding step by step in one dictionary, under keys that belong to one module each, so
    all members share it; and it reorders the cache by walking over all modules.

    Args:
        dictionary: the vocabulary that all members share.
        members: the models.
    """

    members: Any  # an nn.ModuleList, which hides from mypy that these modules are language models

    def __init__(self, dictionary: Dictionary, members: Sequence[FairseqLanguageModel]) -> None:
        super().__init__(dictionary)
        self.members = nn.ModuleList(members)

    def max_positions(self) -> int:
        """Return the longest sequence that every member can take, in tokens."""
        return min(member.max_positions() for member in self.members)


class SwitchDecoder(FeatureDecoder):
    """A pre-norm Transformer decoder with shared input and output embeddings.

    Args:
        dictionary: the vocabulary.
        shape: sizes and probabilities of the layers.
        trees: for every layer the gate's choices, or None for a dense layer.
        max_positions: longest sequence, in tokens.
        learned_pos: learned positions rather than sinusoidal ones.
        checkpoint_activations: recompute the layers in the backward pass to save memory.
        embed_scale: what embeddings are multiplied with.

    Attributes:
        is_sharded: by ``fully_shard``, which wants no view of a weight among what a model returns.
    """

    is_sharded = False

    def __init__(
        self,
        dictionary: Dictionary,
        shape: LayerShape,
        trees: list[Optional[GateTree]],
        max_positions: int,
        learned_pos: bool = True,
        checkpoint_activations: bool = False,
        embed_scale: float = 1.0,
    ) -> None:
        super().__init__(dictionary)
        self.padding_idx = dictionary.pad()
        self.dropout = shape.dropout
        self.max_target_positions = max_positions
        self.checkpoint_activations = checkpoint_activations
        self.embed_scale = embed_scale
        self.feature_factor = shape.feature_factor
        self.embed_tokens = Embedding(len(dictionary), shape.model_dim, self.padding_idx)
        self.embed_positions = PositionalEmbedding(max_positions, shape.model_dim, self.padding_idx, learned_pos)
        self.layers = nn.ModuleList(DecoderLayer(shape, tree) for tree in trees)
        self.most_experts = max([tree.num_experts for tree in trees if tree is not None], default=0)
        self.layer_norm = LayerNorm(shape.model_dim)
        self.output_projection = nn.Linear(shape.model_dim, len(dictionary), bias=False)
        self.output_projection.weight = self.embed_tokens.weight

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: Optional[IncrementalState] = None,
        is_padded: bool = True,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the (B, T, M) features; arguments as in `FeatureDecoder.forward`."""
        numbers = torch.arange(
            max(prev_output_tokens.numel(), self.most_experts, prev_output_tokens.size(1) + self.padding_idx) + 1,
            device=prev_output_tokens.device,
        )
        extra: dict[str, Any] = {"attn": [None], "routing": [], "switch": []}
        if is_padded or incremental_state is not None or not self._shares_gradients(prev_output_tokens):
            positions = self._positions(prev_output_tokens, incremental_state, is_padded, numbers)
            if incremental_state is not None:
                prev_output_tokens = prev_output_tokens[:, -1:]
            x = self.embed_tokens(prev_output_tokens)
            x = torch.add(positions, x, alpha=self.embed_scale) if x.is_cuda else self.embed_scale * x + positions
        else:
            weights = self.embed_tokens.weight, self.embed_positions.weight
            embedded = TiedEmbedding.apply(prev_output_tokens, *weights, self.padding_idx + 1, self.embed_scale)
            x, extra["embeddings"] = embedded
        x = dropout(x, self.dropout, self.training)
        padding = self._padding(prev_output_tokens) if is_padded else None
        # Once for all layers: to a GPU each is one more operation.
        kept = draw_kept(x, 2 * len(self.layers), self.dropout, self.training)
        norms = short_weights([*self._norms()], self.feature_factor, x)
        x = x if norms[-1] is None else Residual(x.to(norms[-1][0].dtype), x.detach())
        for number, layer in enumerate(self.layers):
            both = slice(2 * number, 2 * number + 2)
            given = (x, padding, incremental_state, kept[both], numbers, norms[both])
            if self.checkpoint_activations and self.training:
                x, routing, statistics = torch.utils.checkpoint.checkpoint(layer, *given, use_reentrant=False)
            else:
                x, routing, statistics = layer(*given)
            if routing is not None:
                extra["routing"].append(routing)
                extra["switch"].append(statistics)
        return scaled_norm(self.layer_norm, x, self.feature_factor, norms[-1])[1], extra

    def _norms(self) -> Iterator[Any]:
        """Yield all layer norms in their order."""
        for layer in self.layers:
            yield from (layer.self_attn_layer_norm, layer.final_layer_norm)
        yield self.layer_norm

    def _shares_gradients(self, tokens: Tensor) -> bool:
        """Return whether `TiedEmbedding` is to be used: its sums are rounded in another order than those of a CPU."""
        is_learned = isinstance(self.embed_positions, nn.Embedding)
        return tokens.is_cuda and is_learned and not self.is_sharded and not torch.compiler.is_compiling()

    def _positions(
        self, tokens: Tensor, incremental_state: Optional[IncrementalState], is_padded: bool, numbers: Tensor
    ) -> Tensor:
        """Return the embeddings of positions, (B, T, M); fairseq counts tokens to find out which are padding."""
        if is_padded or incremental_state is not None or not isinstance(self.embed_positions, nn.Embedding):
            return self.embed_positions(tokens, incremental_state=incremental_state)
        first = self.padding_idx + 1
        places = numbers[first : first + tokens.size(1)].expand_as(tokens)
        return F.embedding(places, self.embed_positions.weight, self.padding_idx)

    def _padding(self, tokens: Tensor) -> Optional[Tensor]:
        """Return where padding is, or None on a CPU, where asking is cheap, if there is none."""
        padding = tokens.eq(self.padding_idx)
        return None if padding.device.type == "cpu" and not padding.any() else padding

    def output_layer(self, features: Tensor, **unused: Any) -> Tensor:
        """Project (…, M) features to (…, V) logits."""
        return self.output_projection(features)

    def max_positions(self) -> int:
        """Return the longest sequence that the positions allow, in tokens."""
        return min(self.max_target_positions, self.embed_positions.max_positions)


class TiedEmbedding(torch.autograd.Function):
    """Embeddings of tokens and positions, and those of all tokens for the output layer, with one gradient on a GPU.

    Autograd makes a gradient of the lookup as large as the whole matrix, and another one for the sum of the two: with a
    vocabulary of 50,000 half a gigabyte a batch goes through memory for four thousand rows. Here the gradient of the
    tokens is added to that of the output layer. P: positions that have an embedding.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, positions: Tensor, first: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Embed tokens, none of which is padding.

        Args:
            ctx: autograd's context.
            tokens: (B, T).
            weight: (V, M), of tokens.
            positions: (P, M), of positions.
            first: the row of the first position.
            scale: what embeddings of tokens are multiplied with.

        Returns:
            (B, T, M), and ``weight``.
        """
        ctx.save_for_backward(tokens)
        ctx.set_materialize_grads(False)
        ctx.sizes, ctx.scale = (weight.shape, positions.shape), scale
        ctx.rows = slice(first, first + tokens.size(1))
        return torch.add(positions[ctx.rows], F.embedding(tokens, weight), alpha=scale), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
        """Compute the gradients of both embeddings."""
        (tokens,) = ctx.saved_tensors
        grad, grad_weight = grads
        assert grad is not None
        of_tokens, of_positions = ctx.sizes
        grad_weight = grad.new_zeros(of_tokens) if grad_weight is None else grad_weight
        grad_positions = grad.new_zeros(of_positions)
        torch.sum(grad, 0, out=grad_positions[ctx.rows])
        grad_weight.index_add_(0, tokens.flatten(), grad.flatten(0, 1), alpha=ctx.scale)
        return None, grad_weight, grad_positions, None, None
