"""Trainings that differ by their seeds, side by side in one process: what fairseq-train does, for several models.

    python -m fairseq_alma.text.stacked_training ARGUMENTS -- ARGUMENTS -- …

takes the arguments of so many calls of fairseq-train and leaves the checkpoints that these leave: each member has its
own task, order of batches, trainer and files, all of them fairseq's. What an update computes is done once, by
`StackedModel`. All members make the same update at the same time, so that learning rates are the same. Checkpoints of
an update are all written before older ones are removed: `common_checkpoints` finds one of all after a kill.

`StackedModel` is several Switch language models of one shape computed as one, on a CPU: a dimension of members before
every weight. A model of some ten thousand parameters keeps a core busy with calling kernels rather than with what they
compute. Members are independent of each other: each has its own weights, tokens, capacity, loss. Each gets the gradient
that it gets alone, up to rounding. Weights are one matrix with a row for each member, so that what treats all weights
alike (norms, the optimizer, an average) is a call.

Letters: N members, B sequences, T positions, S = B x T tokens of a member, M model dim, H heads, D = M / H, E experts,
C places of an expert, F feed-forward dim, V vocabulary size, P parameters of a member.
"""

import json
import logging
import math
import sys
import time
from copy import copy, deepcopy
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Iterator, Mapping, NamedTuple, Optional, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from fairseq import checkpoint_utils, optim, options, tasks, utils
from fairseq.data.iterators import EpochBatchIterator, GroupedIterator
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.optim import lr_scheduler
from fairseq.trainer import Trainer
from omegaconf import DictConfig
from torch import Tensor, nn

from fairseq_alma.errors import in_one_line
from fairseq_alma.moe.dispatch import expert_capacity
from fairseq_alma.moe.gate import Routing
from fairseq_alma.text.decoder import DecoderLayer, SwitchDecoder
from fairseq_alma.text.fork_server import leave
from fairseq_alma.text.model import AlmaSwitchLM, parameter_shapes
from fairseq_alma.text.text_steps import ALONE
from fairseq_alma.training.average import WeightAverage
from fairseq_alma.training.feature import Features
from fairseq_alma.training.saves import TimedSaves

QUERIES = 64
"""Of a block of attention, which sees the keys up to its own end."""
CACHED_SCORES = 2**17
"""Attention scores that are computed at a time: half a MiB stays in a core's cache from one kernel to the next."""
CACHED_LOGITS = 2**18
"""The same of logits."""


class Uneven(Exception):
    """Models, or trainings, that cannot be computed as one; says what differs."""


class StackedLoss(NamedTuple):
    """What one batch of each member gave.

    Attributes:
        nll: (N,) sums over tokens, in nats.
        balance: (N,) sums over Switch layers of the balance loss; 0 without one.
        dropped: (N,) shares of the tokens over capacity, mean over Switch layers; no gradient.
    """

    nll: Tensor
    balance: Tensor
    dropped: Tensor


