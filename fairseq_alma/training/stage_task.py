"""What the tasks for text and for images have in common: a training's features, and tests of whole splits."""

import argparse
import os
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Callable, ClassVar, Optional

import torch
import torch.distributed as dist
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import utils as distributed_utils
from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY, FairseqTask
from hydra.core.config_store import ConfigStore
from omegaconf import II, DictConfig
from torch import Tensor, nn

from fairseq_alma.checkpoints.model_options import Beginning, starting_checkpoint
from fairseq_alma.learners.learner import StageOptions
from fairseq_alma.training.fairseq_options import bound_options, fairseq_config
from fairseq_alma.training.feature import FEATURES, Features, Setting, import_from
from fairseq_alma.training.processes import set_process_defaults, world_size

GATHERED_BYTES = 2**20
"""Of each process; fairseq's own limit (``--all-gather-list-size``) is below that."""


class WholeSplit:
    """What a task does with a split that it tests: all of it counts, whatever the number of processes.

    ``fairseq-eval-lm`` gives each process a share and prints what the first found on its own; here every process scores
    all of it, so the first prints what one process would, to the last digit. ``fairseq-validate`` shares the work: it
    gathers the logs of all batches of all processes, which must be small, and are made so here.

    Args:
        is_test: whether the command tests a checkpoint rather than trains.
    """

    def __init__(self, is_test: bool) -> None:
        self.is_test = is_test
        self.log_so_far: Optional[dict[str, Any]] = None

    def score(
        self, step: Callable[[], tuple[Any, int, dict[str, Any]]], sample: Any
    ) -> tuple[Any, int, dict[str, Any]]:
        """Compute the loss of one batch.

        In ``fairseq-validate`` with several processes a log takes over the sums of the one before and leaves it empty.

        Args:
            step: fairseq's.
            sample: the batch.
        """
        if not self.is_test or world_size() == 1:
            return step()
        # A process with a batch less than the others gets an empty one.
        loss, size, log = step() if sample else (0.0, 0, {})
        log = {key: value.item() if isinstance(value, Tensor) else value for key, value in log.items()}
        before = self.log_so_far or {}
        self.log_so_far = {key: before.get(key, 0) + log.get(key, 0) for key in {**before, **log}}
        before.clear()
        _make_room_for_logs()
        return loss, size, self.log_so_far

    def gathered(self, logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the logs of all processes but for empty ones; fairseq asks once for each split that it tests."""
        self.log_so_far = None
        return [log for log in logs if log]


def whole_share() -> dict[str, int]:
    """Return the arguments by which fairseq-eval-lm's iterator is over all batches where there are several processes.

    One process alone has the share that ``--num-shards`` asks for.
    """
    return {"num_shards": 1, "shard_id": 0} if world_size() > 1 else {}


def _make_room_for_logs() -> None:
    """Allocate the buffers of fairseq's ``all_gather_list`` on a CPU, where it does not."""
    gather = distributed_utils.all_gather_list
    if dist.get_backend() == "gloo" and not hasattr(gather, "_buffer"):
        gather._buffer = torch.zeros(GATHERED_BYTES * world_size(), dtype=torch.uint8)
        gather._cpu_buffer = torch.zeros(GATHERED_BYTES, dtype=torch.uint8)


@dataclass
class CommandConfig(Beginning, FairseqDataclass):
    """What both tasks are told: their own code's features, and what the command was told elsewhere."""

    features_from: Optional[str] = field(
        default=None, metadata={"help": "a folder or file of Python that registers further features of a training"}
    )
    # Not options: what the command was told elsewhere, so that a bad checkpoint gets one line before it is loaded, and
    # ensembles look for their members beside the one that is tested.
    path: Optional[str] = II("common_eval.path")
    continue_once: Optional[str] = II("checkpoint.continue_once")
    cpu: bool = II("common.cpu")
    save_dir: str = II("checkpoint.save_dir")


class StageTask(FairseqTask):
    """A task that trains on one stage of a stream; before a task of fairseq's among the bases.

    Attributes:
        kind: of data.
        stream_config: the base of its configuration, to which the options of stages and features are added.
        features: what the training does beside learning.
        whole_split: how a split is tested by several processes.
    """

    kind: ClassVar[str]
    stream_config: ClassVar[type]
    features: Features
    whole_split: WholeSplit

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add the task's options to those of a stock command, and preset some of the latter."""
        if isinstance(parser, argparse.ArgumentParser):  # not so when fairseq lists the options of all tasks
            set_process_defaults(parser)
            cls._offer_further_features()
        super().add_args(parser)
        bound_options(parser)

    @classmethod
    def _offer_further_features(cls) -> None:
        """Let fairseq's parser know the options of the features that ``--features-from`` brings."""
        command = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        command.add_argument("--features-from", type=Path)
        if (path := command.parse_known_args()[0].features_from) is None:
            return
        import_from(path)
        task = next(name for name, each in TASK_REGISTRY.items() if each is cls)
        config = fairseq_config(
            TASK_DATACLASS_REGISTRY[task].__name__, cls.stream_config, [StageOptions, *FEATURES], cls.kind
        )
        config.__module__ = cls.__module__
        setattr(sys.modules[cls.__module__], config.__name__, config)
        setattr(cls, "__dataclass", config)  # as `register_task`, which takes a name once
        TASK_DATACLASS_REGISTRY[task] = config
        node = config()
        node._name = task
        ConfigStore.instance().store(name=task, group="task", node=node, provider="fairseq")

    @staticmethod
    def find_start(told: Any) -> tuple[Optional[str], bool]:
        """Return the checkpoint that the training starts from, if any, and whether it resumes there.

        Args:
            told: see `CommandConfig`; where a task of fairseq's keeps it differs.
        """
        last = os.path.join(told.save_dir, told.restore_file)
        if os.path.isfile(last):
            return last, True
        return starting_checkpoint(told, told.continue_once), False

    def train_step(self, sample: Any, model: nn.Module, criterion: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute loss and gradients of one batch; fairseq calls this."""
        return super().train_step(sample, model, self.features.around(criterion, model), *args, **kwargs)

    def valid_step(
        self, sample: Any, model: nn.Module, criterion: Any, **kwargs: Any
    ) -> tuple[Any, int, dict[str, Any]]:
        """Compute the loss of one held-out batch; fairseq calls this."""
        step = partial(super().valid_step, sample, model, self.features.around(criterion, model), **kwargs)
        return self.whole_split.score(step, sample)

    def optimizer_step(self, optimizer: Any, model: nn.Module, update_num: int) -> None:
        """Make an update, its gradients being clipped; fairseq calls this."""
        self.features.before_step(optimizer, update_num)
        super().optimizer_step(optimizer, model=model, update_num=update_num)
        self.features.after_step(model, update_num)

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        """Aggregate the logs of all processes: of every update that fairseq makes, and of each split that it tests."""
        logs = self.whole_split.gathered(logging_outputs)
        if criterion.training:
            self.features.count(logs)
        super().reduce_metrics(logs, criterion)

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the task beside ``task_state``."""
        return {type(self).__name__: self.features.state_dict()}

    def set_checkpoint_dict(self, state: dict[str, Any]) -> None:
        """Resume with it; fairseq does not call this when a new stage begins with weights alone."""
        self.features.load_state_dict(state)


def features_of(cfg: DictConfig) -> Features:
    """Return what a configuration switches on. Raises AlmaError if the command cannot do it."""
    device = "cpu" if cfg.cpu or not torch.cuda.is_available() else "cuda"
    root: Any = cfg._get_root()
    saving = root.get("checkpoint")
    features = Features.of(cfg, Setting(device, _optimizer_class(cfg), cfg.continue_once, saving=saving))
    features.prepare()
    return features


def _optimizer_class(cfg: DictConfig) -> Optional[str]:
    """Return the class of the optimizer that a command trains with; None: it does not train."""
    root: Any = cfg._get_root()
    name = getattr(root.get("optimizer"), "_name", None)  # of a Namespace, or of a configuration
    return OPTIMIZER_REGISTRY[name].__name__ if name in OPTIMIZER_REGISTRY else None
