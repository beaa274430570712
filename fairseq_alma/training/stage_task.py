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
from fairseq_alma.training.feature import FEATURES, Features, Setting
from fairseq_alma.training.given_code import import_from
from fairseq_alma.training.processes import set_process_defaults, world_size

GATHERED_BYTES = 2**20
"""Of each process; fairseq's own limit (``--all-gather-list-size``) is smaller."""


class FullSplit:
    """Tests of a split, all of which counts whatever the number of processes.

    ``fairseq-eval-lm`` gives each process a share and prints that of the first one; here every process scores all of
    it. ``fairseq-validate`` gathers the logs of all batches of all processes, which must be small: each process adds up
    its own. In a training (not ``is_test``) nothing changes.
    """

    def __init__(self, is_test: bool) -> None:
        self.is_test = is_test
        self.sums: dict[str, Any] = {}

    def score(
        self, step: Callable[[], tuple[Any, int, dict[str, Any]]], sample: Any
    ) -> tuple[Any, int, dict[str, Any]]:
        """Compute the loss of one batch; the log has the sums so far, that of the batch before is emptied."""
        if not self.is_test or world_size() == 1:
            return step()
        # A process with a batch less than the others gets an empty one.
        loss, size, log = step() if sample else (0.0, 0, {})
        log = {key: value.item() if isinstance(value, Tensor) else value for key, value in log.items()}
        before, self.sums = self.sums, {key: self.sums.get(key, 0) + log.get(key, 0) for key in {**self.sums, **log}}
        before.clear()
        gather = distributed_utils.all_gather_list
        if dist.get_backend() == "gloo" and not hasattr(gather, "_buffer"):  # fairseq makes no buffers on a CPU
            gather._buffer = torch.zeros(GATHERED_BYTES * world_size(), dtype=torch.uint8)
            gather._cpu_buffer = torch.zeros(GATHERED_BYTES, dtype=torch.uint8)
        return loss, size, self.sums

    def gathered(self, logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the logs of all processes but empty ones; fairseq calls this once for each split that it tests."""
        self.sums = {}
        return [log for log in logs if log]


@dataclass
class CommandConfig(Beginning, FairseqDataclass):
    """Options of both tasks, and options of the command that they look at."""

    features_from: Optional[str] = field(
        default=None, metadata={"help": "a folder or file of Python that registers further features of a training"}
    )
    path: Optional[str] = II("common_eval.path")
    continue_once: Optional[str] = II("checkpoint.continue_once")
    cpu: bool = II("common.cpu")
    save_dir: str = II("checkpoint.save_dir")


class StageTask(FairseqTask):
    """A task that trains on one stage of a stream; before a task of fairseq's among the bases.

    Attributes:
        kind: of data.
        stream_config: the base of its configuration, to which the options of stages and features are added.
        features: of the training.
        full_split: how a split is tested by several processes.
    """

    kind: ClassVar[str]
    stream_config: ClassVar[type]
    features: Features
    full_split: FullSplit

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
        name = TASK_DATACLASS_REGISTRY[task].__name__
        config = fairseq_config(name, cls.stream_config, [StageOptions, *FEATURES], cls.kind)
        config.__module__ = cls.__module__
        setattr(sys.modules[cls.__module__], name, config)
        setattr(cls, "__dataclass", config)  # as `register_task`, which takes a name once
        TASK_DATACLASS_REGISTRY[task] = config
        node = config()
        node._name = task
        ConfigStore.instance().store(name=task, group="task", node=node, provider="fairseq")

    @staticmethod
    def find_start(cfg: Any) -> tuple[Optional[str], bool]:
        """Return the checkpoint that the training starts from, if any, and whether it resumes there."""
        last = os.path.join(cfg.save_dir, cfg.restore_file)
        if os.path.isfile(last):
            return last, True
        return starting_checkpoint(cfg, cfg.continue_once), False

    def train_step(self, sample: Any, model: nn.Module, criterion: Any, *args: Any, **kwargs: Any) -> Any:
        return super().train_step(sample, model, self.features.around(criterion, model), *args, **kwargs)

    def valid_step(
        self, sample: Any, model: nn.Module, criterion: Any, **kwargs: Any
    ) -> tuple[Any, int, dict[str, Any]]:
        step = partial(super().valid_step, sample, model, self.features.around(criterion, model), **kwargs)
        return self.full_split.score(step, sample)

    def optimizer_step(self, optimizer: Any, model: nn.Module, update_num: int) -> None:
        self.features.before_step(optimizer, update_num)
        super().optimizer_step(optimizer, model=model, update_num=update_num)
        self.features.after_step(model, update_num)

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        """Aggregate the logs of all processes: of every update of a training, and of each split that is tested."""
        logs = self.full_split.gathered(logging_outputs)
        if criterion.training:
            self.features.count(logs)
        super().reduce_metrics(logs, criterion)

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """Return the state that fairseq keeps under ``extra_state``."""
        return {type(self).__name__: self.features.state_dict()}

    def set_checkpoint_dict(self, state: dict[str, Any]) -> None:
        """Resume from that state; fairseq does not call this when a new stage begins with weights alone."""
        self.features.load_state_dict(state)


def features_of(cfg: DictConfig) -> Features:
    """Return the features that a configuration switches on. Raises AlmaError if the command cannot have them."""
    root: Any = cfg._get_root()
    name = getattr(root.get("optimizer"), "_name", None)  # of a Namespace, or of a configuration
    batches = None
    if root.get("optimization") is not None:
        batches = {
            "batch_size": root.dataset.batch_size,
            "max_tokens": root.dataset.max_tokens,
            "update_freq": [int(each) for each in root.optimization.update_freq],
            "num_procs": root.distributed_training.distributed_world_size,
        }
    setting = Setting(
        device="cpu" if cfg.cpu or not torch.cuda.is_available() else "cuda",
        optimizer=OPTIMIZER_REGISTRY[name].__name__ if name in OPTIMIZER_REGISTRY else None,
        start=cfg.continue_once,
        saving=root.get("checkpoint"),
        batches=batches,
    )
    features = Features.of(cfg, setting)
    features.prepare()
    return features
