"""Base class of the fairseq tasks for text and images: configuration, defaults for devices, loading of checkpoints.

The options of this package are dataclasses. `fairseq_config` makes classes for fairseq's configuration of them,
`configuration_of` reads a command line quickly, and `bound_options` and `check_options` check the ranges.

`set_process_defaults` changes fairseq's defaults for distributed training. By default, fairseq starts one process per
visible GPU, also in evaluation. On CPUs under ``torchrun``, fairseq divides by the number of GPUs, which is zero.
fairseq also passes a device to torch's DistributedDataParallel, which accepts no device on CPUs.

This module replaces two functions of fairseq for tasks of this package:

- ``checkpoint_utils.load_checkpoint_to_cpu`` unpickles files. The replacement runs no code from a file.
- ``Trainer.load_checkpoint`` raises many types of errors if a training state does not match the command. The
  replacement raises AlmaError with a one-line message.
"""

import argparse
import ctypes
import os
import sys
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Callable, ClassVar, Mapping, Optional, Sequence, TypeVar, cast

import torch
import torch.distributed as dist
from fairseq import checkpoint_utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf, overwrite_args_by_name
from fairseq.distributed import utils as distributed_utils
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY, FairseqTask
from fairseq.trainer import Trainer
from hydra.core.config_store import ConfigStore
from omegaconf import II, DictConfig, OmegaConf
from torch import Tensor, nn

from fairseq_alma.checkpoints import LAST_CHECKPOINT
from fairseq_alma.checkpoints.checkpoint_file import (
    ENSEMBLE_ARCH,
    Checkpoint,
    UnfitCheckpoint,
    read_checkpoint,
    refuse_other_shapes,
)
from fairseq_alma.checkpoints.model_options import StartOptions
from fairseq_alma.errors import AlmaError, causes, describe_fault
from fairseq_alma.learners.learner import StageOptions
from fairseq_alma.options import NONE, PLAN, TRAINING, Option, flag, options_of
from fairseq_alma.training.feature import FEATURES, Features, Setting, import_from
from fairseq_alma.training.features import STAGE

DECLARED: dict[str, Option] = {}  # all registered options that have a range, by field name
Config = TypeVar("Config", bound=type)
TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")  # variables set by ``torchrun``
GATHERED_BYTES = 2**20  # maximum size of a process's log outputs; fairseq's ``--all-gather-list-size`` is smaller
TASKS = ("alma_lm", "alma_image_classification")
# fairseq-validate builds the task and the criterion that a checkpoint names. Only these names are allowed.
_ALLOWED = {
    "task": (*TASKS, "language_modeling"),
    "criterion": (
        *("alma_switch_cross_entropy", "alma_image_cross_entropy"),
        *("cross_entropy", "label_smoothed_cross_entropy", "adaptive_loss"),
    ),
}
_changes: dict[str, Callable[[Checkpoint], None]] = {}
_stock_load, _stock_load_training = checkpoint_utils.load_checkpoint_to_cpu, Trainer.load_checkpoint


def declared(config: Config) -> Config:
    """Register the options of a configuration class for `check_options` and `bound_options`, and return the class."""
    DECLARED.update({name: each for name, each in options_of(config).items() if each.range is not None})
    return config


def fairseq_config(name: str, base: type, parts: Sequence[type], kind: Optional[str] = None) -> Any:
    """Build the configuration class of a fairseq task or model from the options of several dataclasses.

    The calling module must assign the class to an attribute of the same name, because hydra looks up the class there.

    Args:
        name: name of the class.
        base: ``FairseqDataclass`` or a subclass; the options replace fields of the same name.
        parts: dataclasses that declare options.
        kind: ``text`` or ``images``, to omit the options for the other kind of data; None: use all options.
    """
    options = [
        each
        for part in parts
        for each in options_of(declared(part)).values()
        if each.side != PLAN and (kind is None or kind in each.kinds)
    ]
    fields: dict[str, tuple[str, Any, Any]] = {}
    for option in options:
        default = bool(option.default_on(TRAINING)) if option.type is bool else option.default_on(TRAINING)
        annotation: Any = option.type if option.type in (bool, int, float) else str
        if option.choices:
            annotation = ChoiceEnum([*([NONE] if default == NONE else []), *option.choices])
        described = field(default=default, metadata={"help": option.help, "option": option})
        fields[option.name] = (option.name, Optional[annotation] if default is None else annotation, described)
    config = make_dataclass(name, fields.values(), bases=(base,))
    config.__module__ = sys._getframe(1).f_globals["__name__"]
    return config


