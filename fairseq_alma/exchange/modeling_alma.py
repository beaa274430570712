"""Language models of fairseq_alma for ``transformers``: Switch Transformers, alone, jointly trained, as an ensemble.

This one file is all that a folder of ``alma-export`` needs beside its weights: it imports torch and transformers alone.
``fairseq_alma`` registers the same file, so that with it imported no ``trust_remote_code`` is needed. It computes what
fairseq_alma computes: experts take any number of tokens at test, padding takes no place, the gate is in fp32.

Letters: B sequences, T positions, P positions in the cache, M hidden size, H heads, V vocabulary size, S = B x T
tokens, E experts, F hidden size of an expert, R rows of a gate.
"""

import math
from typing import Any, Callable, NamedTuple, Optional, Sequence, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.utils import logging

logger = logging.get_logger(__name__)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "linear": lambda x: x,
}
EXTRA_POSITIONS = 2  # fairseq numbers positions from behind the padding symbol's number


class AlmaConfig(PretrainedConfig):
    """What an exported model is.

    Args:
        members: sizes of each single model, see `AlmaMember`.
        groups: how their predictions are combined: logits are averaged within a group (models that were trained
            jointly), probabilities over groups (an ensemble). Each has ``members``, their numbers, and ``weight``.
        vocab_size: V.
        max_position_embeddings: longest sequence that every member takes, in tokens.
        router_aux_loss_coef: what the balance loss counts in ``loss``.
        output_router_logits: return ``router_logits`` and ``aux_loss`` without being asked.
        kwargs: as of any configuration.
    """

    model_type = "alma_lm"
    # A list, to which Trainer adds another. What is of no batch's size cannot be gathered over batches.
    keys_to_ignore_at_inference = ["past_key_values", "aux_loss", "router_logits"]  # noqa: RUF012
    _auto_class = "AutoConfig"  # save_pretrained then puts this file beside the weights

    def __init__(
        self,
        members: Optional[Sequence[dict[str, Any]]] = None,
        groups: Optional[Sequence[dict[str, Any]]] = None,
        vocab_size: int = 4,
        max_position_embeddings: int = 512,
        router_aux_loss_coef: float = 0.01,
        output_router_logits: bool = False,
        **kwargs: Any,
    ) -> None:
        self.members = list(members or [])
        self.groups = list(groups or [{"members": list(range(len(self.members))), "weight": 1.0}])
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.router_aux_loss_coef = router_aux_loss_coef
        self.output_router_logits = output_router_logits
        # Of all members together, as the cache has their layers one after the other.
        self.num_hidden_layers = sum(member["num_layers"] for member in self.members)
        self.hidden_size = self.members[0]["hidden_size"] if self.members else 0
        self.num_attention_heads = self.members[0]["num_heads"] if self.members else 1
        self.use_cache = kwargs.pop("use_cache", True)
        for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"):
            kwargs.pop(name, None)
        super().__init__(**{"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2, **kwargs})


class Routing(NamedTuple):
    """A gate's decision for S tokens.

    Attributes:
        expert: (S,) int64, the expert that each token goes to.
        logits: (S, E) fp32 logits whose softmax is the probability of each expert.
        combine_weights: (S,) fp32, the factor on the expert's output, which carries the gate's gradient.
    """

    expert: Tensor
    logits: Tensor
    combine_weights: Tensor


class AlmaGate(nn.Module):
    """A gate (router): a softmax over experts, or a tree of such choices, each taken one after the other.

    Args:
        hidden_size: M.
        gate: ``num_experts``, and for a tree ``choices``, a list of [first row, row behind the last, row above or
            None], and ``row_expert``, the expert that each row leads to, or None where it leads to a further choice.
    """

    def __init__(self, hidden_size: int, gate: dict[str, Any]) -> None:
        super().__init__()
        self.choices: list[list[Any]] = gate.get("choices") or [[0, gate["num_experts"], None]]
        self.row_expert: list[Any] = gate.get("row_expert") or list(range(gate["num_experts"]))
        self.weight = nn.Parameter(torch.empty(len(self.row_expert), hidden_size))

    def forward(self, x: Tensor) -> Routing:
        """Route (S, M) tokens."""
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
        if len(self.choices) == 1 and self.row_expert == sorted(self.row_expert):
            best, expert = F.softmax(logits, dim=-1).max(dim=-1)
            return Routing(expert, logits, best)
        return self._descend(logits)

    def _descend(self, logits: Tensor) -> Routing:
        """The combine weight is the root's probability, times p / stop_gradient(p), numerically 1, of choices below."""
        (start, stop, _), *inner = self.choices
        log_probs = [F.log_softmax(logits[:, start:stop], dim=-1)]
        best, row = log_probs[0].max(dim=-1)
        combine_weights = best.exp()
        for start, stop, parent in inner:
            here = F.log_softmax(logits[:, start:stop], dim=-1)
            best, child = here.max(dim=-1)
            passes = row == parent
            row = torch.where(passes, start + child, row)
            combine_weights = torch.where(passes, combine_weights * (best - best.detach()).exp(), combine_weights)
            log_probs.append(torch.cat(log_probs, dim=-1)[:, parent, None] + here)
        experts = [-1 if expert is None else expert for expert in self.row_expert]
        rows = [experts.index(expert) for expert in range(max(experts) + 1)]
        of_row = torch.tensor(experts, device=logits.device)
        return Routing(of_row[row], torch.cat(log_probs, dim=-1)[:, rows], combine_weights)


class AlmaExperts(nn.Module):
    """The experts of a layer, feed-forward networks of one shape, their weights stacked.

    Args:
        member: sizes, see `AlmaMember`.
        num_experts: E.
    """

    def __init__(self, member: dict[str, Any], num_experts: int) -> None:
        super().__init__()
        hidden, ffn = member["hidden_size"], member["intermediate_size"]
        self.activation = ACTIVATIONS[member["activation"]]
        self.dropout = member["activation_dropout"]
        self.fc1_weight = nn.Parameter(torch.empty(num_experts, ffn, hidden))
        self.fc1_bias = nn.Parameter(torch.empty(num_experts, ffn))
        self.fc2_weight = nn.Parameter(torch.empty(num_experts, hidden, ffn))
        self.fc2_bias = nn.Parameter(torch.empty(num_experts, hidden))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        """Apply to each of (S, M) tokens its expert, (S,) int64; -1: none, the result is zero."""
        out = torch.zeros_like(x)
        for number in expert.unique().tolist():
            if number < 0:
                continue
            rows = (expert == number).nonzero().squeeze(-1)
            hidden = F.linear(x[rows], self.fc1_weight[number], self.fc1_bias[number])
            hidden = F.dropout(self.activation(hidden), self.dropout, self.training)
            result = F.linear(hidden, self.fc2_weight[number], self.fc2_bias[number])
            out = out.index_copy(0, rows, result.to(out.dtype))
        return out


class AlmaSwitch(nn.Module):
    """One expert for each token (Fedus et al. 2021), its output scaled by the gate's probability.

    Args:
        member: sizes, see `AlmaMember`.
        gate: see `AlmaGate`.
    """

    def __init__(self, member: dict[str, Any], gate: dict[str, Any]) -> None:
        super().__init__()
        self.num_experts = gate["num_experts"]
        self.capacity_factors = member["capacity_factor"], member["eval_capacity_factor"]
        self.gate = AlmaGate(member["hidden_size"], gate)
        self.experts = AlmaExperts(member, self.num_experts)

    def forward(self, x: Tensor, is_real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the layer to (S, M) tokens, (S,) bool says which are no padding.

        Returns:
            (S, M) output, (S, E) router logits, and the balance loss: E x sum over experts of (share of tokens) x (mean
            probability), 1 when balanced.
        """
        routing = self.gate(x)
        expert = routing.expert.masked_fill(~is_real, -1)
        balance_loss = self._balance_loss(routing.logits, expert, is_real)
        factor = self.capacity_factors[0 if self.training else 1]
        if factor > 0:
            expert = self._within_capacity(expert, factor)
        weights = routing.combine_weights * (expert >= 0)
        return self.experts(x, expert) * weights.unsqueeze(-1).to(x.dtype), routing.logits, balance_loss

    def _balance_loss(self, logits: Tensor, expert: Tensor, is_real: Tensor) -> Tensor:
        per_token = 1 / is_real.sum().clamp(min=1)
        tokens = F.one_hot(expert + 1, self.num_experts + 1)[:, 1:].sum(dim=0) * per_token
        probs = (F.softmax(logits, dim=-1) * is_real.unsqueeze(-1)).sum(dim=0) * per_token
        return self.num_experts * torch.dot(tokens, probs)

    def _within_capacity(self, expert: Tensor, factor: float) -> Tensor:
        """Take tokens in their order until an expert is full; the others get -1."""
        num_tokens = int((expert >= 0).sum())
        capacity = max(1, math.ceil(round(factor * num_tokens / self.num_experts, 6)))
        chosen = F.one_hot(expert + 1, self.num_experts + 1)
        place = (chosen.cumsum(dim=0) * chosen).sum(dim=-1)  # 1 for the first token of an expert
        return expert.masked_fill(place > capacity, -1)


class AlmaLayer(nn.Module):
    """One pre-norm layer: causal self-attention, then a dense feed-forward network or a Switch layer.

    Args:
        member: sizes, see `AlmaMember`.
        gate: see `AlmaGate`; None: a dense layer.
        index: number in the cache.
    """

    def __init__(self, member: dict[str, Any], gate: Optional[dict[str, Any]], index: int) -> None:
        super().__init__()
        hidden, ffn = member["hidden_size"], member["intermediate_size"]
        self.index = index
        self.num_heads = member["num_heads"]
        self.dropout = member["dropout"]
        self.attention_dropout = member["attention_dropout"]
        self.activation_dropout = member["activation_dropout"]
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv_proj = nn.Linear(hidden, 3 * hidden)
        self.out_proj = nn.Linear(hidden, hidden)
        self.ffn_norm = nn.LayerNorm(hidden)
        self.switch = None if gate is None else AlmaSwitch(member, gate)
        if gate is None:
            self.activation = ACTIVATIONS[member["activation"]]
            self.fc1 = nn.Linear(hidden, ffn)
            self.fc2 = nn.Linear(ffn, hidden)

    def forward(
        self,
        x: Tensor,
        mask: Optional[Tensor],
        is_real: Tensor,
        past_key_values: Optional[Cache] = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
        """Apply the layer.

        Args:
            x: (B, T, M).
            mask: (B, 1, T, P + T) bool, True where to attend; None: to everything before.
            is_real: (B, T) bool, False for padding.
            past_key_values: the cache, extended in place.
            output_attentions: whether attention weights are wanted.

        Returns:
            (B, T, M), of a Switch layer the (S, E) router logits and the balance loss, and (B, H, T, P + T).
        """
        attended, attention = self._attend(self.attention_norm(x), mask, past_key_values, output_attentions)
        x = x + F.dropout(attended, self.dropout, self.training)
        normed = self.ffn_norm(x)
        if self.switch is None:
            hidden = F.dropout(self.activation(self.fc1(normed)), self.activation_dropout, self.training)
            out, logits, balance_loss = self.fc2(hidden), None, None
        else:
            flat, logits, balance_loss = self.switch(normed.flatten(0, 1), is_real.flatten())
            out = flat.view_as(normed)
        return x + F.dropout(out, self.dropout, self.training), logits, balance_loss, attention

    def _attend(
        self, x: Tensor, mask: Optional[Tensor], cache: Optional[Cache], wants_weights: bool
    ) -> tuple[Tensor, Optional[Tensor]]:
        batch, length, hidden = x.shape
        qkv = self.qkv_proj(x).view(batch, length, 3, self.num_heads, hidden // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # three times (B, H, T, M/H)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        dropout = self.attention_dropout if self.training else 0.0
        is_causal = mask is None and length > 1
        weights = None
        if wants_weights:  # the fused function does not have them
            weights = _attention_weights(query, key, mask, is_causal)
            out = F.dropout(weights, dropout, self.training) @ value
        else:
            out = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal)
        return self.out_proj(out.transpose(1, 2).reshape(batch, length, hidden)), weights


def _attention_weights(query: Tensor, key: Tensor, mask: Optional[Tensor], is_causal: bool) -> Tensor:
    """Return (B, H, T, P + T) probabilities, those of `scaled_dot_product_attention`."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.size(-1))
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return F.softmax(scores, dim=-1, dtype=torch.float).to(query.dtype)


class MemberOutput(NamedTuple):
    """What a single model has computed.

    Attributes:
        features: (B, T, M), what is projected to logits.
        router_logits: (S, E) of each Switch layer.
        balance_losses: scalar of each Switch layer.
        states: (B, T, M) outputs of the embeddings and of each layer.
        attentions: (B, H, T, P + T) of each layer, where they are wanted.
    """

    features: Tensor
    router_logits: list[Tensor]
    balance_losses: list[Tensor]
    states: list[Tensor]
    attentions: list[Tensor]


class AlmaMember(nn.Module):
    """A single model: shared input and output embeddings, positions, layers, a last layer norm.

    Args:
        member: its sizes: ``hidden_size``, ``intermediate_size``, ``num_layers``, ``num_heads``, ``activation``,
            ``positions`` (``learned`` or ``sinusoidal``), ``max_positions``, ``scale_embedding``, ``dropout``,
            ``attention_dropout``, ``activation_dropout``, ``capacity_factor``, ``eval_capacity_factor``, and ``gates``:
            for each layer what `AlmaGate` takes, or None for a dense one.
        vocab_size: V.
        padding_idx: id of the padding symbol.
        first_layer: number of its first layer in the cache.
    """

    _gradient_checkpointing_func: Callable[..., Any]  # transformers sets it

    def __init__(self, member: dict[str, Any], vocab_size: int, padding_idx: int, first_layer: int) -> None:
        super().__init__()
        hidden = member["hidden_size"]
        self.gradient_checkpointing = False
        self.dropout = member["dropout"]
        self.max_positions = member["max_positions"]
        self.scale = math.sqrt(hidden) if member["scale_embedding"] else 1.0
        self.embed_tokens = nn.Embedding(vocab_size, hidden, padding_idx)
        is_learned = member["positions"] == "learned"
        self.embed_positions: Optional[nn.Embedding]
        self.embed_positions = nn.Embedding(self.max_positions + EXTRA_POSITIONS, hidden) if is_learned else None
        self.layers = nn.ModuleList(
            AlmaLayer(member, gate, first_layer + index) for index, gate in enumerate(member["gates"])
        )
        self.norm = nn.LayerNorm(hidden)

    def forward(
        self,
        embedded: Tensor,
        positions: Tensor,
        mask: Optional[Tensor],
        is_real: Tensor,
        past_key_values: Optional[Cache],
        output_attentions: bool,
    ) -> MemberOutput:
        """Compute features.

        Args:
            embedded: (B, T, M) embeddings of the tokens.
            positions: (B, T) int64, from 0.
            mask: as `AlmaLayer.forward`.
            is_real: (B, T) bool, False for padding.
            past_key_values: the cache.
            output_attentions: whether attention weights are wanted.
        """
        x = self.scale * embedded + self._positions(positions, embedded)
        x = F.dropout(x, self.dropout, self.training)
        output = MemberOutput(x, [], [], [x], [])
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                found = self._gradient_checkpointing_func(layer, x, mask, is_real, None, output_attentions)
            else:
                found = layer(x, mask, is_real, past_key_values, output_attentions)
            x, logits, balance_loss, attention = found
            output.states.append(x)
            if attention is not None:
                output.attentions.append(attention)
            if logits is not None:
                output.router_logits.append(logits)
                output.balance_losses.append(balance_loss)
        return output._replace(features=self.norm(x))

    def project(self, features: Tensor) -> Tensor:
        """Project (…, M) features to (…, V) logits."""
        return F.linear(features, self.embed_tokens.weight)

    def _positions(self, positions: Tensor, embedded: Tensor) -> Tensor:
        if self.embed_positions is not None:
            return self.embed_positions(positions + EXTRA_POSITIONS)
        half = embedded.size(-1) // 2
        steps = torch.arange(half, dtype=torch.float, device=embedded.device) * -(math.log(10000) / (half - 1))
        angles = (positions + EXTRA_POSITIONS).float().unsqueeze(-1) * steps.exp()
        table = torch.cat([angles.sin(), angles.cos()], dim=-1)
        return F.pad(table, (0, embedded.size(-1) - 2 * half)).to(embedded.dtype)


class LongestSequence(StoppingCriteria):
    """Ends text where the model takes no more.

    Args:
        longest: tokens of a sequence, the prompt's included.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return (B,) bool, whether each sequence is at its end."""
        return input_ids.new_full((len(input_ids),), input_ids.size(1) >= self.longest, dtype=torch.bool)


class AlmaForCausalLM(PreTrainedModel, GenerationMixin):
    """One or several Switch language models behind ``transformers``' interface.

    Args:
        config: what they are.
    """

    config_class = AlmaConfig
    base_model_prefix = "members"
    _auto_class = "AutoModelForCausalLM"
    members: Any  # an nn.ModuleList, which hides from mypy what is in it
    supports_gradient_checkpointing = True
    _no_split_modules = ("AlmaLayer",)
    _supports_sdpa = True

    def __init__(self, config: AlmaConfig) -> None:
        super().__init__(config)
        firsts = [sum(each["num_layers"] for each in config.members[:index]) for index in range(len(config.members))]
        self.members = nn.ModuleList(
            AlmaMember(member, config.vocab_size, config.pad_token_id, first)
            for member, first in zip(config.members, firsts, strict=True)
        )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as fairseq_alma does; weights of a folder are not touched."""
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, AlmaGate):
            nn.init.xavier_uniform_(module.weight)
        elif isinstance(module, AlmaExperts):
            bound = math.sqrt(6 / sum(module.fc1_weight.shape[1:]))  # as xavier for each expert
            for weight, bias in ((module.fc1_weight, module.fc1_bias), (module.fc2_weight, module.fc2_bias)):
                nn.init.uniform_(weight, -bound, bound)
                nn.init.zeros_(bias)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embeddings, which are the output embeddings too; raise ValueError if there are several."""
        if len(self.members) > 1:
            raise ValueError(f"{len(self.members)} models have embeddings each: see model.members[n].embed_tokens")
        return self.members[0].embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embeddings of a single model."""
        self.get_input_embeddings()
        self.members[0].embed_tokens = value

    def get_output_embeddings(self) -> None:
        """Return None: the input embeddings serve."""

    def generate(self, inputs: Optional[Tensor] = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """Write text as ``GenerationMixin.generate`` does, and end it where the model takes no more tokens."""
        longest, first = self.config.max_position_embeddings, inputs
        for name in ("input_ids", "inputs_embeds"):
            first = kwargs.get(name) if first is None else first
        if generation_config is None and kwargs.get("max_new_tokens") is not None:
            # As one number: beside the max_length of generation_config.json it would be warned of.
            kwargs["max_length"] = kwargs.pop("max_new_tokens") + (1 if first is None else first.shape[1])
        if (kwargs.get("max_length") or 0) > longest:
            logger.warning_once(f"the text ends at {longest} tokens, the prompt's included: the model takes no more")
        ends = [*(kwargs.pop("stopping_criteria", None) or ()), LongestSequence(longest)]
        return super().generate(inputs, generation_config, stopping_criteria=StoppingCriteriaList(ends), **kwargs)

    def forward(
        self,
        input_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        position_ids: Optional[Tensor] = None,
        past_key_values: Optional[Cache] = None,
        inputs_embeds: Optional[Tensor] = None,
        labels: Optional[Tensor] = None,
        use_cache: Optional[bool] = None,
        output_router_logits: Optional[bool] = None,
        output_hidden_states: Optional[bool] = None,
        output_attentions: Optional[bool] = None,
        logits_to_keep: Union[int, Tensor] = 0,
        return_dict: Optional[bool] = None,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Predict the next token at every position.

        Args:
            input_ids: (B, T) int64; with a cache, what comes after it.
            attention_mask: (B, P + T), 0 for padding, on either side. Without one, padding is where the padding symbol
                stands.
            position_ids: (B, T) int64, from 0; default: counted along what is no padding.
            past_key_values: the cache; members' layers stand in it one after the other.
            inputs_embeds: (B, T, M) in place of ``input_ids``, of a single model.
            labels: (B, T) int64, the same tokens; -100 does not count. They are shifted here.
            use_cache: return a cache.
            output_router_logits: return the router logits and the balance loss.
            output_hidden_states: return the outputs of the embeddings and all layers, member by member.
            output_attentions: return the attention weights of all layers, (B, H, T, P + T), member by member.
            logits_to_keep: of how many last positions (or which) logits are wanted; 0: all.
            return_dict: False: a tuple.
            kwargs: passed to the loss (``num_items_in_batch``).

        Returns:
            ``logits`` (B, T, V); of an ensemble log-probabilities. ``loss``, in nats per token, with labels, the
            weighted balance loss included where router logits are returned. ``aux_loss``: the sum over
            Switch layers of the balance loss, each 1 when balanced. ``router_logits``: (S, E) fp32 for each Switch
            layer.
        """
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None:
            raise ValueError("input_ids or inputs_embeds is needed")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        # Layers that are computed twice would extend a cache twice.
        use_cache = use_cache and not (self.members[0].gradient_checkpointing and self.training)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        all_real = self._is_real(input_ids, given, attention_mask, past)
        if position_ids is None:
            position_ids = (all_real.cumsum(dim=1) - 1)[:, past:]
        position_ids = position_ids.clamp(min=0)
        self._check_length(all_real.size(1), position_ids)
        mask, wants_attentions = _attention_mask(all_real, given.size(1)), bool(output_attentions)
        inputs = (position_ids, mask, all_real[:, past:], past_key_values, wants_attentions)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        outputs = []
        for member in self.members:
            embedded = member.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            output = member(embedded, *inputs)
            outputs.append(output._replace(features=output.features[:, kept]))
        logits = self._combine([output.features for output in outputs])

        wants_router = self.config.output_router_logits if output_router_logits is None else output_router_logits
        router_logits = tuple(each for output in outputs for each in output.router_logits)
        aux_loss = None
        if wants_router and router_logits:
            aux_loss = torch.stack([each for output in outputs for each in output.balance_losses]).sum()
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        if loss is not None and aux_loss is not None:
            loss = loss + self.config.router_aux_loss_coef * aux_loss
        result = MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=tuple(each for output in outputs for each in output.states) if output_hidden_states else None,
            attentions=tuple(each for output in outputs for each in output.attentions) if wants_attentions else None,
            router_logits=router_logits if wants_router else None,
        )
        return result.to_tuple() if return_dict is False else result

    def _combine(self, features: Sequence[Tensor]) -> Tensor:
        """Average logits within each group, and probabilities over groups."""
        groups = self.config.groups
        log_probs = []
        for group in groups:
            first, *others = group["members"]
            logits = self.members[first].project(features[first])
            for member in others:
                logits = logits + self.members[member].project(features[member])
            logits = logits / len(group["members"]) if others else logits
            if len(groups) == 1:
                return logits
            log_probs.append(F.log_softmax(logits.float(), dim=-1) + math.log(group["weight"]))
        total = log_probs[0]
        for each in log_probs[1:]:
            total = torch.logaddexp(total, each)
        return total

    def _is_real(
        self, input_ids: Optional[Tensor], given: Tensor, attention_mask: Optional[Tensor], past: int
    ) -> Tensor:
        """Return (B, P + T) bool, False where padding is."""
        batch, length = given.shape[:2]
        if attention_mask is None:
            here = given.new_ones(batch, length, dtype=torch.bool)
            if input_ids is not None:
                here = input_ids != self.config.pad_token_id
            return F.pad(here, (past, 0), value=True)
        if attention_mask.shape != (batch, past + length):
            raise ValueError(
                f"attention_mask of shape {tuple(attention_mask.shape)} found, {(batch, past + length)} is needed: "
                "what is in the cache, and the new tokens"
            )
        return attention_mask.bool()

    def _check_length(self, length: int, positions: Tensor) -> None:
        longest = self.config.max_position_embeddings
        if length > longest and int(positions.max()) >= longest:
            raise ValueError(f"a sequence of {length} tokens; the model takes {longest} at most")


def _attention_mask(all_real: Tensor, length: int) -> Optional[Tensor]:
    """Return (B, 1, T, P + T) bool, True where to attend; None where attending to everything before is right.

    That it is where no padding stands before a token: it then makes no difference to any that is real.
    """
    total = all_real.size(1)
    past = total - length
    is_right_padded = bool((all_real[:, 1:] <= all_real[:, :-1]).all())
    if is_right_padded and (past == 0 or (length == 1 and bool(all_real.all()))):
        return None
    causal = torch.ones(length, total, dtype=torch.bool, device=all_real.device).tril(past)
    itself = torch.eye(total, dtype=torch.bool, device=all_real.device)[past:]  # padding must attend to something
    return ((causal & all_real[:, None]) | itself).unsqueeze(1)
