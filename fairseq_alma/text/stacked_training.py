"""Trainings that differ by their seeds, side by side in one process: what fairseq-train does, for several models.

    python -m fairseq_alma.text.stacked_training ARGUMENTS -- ARGUMENTS -- …

takes the arguments of so many calls of fairseq-train and leaves the checkpoints that these leave: each member has its
own task, order of batches, trainer and files, all of them fairseq's. What an update computes is done once, by
`StackedModel`. All members make the same update at the same time, so that learning rates are the same. Checkpoints of
an update are all written before older ones are removed: `common_checkpoints` finds one of all after a kill.
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
from typing import Any, Sequence

import numpy as np
import torch
from fairseq import checkpoint_utils, optim, options, tasks, utils
from fairseq.data.iterators import EpochBatchIterator, GroupedIterator
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.optim import lr_scheduler
from fairseq.trainer import Trainer
from omegaconf import DictConfig
from torch import Tensor

from fairseq_alma.errors import in_one_line
from fairseq_alma.text.fork_server import leave
from fairseq_alma.text.stacked_model import StackedModel, Uneven
from fairseq_alma.text.text_steps import ALONE
from fairseq_alma.training.average import WeightAverage
from fairseq_alma.training.feature import Features
from fairseq_alma.training.timed_saves import TimedSaves

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
