"""Base class of the fairseq tasks for text and images: calls of training features, evaluation of complete splits."""

import argparse
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Optional

import torch
import torch.distributed as dist
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import utils as distributed_utils
from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY, FairseqTask
from hydra.core.config_store import ConfigStore
from omegaconf import II, DictConfig
from torch import Tensor, nn

from fairseq_alma.checkpoints.model_options import StartOptions, starting_checkpoint
from fairseq_alma.learners.learner import StageOptions
from fairseq_alma.training.fairseq_options import bound_options, fairseq_config
from fairseq_alma.training.feature import FEATURES, Features, Setting
from fairseq_alma.training.processes import set_process_defaults
from fairseq_alma.training.user_code import import_from

GATHERED_BYTES = 2**20
"""Maximum size of the log outputs of a process, in bytes; larger than fairseq's ``--all-gather-list-size``."""


@dataclass
class CommandConfig(StartOptions, FairseqDataclass):
    """Options of the tasks for text and images, including command options that the tasks read."""

    features_from: Optional[str] = field(
        default=None, metadata={"help": "Python file or package folder that registers additional training features"}
    )
    path: Optional[str] = II("common_eval.path")
    continue_once: Optional[str] = II("checkpoint.continue_once")
    cpu: bool = II("common.cpu")
    save_dir: str = II("checkpoint.save_dir")


class StageTask(FairseqTask):
    """Mixin for a task that trains on one stage of a stream; fairseq's task must be a later base class.

    Attributes:
        kind: ``text`` or ``images``.
        stream_config: base class of the task configuration, to which `fairseq_config` adds the options of features.
        features: active training features.
    """

    kind: ClassVar[str]
    stream_config: ClassVar[type]
    features: Features
    _sums: Optional[dict[str, Any]] = None

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options of the task to a fairseq command, and change the defaults of other options."""
        if isinstance(parser, argparse.ArgumentParser):  # fairseq passes another type to list the options of all tasks
            set_process_defaults(parser)
            cls._add_user_features()
        super().add_args(parser)
        bound_options(parser)

    @classmethod
    def _add_user_features(cls) -> None:
        """Import the modules of ``--features-from``, and register the task configuration again with these features."""
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
        setattr(cls, "__dataclass", config)  # `register_task` accepts each name only once
        TASK_DATACLASS_REGISTRY[task] = config
        node = config()
        node._name = task
        ConfigStore.instance().store(name=task, group="task", node=node, provider="fairseq")

    @property
    def checkpoint_path(self) -> Optional[str]:
        """Return the value of ``--path``, the checkpoint to evaluate; None in training."""
        return (self.cfg or self.args).path  # fairseq's language modeling task has args, not cfg

    @staticmethod
    def find_start(cfg: Any) -> tuple[Optional[str], bool]:
        """Return (checkpoint to start from or None, whether the command resumes an interrupted training)."""
        last = os.path.join(cfg.save_dir, cfg.restore_file)
        if os.path.isfile(last):
            return last, True
        return starting_checkpoint(cfg, cfg.continue_once), False

    def train_step(self, sample: Any, model: nn.Module, criterion: Any, *args: Any, **kwargs: Any) -> Any:
        return super().train_step(sample, model, self.features.around_forward(model)(criterion), *args, **kwargs)

    def valid_step(
        self, sample: Any, model: nn.Module, criterion: Any, **kwargs: Any
    ) -> tuple[Any, int, dict[str, Any]]:
        """Return the loss, sample size and log output of a batch.

        With several processes, ``fairseq-validate`` gathers the log outputs of all batches, and fairseq limits the
        total size of these log outputs. Therefore each log output contains the sums over all batches so far, and this
        method clears the log output of the previous batch.
        """
        is_shared = self.checkpoint_path is not None and distributed_utils.get_global_world_size() > 1
        if is_shared and not sample:  # this process has fewer batches than other processes
            loss, size, log = 0.0, 0, {}
        else:
            criterion = self.features.around_forward(model)(criterion)
            loss, size, log = super().valid_step(sample, model, criterion, **kwargs)
        if not is_shared:
            return loss, size, log
        log = {key: value.item() if isinstance(value, Tensor) else value for key, value in log.items()}
        before = self._sums or {}
        self._sums = {key: before.get(key, 0) + log.get(key, 0) for key in {**before, **log}}
        before.clear()
        gather = distributed_utils.all_gather_list
        if dist.get_backend() == "gloo" and not hasattr(gather, "_buffer"):  # fairseq's buffers are on a GPU
            gather._buffer = torch.zeros(GATHERED_BYTES * dist.get_world_size(), dtype=torch.uint8)
            gather._cpu_buffer = torch.zeros(GATHERED_BYTES, dtype=torch.uint8)
        return loss, size, self._sums

    def optimizer_step(self, optimizer: Any, model: nn.Module, update_num: int) -> None:
        self.features.before_step(optimizer, update_num)
        super().optimizer_step(optimizer, model=model, update_num=update_num)
        self.features.after_step(model, update_num)

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        """Aggregate the log outputs of all processes for one training update or one evaluated split."""
        self._sums = None
        logs = [log for log in logging_outputs if log]
        if criterion.training:
            self.features.count(logs)
        super().reduce_metrics(logs, criterion)

    def get_checkpoint_dict(self) -> dict[str, Any]:
        return {type(self).__name__: self.features.state_dict()}

    def set_checkpoint_dict(self, state: dict[str, Any]) -> None:
        """Load the state of the features; fairseq does not call this method if only weights are loaded."""
        self.features.load_state_dict(state)


def features_of(cfg: DictConfig) -> Features:
    """Return the active features of a task configuration; raise AlmaError if a feature does not fit the command."""
    root: Any = cfg._get_root()
    name = getattr(root.get("optimizer"), "_name", None)
    batches = None
    if root.get("optimization") is not None:
        batches = {name: root.dataset[name] for name in ("batch_size", "max_tokens")}
        batches["update_freq"] = [int(each) for each in root.optimization.update_freq]
        batches["num_procs"] = root.distributed_training.distributed_world_size
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