def configuration_of(args: argparse.Namespace) -> DictConfig:
    """Return the same configuration as fairseq's ``convert_namespace_to_omegaconf``, without hydra.

    Hydra parses about 300 options from strings, which takes half of the run time of a short command. If a model, such
    as ``lstm_lm``, has no dataclass, this function calls ``convert_namespace_to_omegaconf`` instead. The options of an
    optimizer without a dataclass, such as ``sgd``, are a dict and not a Namespace; see `features_of`.

    Args:
        args: arguments parsed by a parser of fairseq.
    """
    registries: dict[str, dict[str, Any]] = {
        **{name: each["dataclass_registry"] for name, each in REGISTRIES.items()},
        "task": TASK_DATACLASS_REGISTRY,
        "model": {arch: getattr(model, "__dataclass", None) for arch, model in ARCH_MODEL_REGISTRY.items()},
    }
    groups: dict[str, Any] = {}
    for group, declaration in FairseqConfig.__dataclass_fields__.items():
        choice, config = "", declaration.type
        if group in registries:
            choice = getattr(args, "arch" if group == "model" else group, None) or ""
            config = registries[group].get(choice)
            if choice and config is None and group != "optimizer":
                return convert_namespace_to_omegaconf(args)
        if group == "_name" or config is None:
            groups[group] = {**vars(args), "_name": choice} if choice else None
            continue
        values = groups[group] = vars(config.from_namespace(args))
        for name, entry in config.__dataclass_fields__.items():
            if isinstance(values[name], Enum):
                values[name] = values[name].value
            elif entry.type is float and values[name] is not None:
                values[name] = float(values[name])
        if choice:
            values["_name"] = choice
    cfg = OmegaConf.create(groups)
    OmegaConf.resolve(cfg)  # references such as ${common.cpu}
    OmegaConf.set_struct(cfg, True)
    return cast(DictConfig, cfg)


def check_options(cfg: Any) -> None:
    """Raise AlmaError if an option of this package is out of range in ``cfg``, a group of fairseq's configuration."""
    values = OmegaConf.to_container(cfg, resolve=False) if isinstance(cfg, DictConfig) else cfg
    for name, value in (values if isinstance(values, Mapping) else vars(values)).items():
        option = DECLARED.get(str(name))
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if option is not None and is_number and value != option.default_on(TRAINING):
            try:
                option.value(value)
            except ValueError as error:
                raise AlmaError(str(error)) from error


def bound_options(parser: argparse.ArgumentParser) -> None:
    """Make fairseq's parser check the ranges of this package's options."""
    for action in parser._actions:
        option = DECLARED.get(action.dest)
        if option is not None and action.type in (int, float):
            action.type = option.range


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, because clearing newly allocated pages takes time.

    Environment variables that configure glibc's memory allocation take precedence.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD, in bytes
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, in bytes