class StackedModel(nn.Module):
    """The members' weights as rows of one matrix.

    Args:
        models: N models; their weights are read here and by `read`, and written by `write`.

    Attributes:
        members: (N, P) fp32.

    Raises:
        Uneven: the models differ in their shapes.
    """

    def __init__(self, models: Sequence[AlmaSwitchLM]) -> None:
        super().__init__()
        self.models = tuple(models)  # no modules of this one: its parameters are those of all
        self.shapes = parameter_shapes(models[0])
        if any(parameter_shapes(model) != self.shapes for model in models):
            raise Uneven("their sizes differ")
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.members = nn.Parameter(torch.stack([self.row(dict(model.named_parameters())) for model in models]))

    def row(self, of_member: Mapping[str, Tensor]) -> Tensor:
        """Return tensors of a member, by the names of its parameters, as a row: (P,)."""
        return torch.cat([of_member[name].detach().float().flatten() for name in self.shapes])

    def of_row(self, row: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a row, each with memory of its own."""
        pieces = zip(self.shapes.items(), row.detach().split(self.sizes), strict=True)
        return {name: piece.view(shape).clone() for (name, shape), piece in pieces}

    def write(self) -> None:
        """Give every model its weights."""
        for model, row in zip(self.models, self.members, strict=True):
            pieces = self.of_row(row)
            for name, parameter in model.named_parameters():
                parameter.data.copy_(pieces[name])

    def forward(self, tokens: Tensor, target: Tensor) -> StackedLoss:
        """Compute the loss of a batch of each member.

        Args:
            tokens: (N, B, T) int64, padded on the right, and by whole sequences where a member has fewer.
            target: (N, B, T) int64.
        """
        decoder = self.models[0].decoder
        pieces = zip(self.shapes.items(), self.members.split(self.sizes, dim=1), strict=True)
        weights = {name.removeprefix("decoder."): piece.view(-1, *shape) for (name, shape), piece in pieces}
        padding = tokens.eq(decoder.padding_idx).flatten(1)
        real = None if not padding.any() else ~padding
        x = _embed(tokens, weights, decoder)
        balance, dropped = x.new_zeros(len(x)), x.new_zeros(len(x))
        for number, layer in enumerate(decoder.layers):
            own = dict(_below(weights, f"layers.{number}."))
            shape = layer.shape
            normal = _norm(x, own, "self_attn_layer_norm", shape.feature_factor)
            x = torch.add(x, _attend(normal, own, layer, tokens.size(2)), alpha=shape.branch_factor)
            residual, x = x, _norm(x, own, "final_layer_norm", shape.feature_factor)
            if layer.switch is None:
                x = _linear(shape.activation(_linear(x, own, "fc1")), own, "fc2")
            else:
                layers = [model.decoder.layers[number] for model in self.models]
                x, of_layer, lost = _switch(x, own, layers, real)
                balance, dropped = balance + of_layer, dropped + lost
            x = torch.add(residual, x, alpha=shape.branch_factor)
        features = _norm(x, weights, "layer_norm", decoder.feature_factor)
        nll = StackedCrossEntropy.apply(
            features, weights["embed_tokens.weight"], target.flatten(1), decoder.padding_idx
        )
        return StackedLoss(nll, balance, dropped)


def _below(weights: Mapping[str, Tensor], prefix: str) -> Iterator[tuple[str, Tensor]]:
    return ((name.removeprefix(prefix), each) for name, each in weights.items() if name.startswith(prefix))


def _embed(tokens: Tensor, weights: Mapping[str, Tensor], decoder: SwitchDecoder) -> Tensor:
    """Return (N, S, M) features of (N, B, T) tokens; no gradient reaches those of padding."""
    members, _, length = tokens.shape
    table = weights["embed_tokens.weight"]
    first_rows = torch.arange(members).view(-1, 1, 1) * table.size(1)
    x = F.embedding(tokens + first_rows, table.reshape(-1, table.size(2)))  # (N, B, T, M)
    first = decoder.padding_idx + 1  # fairseq's first position
    positions = weights["embed_positions.weight"][:, first : first + length]
    return (decoder.embed_scale * x + positions.unsqueeze(1)).flatten(1, 2)


def _linear(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    return torch.baddbmm(weights[f"{name}.bias"].unsqueeze(1), x, weights[f"{name}.weight"].transpose(1, 2))


def _norm(x: Tensor, weights: Mapping[str, Tensor], name: str, factor: float) -> Tensor:
    weight, bias = (factor * weights[f"{name}.{each}"].unsqueeze(1) for each in ("weight", "bias"))
    return torch.addcmul(bias, F.layer_norm(x, x.shape[-1:]), weight)


def _attend(x: Tensor, weights: Mapping[str, Tensor], layer: DecoderLayer, length: int) -> Tensor:
    """Return (N, S, M): causal self-attention within sequences of T positions."""
    heads = layer.shape.num_heads
    qkv = _linear(x, weights, "self_attn.qkv_proj").view(-1, length, 3, heads, x.size(2) // heads)
    query, key, value = qkv.permute(2, 0, 3, 4, 1).flatten(1, 2)  # three times (N x B x H, D, T)
    out = StackedAttention.apply(query, key, value).view(-1, heads, x.size(2) // heads, length)
    return _linear(out.permute(0, 3, 1, 2).reshape(x.shape), weights, "self_attn.out_proj")


def _switch(
    x: Tensor, weights: Mapping[str, Tensor], layers: Sequence[DecoderLayer], real: Optional[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply a Switch layer of each member, as `moe.switch_layer.SwitchLayer` does.

    Args:
        x: (N, S, M) tokens, in the order in which they take their experts' places.
        weights: of the layer.
        layers: of every member, for the gates' trees and the capacity factor.
        real: (N, S) bool, False for padding; None: there is none.

    Returns:
        The (N, S, M) output, the (N,) balance losses, and the (N,) shares of tokens over capacity.
    """
    members, _, dim = x.shape
    expert, probs, combine_weights = _route(x, weights["switch.gate.weight"], layers)
    num_experts = probs.size(2)
    chosen = F.one_hot(expert, num_experts)  # (N, S, E)
    chosen = chosen if real is None else chosen * real.unsqueeze(2)
    counts = chosen.sum(1)  # (N, E)
    num_tokens = counts.sum(1)
    factor = layers[0].shape.capacity_factor
    capacity = [
        expert_capacity(number, num_experts, factor) if factor > 0 else most
        for number, most in zip(num_tokens.tolist(), counts.amax(1).tolist(), strict=True)
    ]
    rank = chosen.cumsum(1).gather(2, expert.unsqueeze(2)).squeeze(2) - 1
    is_taken = rank < torch.tensor(capacity).unsqueeze(1)
    is_taken = is_taken if real is None else is_taken & real
    tokens = is_taken.flatten().nonzero().squeeze(1)
    places = max(1, *capacity)
    first_places = (expert + num_experts * torch.arange(members).unsqueeze(1)) * places
    slots = (first_places + rank).flatten()[tokens]
    rows = x.new_zeros(members * num_experts * places, dim).index_copy(0, slots, x.flatten(0, 1)[tokens])
    maps = {name: each.flatten(0, 1) for name, each in weights.items() if name.startswith("switch.experts.")}
    hidden = layers[0].shape.activation(_experts(rows.view(-1, places, dim), maps, "fc1"))
    taken = _experts(hidden, maps, "fc2").flatten(0, 1)[slots] * combine_weights.flatten()[tokens].unsqueeze(1)
    out = torch.zeros_like(x.flatten(0, 1)).index_copy(0, tokens, taken).view_as(x)
    probs = probs if real is None else probs * real.unsqueeze(2)
    per_token = (1.0 / num_tokens.clamp(min=1)).unsqueeze(1)
    balance = num_experts * ((counts * per_token) * (probs.sum(1) * per_token)).sum(1)
    return out, balance, 1 - is_taken.sum(1) * per_token.squeeze(1)


def _route(x: Tensor, weight: Tensor, layers: Sequence[DecoderLayer]) -> Routing:
    """Route (N, S, M) tokens; what is returned has a dimension of members first."""
    logits = torch.bmm(x, weight.transpose(1, 2))
    gates = [layer.switch.gate for layer in layers if layer.switch is not None]
    if all(gate.tree.is_flat for gate in gates):
        probs = F.softmax(logits, dim=-1)
        best, expert = probs.max(dim=-1)
        return Routing(expert, probs, best)
    routings = [gate._descend(of_member) for gate, of_member in zip(gates, logits, strict=True)]
    return Routing(*(torch.stack(each) for each in zip(*routings, strict=True)))


def _experts(rows: Tensor, maps: Mapping[str, Tensor], name: str) -> Tensor:
    """Apply one map of each of N x E experts to its (N x E, C, …) rows."""
    weight, bias = maps[f"switch.experts.{name}_weight"], maps[f"switch.experts.{name}_bias"]
    return torch.baddbmm(bias.unsqueeze(1), rows, weight.transpose(1, 2))


class StackedAttention(torch.autograd.Function):
    """``softmax(query.T @ key / sqrt(D) + causal mask) @ value.T`` of many small heads, in blocks that fit a cache.

    Twice as fast as torch's fused kernel where D is 8. Scores have keys in rows and queries in columns: products of
    matrices with eight rows are faster than those with eight columns.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend.

        Args:
            ctx: autograd's context.
            query: (N x B x H, D, T).
            key: the same.
            value: the same.

        Returns:
            The same.
        """
        query = query * query.size(1) ** -0.5
        out = torch.empty_like(query)
        later = torch.full((QUERIES, QUERIES), -torch.inf).tril_(-1)
        probs = []
        for heads, queries, keys in _blocks(query):
            scores = torch.bmm(key[heads, :, keys].transpose(1, 2), query[heads, :, queries])
            scores[:, queries.start :] += later[: scores.size(2), : scores.size(2)]
            probs.append(torch.softmax(scores, dim=1))
            out[heads, :, queries] = torch.bmm(value[heads, :, keys], probs[-1])
        ctx.save_for_backward(query, key, value, *probs)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of queries, keys and values."""
        query, key, value, *probs = ctx.saved_tensors
        (grad,) = grads
        grad_query = torch.empty_like(query)
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        for (heads, queries, keys), prob in zip(_blocks(query), probs, strict=True):
            here = grad[heads, :, queries]
            grad_value[heads, :, keys] += torch.bmm(here, prob.transpose(1, 2))
            grad_prob = torch.bmm(value[heads, :, keys].transpose(1, 2), here)
            grad_scores = torch._softmax_backward_data(grad_prob, prob, 1, prob.dtype)
            grad_query[heads, :, queries] = torch.bmm(key[heads, :, keys], grad_scores)
            grad_key[heads, :, keys] += torch.bmm(query[heads, :, queries], grad_scores.transpose(1, 2))
        return grad_query.mul_(query.size(1) ** -0.5), grad_key, grad_value


def _blocks(query: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Return which heads, which of their queries, and the keys that these may see."""
    length = query.size(2)
    size = max(1, CACHED_SCORES // (length * QUERIES))
    for first in range(0, len(query), size):
        for start in range(0, length, QUERIES):
            end = min(start + QUERIES, length)
            yield slice(first, first + size), slice(start, end), slice(0, end)


class StackedCrossEntropy(torch.autograd.Function):
    """As `linear_cross_entropy.LinearCrossEntropy`, of each member."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
        """Compute sums over tokens, and the gradients.

        Args:
            ctx: autograd's context.
            features: (N, S, M).
            weight: (N, V, M).
            target: (N, S) int64.
            ignore_index: target value of tokens that do not count.

        Returns:
            (N,), in nats.
        """
        totals = features.new_zeros(len(features))
        grad_features, grad_weight = torch.empty_like(features), weight.new_zeros(weight.transpose(1, 2).shape)
        is_ignored = target.eq(ignore_index)
        has_ignored = bool(is_ignored.any())
        size = max(1, CACHED_LOGITS // weight.size(1))
        for member in range(len(features)):
            for start in range(0, features.size(1), size):
                part = slice(start, start + size)
                rows, wanted = features[member, part], target[member, part].unsqueeze(1)
                logits = torch.mm(rows, weight[member].t())
                right = logits.gather(1, wanted)
                largest = logits.amax(dim=1, keepdim=True)
                probs = torch.softmax(logits, dim=1)
                # log of the sum of exponentials: the largest logit less the logarithm of its probability
                losses = largest - probs.amax(dim=1, keepdim=True).log() - right
                grad = probs.scatter_add_(1, wanted, wanted.new_full(wanted.shape, -1, dtype=probs.dtype))
                if has_ignored:
                    losses = losses.masked_fill_(is_ignored[member, part, None], 0.0)
                    grad = grad.masked_fill_(is_ignored[member, part, None], 0.0)
                totals[member] += losses.sum()
                torch.mm(grad, weight[member], out=grad_features[member, part])
                grad_weight[member].addmm_(rows.t(), grad)
        ctx.save_for_backward(grad_features, grad_weight)
        return totals

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Scale the gradients that forward has computed."""
        grad_features, grad_weight = ctx.saved_tensors
        scale = grads[0].view(-1, 1, 1)
        return grad_features * scale, (grad_weight * scale).transpose(1, 2), None, None


logger = logging.getLogger("train_inner")


class Member:
    """One training: fairseq's objects, as its own command makes them.

    Args:
        cfg: of the command.

    Attributes:
        trainer: keeps weights and optimizer state in the form in which checkpoints have them.
        batches: of all epochs, in the order of this seed.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        utils.import_user_module(cfg.common)
        np.random.seed(cfg.common.seed)
        utils.set_torch_seed(cfg.common.seed)
        checkpoint_utils.verify_checkpoint_directory(cfg.checkpoint.save_dir)
        task = tasks.setup_task(cfg.task)
        model, criterion = task.build_model(cfg.model), task.build_criterion(cfg.criterion)
        self.trainer = Trainer(cfg, task, model, criterion)
        _, self.batches = checkpoint_utils.load_checkpoint(cfg.checkpoint, self.trainer)
        self.model: Any = self.trainer.get_model()
        self.features: Features = task.features

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """State of the optimizer, by parameter."""
        return self.trainer.optimizer.optimizer.state

    def save(self, num_updates: int, is_due: bool) -> None:
        """Write a checkpoint as fairseq-train does; older ones stay. By the clock too it has its update's name."""
        self.trainer.set_num_updates(num_updates)
        how = copy(self.cfg.checkpoint)
        how.keep_interval_updates = -1
        if is_due:
            how.save_interval_updates = num_updates
        checkpoint_utils.save_checkpoint(how, self.trainer, self.batches, None)

    def remove_older(self) -> None:
        """Remove checkpoints of updates, but for the newest, unless all are kept."""
        keep = self.cfg.checkpoint.keep_interval_updates
        paths = checkpoint_utils.checkpoint_paths(self.cfg.checkpoint.save_dir, pattern=r"checkpoint_\d+_(\d+)\.pt")
        for path in paths[keep:] if keep > 0 else ():
            Path(path).unlink()


class StackedTraining:
    """The trainings of all members.

    Args:
        members: that begin, or resume, at the same update.

    Raises:
        Uneven: they cannot be computed as one.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members, self.cfg = members, members[0].cfg
        self.stack = StackedModel([member.model for member in members])
        self.num_updates = _the_same("updates", [member.trainer.get_num_updates() for member in members])
        _the_same("batches of an epoch", [len(member.batches) for member in members])
        self.optimizer = optim.build_optimizer(self.cfg.optimizer, [self.stack.members])
        self.schedule = lr_scheduler.build_lr_scheduler(self.cfg.lr_scheduler, self.optimizer)
        self.schedule.load_state_dict(members[0].trainer.lr_scheduler.state_dict())
        features = members[0].features
        self.features = Features([replace(each) for each in features.each], features.setting)
        self.average = self.features[WeightAverage]
        self._read()
        self.loss_weight = members[0].model.balance_loss_weight
        self.log = IntervalLog(self)

    def run(self) -> None:
        """Train to the end."""
        self._step_schedules(self.batches.epoch)
        while self.batches.next_epoch_idx <= (self.cfg.optimization.max_epoch or math.inf):
            if self._run_epoch():
                return
            self._step_schedules(self.batches.epoch)
            for member in self.members:
                member.batches = member.trainer.get_train_iterator(member.batches.next_epoch_idx, load_dataset=False)

    @property
    def batches(self) -> EpochBatchIterator:
        """The batches of the first member, which tells the epoch of all."""
        return self.members[0].batches

    def _step_schedules(self, epoch: int) -> None:
        for member in self.members:
            member.trainer.lr_step(epoch)
        self.schedule.step(epoch, None)
        self.schedule.step_update(self.num_updates)

    def _run_epoch(self) -> bool:
        """Make the updates of an epoch, or what is left of them; return whether the training is over."""
        shuffle = self.batches.next_epoch_idx > self.cfg.dataset.curriculum
        each = [member.batches.next_epoch_itr(shuffle=shuffle) for member in self.members]
        frequencies, epoch = self.cfg.optimization.update_freq, self.batches.epoch
        together = frequencies[min(epoch, len(frequencies)) - 1]
        groups = [GroupedIterator(each_member, together) for each_member in each]
        for member in self.members:
            member.trainer.begin_epoch(epoch)
        self.schedule.step_begin_epoch(epoch)
        self.schedule.step_update(self.num_updates)  # the call above left the peak rate; fairseq's Trainer does so too
        max_update = self.cfg.optimization.max_update or math.inf
        for samples in zip(*groups, strict=True):
            self._update(samples)
            is_over = self.num_updates >= max_update
            ends = not groups[0].has_next()
            if is_over or self._saves(ends):
                self._save()
            if is_over:
                return True
        return False

    def _saves(self, ends_epoch: bool) -> bool:
        how = self.cfg.checkpoint
        every = how.save_interval_updates
        return (
            (ends_epoch and self.batches.epoch % how.save_interval == 0)
            or (every > 0 and self.num_updates % every == 0)
            or self.features[TimedSaves].is_due
        )

    def _update(self, samples: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Make one update of all members, of as many batches of each as fairseq's update has."""
        self.stack.members.grad = None
        sizes = torch.zeros(len(samples))
        for batches in zip(*samples, strict=True):
            tokens, target = _padded(batches, self.stack.models[0].decoder.padding_idx)
            loss = self.stack(tokens, target)
            num_tokens = torch.tensor([float(batch["ntokens"]) for batch in batches])
            (loss.nll + self.loss_weight * loss.balance * num_tokens).sum().backward()
            sizes += num_tokens
            self.log.add(loss, num_tokens)
            for member, batch in zip(self.members, batches, strict=True):
                member.features.count([batch])
        norms = self._scale(sizes)
        self.features.before_step(self.optimizer, self.num_updates)
        self.optimizer.step()
        self.features.after_step(self.stack, self.num_updates)
        self.num_updates += 1
        self.schedule.step_update(self.num_updates)
        self.log.end_update(norms)

    def _scale(self, sizes: Tensor) -> Tensor:
        """Divide every member's gradient by its tokens and clip it; return the norms."""
        grad = self.stack.members.grad
        assert grad is not None
        grad.mul_((1.0 / sizes).unsqueeze(1))
        norms = torch.linalg.vector_norm(grad, dim=1)
        if not torch.isfinite(norms).all():
            raise FloatingPointError("gradients are Nan/Inf")
        if self.cfg.optimization.clip_norm > 0:
            grad.mul_((self.cfg.optimization.clip_norm / (norms + 1e-6)).clamp_(max=1).unsqueeze(1))
        return norms

    def _read(self) -> None:
        """Take over optimizer state and averages of the members."""
        states = [_rows(self.stack, member) for member in self.members]
        if any(states):
            _the_same("optimizer state", [sorted(state) for state in states])
            self.optimizer.optimizer.state[self.stack.members] = {
                name: torch.stack([state[name] for state in states])
                if first.dim()
                else _the_same(name, [state[name] for state in states]).to(first)
                for name, first in states[0].items()
            }
            if not isinstance(next(iter(self.members[0].state.values()))["step"], Tensor):  # of fairseq's Adam
                state = self.optimizer.optimizer.state[self.stack.members]
                state["step"] = int(state["step"])
        averages = [member.features[WeightAverage].average for member in self.members]
        if all(average is not None for average in averages):
            self.average.average = {"members": torch.stack([self.stack.row(each) for each in averages if each])}

    def _write(self) -> None:
        """Give the members what is theirs, in the form in which checkpoints have it."""
        self.stack.write()
        state = self.optimizer.optimizer.state.get(self.stack.members, {})
        for number, member in enumerate(self.members):
            own = {
                name: self.stack.of_row(each[number]) if isinstance(each, Tensor) and each.dim() else each
                for name, each in state.items()
            }
            for name, parameter in member.model.named_parameters():
                member.state[parameter] = {
                    key: each[name] if isinstance(each, dict) else deepcopy(each) for key, each in own.items()
                }
            if self.average.average is not None:
                member.features[WeightAverage].average = self.stack.of_row(self.average.average["members"][number])

    def _save(self) -> None:
        self._write()
        for member in self.members:
            member.save(self.num_updates, self.features[TimedSaves].is_due)
        for member in self.members:
            member.remove_older()


class IntervalLog:
    """Writes what members learn to the log, as fairseq's line of JSON, means over members.

    Args:
        training: whose log it is.
    """

    def __init__(self, training: StackedTraining) -> None:
        self.training = training
        self.every = training.cfg.common.log_interval
        self._begin()

    def _begin(self) -> None:
        self.since, self.updates = time.monotonic(), 0
        self.sums: list[Tensor] = []

    def add(self, loss: Any, num_tokens: Tensor) -> None:
        """Add a batch of each member."""
        of_batch = [loss.nll.detach(), loss.balance.detach() * num_tokens, loss.dropped * num_tokens, num_tokens]
        self.sums.append(torch.stack(of_batch))

    def end_update(self, norms: Tensor) -> None:
        """Write a line after every ``--log-interval`` updates."""
        training = self.training
        self.updates += 1
        if training.num_updates % self.every:
            return
        nll, balance, dropped, tokens = torch.stack(self.sums).double().sum(0)
        seconds = max(time.monotonic() - self.since, 1e-9)
        bits = nll / tokens / math.log(2)
        batches = training.batches
        line = {
            "epoch": batches.epoch,
            "update": round(batches.epoch - 1 + batches.iterations_in_epoch / max(1, len(batches)), 3),
            "nll_loss": f"{bits.mean().item():.3f}",
            "members": [round(each, 3) for each in bits.tolist()],
            "balance_loss": round((balance / tokens).mean().item(), 4),
            "dropped": round((dropped / tokens).mean().item(), 4),
            "gnorm": [round(each, 3) for each in norms.tolist()],
            "wps": f"{tokens.sum().item() / seconds:.1f}",
            "ups": f"{self.updates / seconds:.2f}",
            "num_updates": str(training.num_updates),
            "lr": f"{training.optimizer.get_lr():.6g}",
        }
        logger.info(json.dumps(line))
        self._begin()


def _padded(batches: Sequence[dict[str, Any]], pad: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of one batch of each member, (N, B, T); where a member has fewer, padding."""
    tokens = [batch["net_input"]["src_tokens"] for batch in batches]
    targets = [batch["target"] for batch in batches]
    if len({each.shape for each in tokens}) > 1:
        shape = [max(each.size(dim) for each in tokens) for dim in (0, 1)]
        tokens, targets = ([_grown(each, shape, pad) for each in of_members] for of_members in (tokens, targets))
    return torch.stack(tokens), torch.stack(targets)


def _grown(tokens: Tensor, shape: Sequence[int], pad: int) -> Tensor:
    out = tokens.new_full(shape, pad)
    out[: tokens.size(0), : tokens.size(1)] = tokens
    return out


def _rows(stack: StackedModel, member: Member) -> dict[str, Tensor]:
    """Return a member's optimizer state, its moments as rows; empty before the first update."""
    states = {name: member.state.get(parameter) or {} for name, parameter in member.model.named_parameters()}
    found: dict[str, Tensor] = {}
    for name in next(iter(states.values())):
        each = {parameter: torch.as_tensor(state[name]) for parameter, state in states.items()}
        first = next(iter(each.values()))
        found[name] = stack.row(each) if first.dim() else _the_same(name, list(each.values()))
    return found


def _the_same(what: str, values: Sequence[Any]) -> Any:
    """Return what is the same for all. Raises Uneven if it is not."""
    if len(list(groupby(values))) > 1:
        raise Uneven(f"their {what} differ")
    return values[0]


def configuration(words: Sequence[str]) -> DictConfig:
    """Return the configuration of a call of fairseq-train."""
    arguments = options.parse_args_and_arch(options.get_training_parser(), input_args=list(words))
    return convert_namespace_to_omegaconf(arguments)


@in_one_line()
def train_side_by_side(calls: Sequence[Sequence[str]]) -> None:
    """Do what calls of fairseq-train do, of which each element has the arguments.

    Raises:
        Uneven: the models cannot be computed as one; nothing was trained.
    """
    metrics.reset()
    StackedTraining([Member(configuration(call)) for call in calls]).run()


def main() -> int:
    """Train the members that the command line describes."""
    logging.basicConfig(
        format="%(asctime)s | %(levelname)s | %(name)s | %(message)s", level=logging.INFO, stream=sys.stdout, force=True
    )
    try:
        train_side_by_side([list(call) for is_between, call in groupby(sys.argv[1:], "--".__eq__) if not is_between])
    except Uneven as error:
        print(f"{ALONE}{error}")
    return 0


if __name__ == "__main__":
    leave(SystemExit(main()))