def set_process_defaults(parser: argparse.ArgumentParser) -> None:
    """Set the defaults of a fairseq command for the device and for distributed training with ``torchrun``.

    With ``--cpu``, hide all GPUs from this process and its children, because fairseq and torch would use them. CUDA
    must not be initialized.
    """
    keep_freed_memory()
    is_on_cpu = "--cpu" in sys.argv
    if is_on_cpu and torch.backends.cuda.is_built():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # makes torch read CUDA_VISIBLE_DEVICES again
    # The default is one process, because results must not depend on the number of visible GPUs. All ranks load the
    # checkpoint, because torch does not unpickle the objects that fairseq broadcasts.
    parser.set_defaults(distributed_world_size=1, load_checkpoint_on_all_dp_ranks=True)
    if is_on_cpu or not torch.cuda.is_available():
        for action in parser._actions:  # These two backends need GPUs; argparse also converts the defaults.
            if action.dest in ("distributed_backend", "ddp_backend"):
                action.type = lambda word: {"nccl": "gloo", "pytorch_ddp": "legacy_ddp"}.get(word, word)
    if any(name not in os.environ for name in TORCHRUN) or int(os.environ["WORLD_SIZE"]) == 1:
        command = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        command.add_argument("--distributed-world-size", default="1")
        size = command.parse_known_args()[0].distributed_world_size
        if size != "1" and not torch.cuda.is_available() and "--distributed-no-spawn" not in sys.argv:
            raise AlmaError(
                f"--distributed-world-size {size}: needs GPUs; on CPUs, use torchrun --nproc-per-node {size}"
            )
        return
    if torch.cuda.is_available():
        local_rank, num_gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if "SLURM_LOCALID" in os.environ and num_gpus == 1:  # SLURM makes one GPU visible to each task
            local_rank = 0
        if local_rank >= num_gpus:
            raise AlmaError(f"LOCAL_RANK={local_rank}: the machine has {num_gpus} GPUs; start one process per GPU")
        parser.set_defaults(device_id=local_rank)
    parser.set_defaults(
        distributed_world_size=int(os.environ["WORLD_SIZE"]),
        distributed_rank=int(os.environ["RANK"]),
        distributed_init_method="env://",
        distributed_no_spawn=True,
    )


@dataclass
class CommandConfig(StartOptions, FairseqDataclass):
    """Options of the tasks for text and images, including copies of the other fairseq options that the tasks read."""

    features_from: Optional[str] = field(
        default=None, metadata={"help": "Python file or package folder that registers additional training features"}
    )
    path: Optional[str] = II("common_eval.path")
    continue_once: Optional[str] = II("checkpoint.continue_once")
    cpu: bool = II("common.cpu")
    save_dir: str = II("checkpoint.save_dir")
    checkpoint_suffix: str = II("checkpoint.checkpoint_suffix")


def starting_checkpoint(cfg: Any, continue_once: Optional[str] = None) -> Optional[str]:
    """Return the checkpoint that fairseq-train starts from, or None for random weights.

    ``cfg`` has the fields of `StartOptions`; ``continue_once`` is the checkpoint of ``--continue-once``.
    """
    restored = None if cfg.restore_file == LAST_CHECKPOINT else cfg.restore_file
    return next((each for each in (continue_once, cfg.finetune_from_model) if each is not None), restored)


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
        """Add the options of the task to a fairseq command, and set defaults for devices and distributed training."""
        if isinstance(parser, argparse.ArgumentParser):  # fairseq passes another type to list the options of all tasks
            set_process_defaults(parser)
            cls._add_user_features()
        super().add_args(parser)
        bound_options(parser)
        by_name = {action.dest: action for action in parser._actions}
        # fairseq-validate opens the checkpoint before `setup_task`.
        if "path" in by_name and not {"output_word_probs", "beam"} & by_name.keys():
            by_name["path"].required, by_name["path"].type = True, _existing_checkpoint

    @classmethod
    def _add_user_features(cls) -> None:
        """Import the code of ``--features-from``, and add options of new features to the task configuration."""
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
        """Return (checkpoint to start from or None, whether training continues at its position in the data)."""
        is_default = cfg.restore_file == LAST_CHECKPOINT  # like fairseq, look for another file outside of --save-dir
        name = LAST_CHECKPOINT.replace(".", f"{cfg.checkpoint_suffix}.")
        last = os.path.join(cfg.save_dir, name) if is_default else cfg.restore_file
        if os.path.isfile(last):
            return last, True
        return starting_checkpoint(cfg, cfg.continue_once), bool(cfg.continue_once) and str(cfg.continue_as) != STAGE

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        model = super().build_model(cfg, from_checkpoint)
        if from_checkpoint:
            refuse_other_weights(model, str(self.checkpoint_path))
        return model

    def build_to_continue(self, cfg: Any, checkpoint: Checkpoint, path: str) -> Any:
        """Build the model of ``cfg``. Raises AlmaError unless it matches the checkpoint that training starts from."""
        check_architecture(checkpoint, path, cfg)
        model = super().build_model(cfg)
        if checkpoint["cfg"]["model"]["_name"].startswith("alma_"):  # also compare shapes that no option sets
            refuse_other_shapes(
                checkpoint["model"], model, path, "give the options with which the checkpoint was trained"
            )
        return model

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
        criterion = self.features.around_forward(model)(criterion)
        if self.checkpoint_path is None or distributed_utils.get_global_world_size() == 1:
            return super().valid_step(sample, model, criterion, **kwargs)
        # The sample is empty if this process has fewer batches than other processes.
        loss, size, log = super().valid_step(sample, model, criterion, **kwargs) if sample else (0.0, 0, {})
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


def _existing_checkpoint(word: str) -> str:
    if not os.path.isfile(word):
        raise argparse.ArgumentTypeError(f"{word}: no such checkpoint file; join several files with alma-ensemble")
    return word


def require_batch_size(limits: Mapping[str, Any]) -> None:
    """Raise AlmaError unless ``max_sentences`` or ``max_tokens``, which limit a batch, is set and positive."""
    sizes = {"--batch-size": limits.get("max_sentences"), "--max-tokens": limits.get("max_tokens")}
    if not any(size is not None for size in sizes.values()):
        raise AlmaError("--batch-size: not given; give the number of samples per batch, or --max-tokens")
    for option, size in sizes.items():
        if size is not None and size < 1:
            raise AlmaError(f"{option} {size}: must be positive; give 1 or more")


def features_of(cfg: DictConfig) -> Features:
    """Return the active features of a task configuration; raise AlmaError if a feature does not fit the command."""
    root: Any = cfg._get_root()
    if isinstance(root.get("optimizer"), argparse.Namespace):  # fairseq's adadelta and sgd have no dataclass
        root.optimizer = vars(root.optimizer)  # torch.load with weights_only refuses a Namespace in a checkpoint
    name = getattr(root.get("optimizer"), "_name", None)
    batches = None
    if root.get("optimization") is not None:
        batches = {
            **{name: root.dataset[name] for name in ("batch_size", "max_tokens")},
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
    if cfg.path is not None and not any(word.startswith("--autocast") for word in sys.argv):
        cfg.autocast = NONE  # fairseq-validate reads the options of the training run, but tests use fp32
    features = Features.of(cfg, setting)
    features.prepare()
    return features


def load_for_task(path: str, change: Callable[[Checkpoint], None]) -> None:
    """Make fairseq load checkpoints with `load_state`; ``change`` modifies the dict loaded from ``path`` in place."""
    _changes.clear()
    _changes[path] = change


def load_state(path: str, arg_overrides: Optional[Mapping[str, Any]] = None) -> Checkpoint:
    """Load a checkpoint in fairseq's format. ``arg_overrides`` (name -> value) replaces options in the checkpoint.

    Raises:
        AlmaError: the file is missing or damaged, or the model, task or criterion is not supported.
    """
    state = read_checkpoint(path, mmap=False, needed=("optimizer_history", "extra_state"))
    for part, allowed in _ALLOWED.items():
        options = state["cfg"].get(part)
        name = options.get("_name") if isinstance(options, dict) else None
        if options is not None and name not in allowed:
            raise AlmaError(
                f"{path}: expected {part} {' or '.join(allowed)}, found {str(name)[:60]}; "
                "give a checkpoint written by fairseq-train or alma-grow"
            )
    if path in _changes:
        _changes[path](state)
    state["optimizer_history"] = state["optimizer_history"][-1:]  # fairseq reads only the last entry
    state["cfg"] = OmegaConf.create(state["cfg"], flags={"allow_objects": True})
    if arg_overrides is not None:
        overwrite_args_by_name(state["cfg"], arg_overrides)
    return checkpoint_utils._upgrade_state_dict(state)


def _load_checkpoint_to_cpu(
    path: str, arg_overrides: Optional[Mapping[str, Any]] = None, load_on_all_ranks: bool = False
) -> Any:
    if _changes or any(word.rpartition("=")[2] in TASKS for word in sys.argv[1:]):
        return load_state(path, arg_overrides)
    return _stock_load(path, arg_overrides, load_on_all_ranks)


def _load_training(trainer: Trainer, filename: str, *arguments: Any, **more: Any) -> Any:
    if trainer.cfg.task._name not in TASKS or not os.path.isfile(filename):
        return _stock_load_training(trainer, filename, *arguments, **more)
    _ = trainer.optimizer  # build the optimizer first: errors in optimizer options are not errors in the file
    options = trainer.cfg.checkpoint
    try:
        extra_state = _stock_load_training(trainer, filename, *arguments, **more)
        state = (extra_state or {}).get(type(trainer.task).__name__)
        if state and options.reset_dataloader and not options.reset_optimizer:  # fairseq omits the state of the task
            trainer.task.set_checkpoint_dict(state)
        return extra_state
    except Exception as error:
        for each in causes(error):
            if isinstance(each, AlmaError):
                raise each from None
        if describe_fault(error) is not None:
            raise
        is_sentence = isinstance(error, (AssertionError, ValueError, UnfitCheckpoint))
        reason = str(error) if is_sentence else f"{type(error).__name__}: {error}"
        raise AlmaError(
            f"{filename}: cannot resume training ({reason[:300]}); give the options of the interrupted run, or "
            "--reset-optimizer --reset-lr-scheduler --reset-meters --reset-dataloader to start a new training run from "
            "the weights in the checkpoint"
        ) from error


checkpoint_utils.load_checkpoint_to_cpu = _load_checkpoint_to_cpu
Trainer.load_checkpoint = _load_training


def check_architecture(checkpoint: Checkpoint, path: str, model_cfg: Any) -> None:
    """Raise AlmaError if ``model_cfg`` and the checkpoint differ in architecture or in options that set shapes."""
    found = checkpoint["cfg"]["model"]
    kinds = [ARCH_MODEL_NAME_REGISTRY.get(config["_name"]) for config in (found, model_cfg)]
    if kinds[0] != kinds[1]:
        remedy = "" if found["_name"] == ENSEMBLE_ARCH else f"give --arch {found['_name']}, or "
        raise AlmaError(
            f"{path}: expected architecture {model_cfg['_name']}, found {found['_name']}; {remedy}start from another "
            "checkpoint"
        )
    if differing := _differing_options(found, model_cfg):
        raise AlmaError(f"{path}: the model sizes in this file differ from the command line; give {differing}")
    joint: Any = MODEL_REGISTRY.get(kinds[0])
    if hasattr(joint, "member_config"):
        there, here = (
            joint.member_config(each["member_arch"], each["member_options"])[1] for each in (found, model_cfg)
        )
        if differing := _differing_options(vars(there), vars(here)):
            raise AlmaError(
                f"{path}: the member options in this file ({found['member_options']!r}) differ from the command line; "
                f"give {differing} in --member-options"
            )


def _differing_options(found: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return the options in ``found`` that set tensor shapes and differ from ``given``, as command-line arguments."""
    ours = {each for each in MODEL_DATACLASS_REGISTRY.values() if each.__module__.startswith("fairseq_alma.")}
    shape = {name for each in ours for name, option in options_of(each).items() if option.shape}
    words = []
    for name in (name for name in given if name in shape & found.keys() and given[name] is not None):
        there, here = (str(each) if isinstance(each, Enum) else each for each in (found[name], given[name]))
        if there != here:
            no = "" if there else "no "
            words.append(f"{no}{flag(name)}" if isinstance(there, bool) else f"{flag(name)} {there!r}")
    return " ".join(words)


def refuse_other_weights(model: nn.Module, path: str) -> None:
    """Make ``model.load_state_dict`` raise AlmaError if names or shapes of the weights do not match the model."""

    def compare(module: nn.Module, weights: Mapping[str, Tensor], prefix: str, *unused: Any) -> None:
        if not prefix:
            refuse_other_shapes(weights, module, path, "give an unaltered checkpoint and its training stream")

    model.register_load_state_dict_pre_hook(compare)
