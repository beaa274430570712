"""Optional training features of this package, in the order in which their hooks are called.

Importing this module imports neither torch nor fairseq. A *branch* is a copy of the model that is trained with a
decaying learning rate.
"""

import argparse
import time
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, ContextManager, Mapping, Optional, Sequence

from fairseq_alma.checkpoints import AVERAGE, FIRST_UPDATE, TASK_STATE, TRAIN_TOKENS
from fairseq_alma.checkpoints.model_options import WEIGHTS_FLAG
from fairseq_alma.errors import AlmaError
from fairseq_alma.options import NONE, PLAN, TRAINING, integer, opt, real
from fairseq_alma.training.feature import BATCHES, Feature, Part, PlannedRun, Setting, register_feature

if TYPE_CHECKING:
    import numpy
    from torch import Tensor, nn

RESUME, STAGE, BRANCH = "resume", "stage", "branch"
GROWABLE = ("adam", "fused_adam", "muon")  # names of the optimizers whose state can grow with a model
_FOR_TPUS = ("--bf16", "--memory-efficient-bf16", "--tpu")
_INEXACT = ("--fp16", "--memory-efficient-fp16", "--amp")


@register_feature
@dataclass
class CarriedOptimizer(Feature):
    """Feature that starts a stage or a branch with optimizer state, number of updates and schedule of a checkpoint.

    fairseq loads either the weights of a checkpoint or the complete training state. ``--continue-once`` loads the
    state of another training run: weights, optimizer, number of updates, schedule, and position in the data. A new
    stage resets the position in the data; a branch does not. If the same command runs again, fairseq-train resumes
    from the last checkpoint in ``--save-dir``.
    """

    owned: ClassVar[Mapping[str, str]] = {"--continue-as": "give --carry-optimizer before the --"}

    carry_optimizer: Optional[bool] = opt(
        None,
        "carry optimizer, number of updates and learning-rate schedule over to the next stage (default for "
        "alma_transformer_lm with a constant learning rate)",
        kinds=("text",),
        side=PLAN,
    )
    continue_as: Optional[str] = opt(
        None,
        "with --continue-once: resume the run, start a stage on new data, or start a branch (see --branch-share)",
        choices=(RESUME, STAGE, BRANCH),
        side=TRAINING,
        defaults={TRAINING: RESUME},
    )

    def check(self, run: PlannedRun) -> None:
        trainings = [each for plan in run.plans[1:] for each in plan.trainings]
        if len(run.plans) > 1 and not any(each.start for each in trainings):  # one stage: more stages may follow later
            raise ValueError(
                "--carry-optimizer: the learner starts each stage with new weights and a new optimizer; omit the option"
            )
        run.require_updates("--carry-optimizer")
        if run.value("--lr-scheduler") == "polynomial_decay":
            total, needed = run.value("--total-num-update"), len(run.plans) * int(run.value("--max-update"))
            if not total or float(total) < needed:
                raise ValueError(
                    f"--carry-optimizer: expected --total-num-update of at least {needed} for "
                    f"{len(run.plans)} stages, found {total or 'none'}; give at least {needed}, or --lr-scheduler fixed"
                )
        else:
            run.require_endless(
                "--carry-optimizer", ", or polynomial_decay with a --total-num-update that covers all stages"
            )
        optimizer = run.value("--optimizer")
        if optimizer not in GROWABLE and any(each.growth for each in trainings):
            raise ValueError(
                f"--optimizer {optimizer or 'missing'} after --: a model that grows and carries its optimizer (default "
                f"for a constant --lr) requires --optimizer {' or '.join(GROWABLE)}; give one of these optimizers"
            )

    def prepare(self, setting: Setting) -> None:
        if setting.start is None:
            raise AlmaError(f"--continue-as {self.continue_as}: needs a starting checkpoint; give --continue-once")

    def begin(self, checkpoint: dict[str, Any], setting: Setting) -> None:
        """Reset the token count and the best loss in the checkpoint; for a new stage, also reset the data position.

        Raises:
            AlmaError: the checkpoint has no optimizer state, or the state of an optimizer other than ``--optimizer``.
        """
        found = checkpoint["optimizer_history"][-1]["optimizer_name"]
        if setting.optimizer not in (None, found):
            raise AlmaError(
                f"{setting.start}: expected optimizer {setting.optimizer}, found {found}; give the --optimizer of the "
                f"checkpoint, or {WEIGHTS_FLAG} instead of --continue-once"
            )
        if checkpoint.get("last_optimizer_state") is None:
            raise AlmaError(f"{setting.start}: has no optimizer state; give {WEIGHTS_FLAG} instead of --continue-once")
        state: dict[str, Any] = checkpoint["extra_state"]
        first_update = int(checkpoint["optimizer_history"][-1]["num_updates"])
        state[TASK_STATE] = {**state.get(TASK_STATE, {}), TRAIN_TOKENS: 0, FIRST_UPDATE: first_update, BATCHES: []}
        for name in ("best", "val_loss"):
            state.pop(name, None)
        if self.continue_as == STAGE:
            state["train_iterator"] = {"version": 3, "epoch": 1, "iterations_in_epoch": 0}
            state["previous_training_time"] = 0


@register_feature
@dataclass
class WeightAverage(Feature):
    """Feature that averages the weights; the half-life of the moving average is a fraction f of the updates so far.

    The decay factor at update t (numbered from 1) is 2^(-1 / (f t)), so the half-life is f t updates. The average is
    therefore useful at the end of every stage, even with a constant learning rate. Update t has a weight approximately
    proportional to a power of t (Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion
    Models", section 3.1). fairseq's ``--store-ema`` has a constant decay factor.

    Attributes:
        average: averaged parameters (name -> fp32 tensor); None before the first update.
    """

    predicts_with: ClassVar[Optional[str]] = "average"

    ema_half_life: Optional[str] = opt(
        None,
        "evaluate a moving average of the weights; the half-life is this fraction of the updates so far (default for "
        "alma_transformer_lm: 1/8)",
        choices=("1/32", "1/16", "1/8"),
        defaults={TRAINING: NONE},
    )
    average: Optional[dict[str, Any]] = field(default=None, init=False)

    def after_step(self, model: "nn.Module", update: int) -> None:
        import torch

        assert self.ema_half_life is not None
        while isinstance(wrapped := getattr(model, "module", None), torch.nn.Module):  # data-parallel wrappers
            model = wrapped
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            if self.average is None:
                self.average = {name: tensor.detach().clone().float() for name, tensor in parameters.items()}
                return
            # Averages from a checkpoint are on the CPU.
            self.average = {name: self.average[name].to(tensor.device) for name, tensor in parameters.items()}
            weights = [tensor.float() for tensor in parameters.values()]
            decay = 2.0 ** float(-1 / (Fraction(self.ema_half_life) * (update + 1)))
            torch._foreach_lerp_([*self.average.values()], weights, 1.0 - decay)

    def to_test(self, model: "nn.Module") -> "Optional[Mapping[str, Tensor]]":
        return self.average

    def state_dict(self) -> dict[str, Any]:
        return {AVERAGE: {name: tensor.cpu() for name, tensor in self.average.items()}} if self.average else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.average = state.get(AVERAGE)


@register_feature
@dataclass
class LRBranch(Feature):
    """Feature that decays the learning rate to zero in the branch (model copy for evaluation).

    The learning rate of the main training does not decay. The schedule is warmup-stable-decay (Hu et al. 2024,
    MiniCPM), with the factor 1 - sqrt(p) at fraction p of the decay (Hägele et al. 2024).
    """

    predicts_with: ClassVar[Optional[str]] = "branch"
    owned = dict.fromkeys(("--branch-from", "--branch-until"), "give --branch-share before the --")

    branch_share: Optional[float] = opt(
        None,
        "decay the learning rate to 0 over the last fraction S of the updates so far, in a model copy for evaluation",
        range=real(0, 1, above=True, below=True),
        side=PLAN,
        metavar="S",
    )
    branch_from: Optional[int] = opt(None, "updates before the start of the LR decay", range=integer(0), side=TRAINING)
    branch_until: Optional[int] = opt(None, "updates before the end of the LR decay", range=integer(1), side=TRAINING)
    _groups: Sequence[dict[str, Any]] = field(default=(), init=False)
    _rates: Sequence[float] = field(default=(), init=False)

    def check(self, run: PlannedRun) -> None:
        run.require_updates("--branch-share")
        run.require_endless(f"--branch-share {self.branch_share:g}")

    def num_updates(self, of_stage: int, before: int = 0) -> int:
        """Return the number of updates of the branch.

        The branch starts from a checkpoint within the stage, so the result is at most ``of_stage - 1``, but at least 1.

        Args:
            of_stage: number of updates of the stage.
            before: number of updates before the stage.
        """
        assert self.branch_share is not None
        return max(1, round(min(self.branch_share * (before + of_stage), of_stage - 1)))

    def for_part(self, part: Part) -> "LRBranch":
        if part.num_updates is None or not part.is_branch:
            return LRBranch()
        end = part.first_update + part.num_updates
        return LRBranch(branch_from=end - self.num_updates(part.num_updates, part.first_update), branch_until=end)

    def describe(self, part: Part) -> dict[str, Any]:
        count = part.num_updates
        return {} if count is None else {"branch_updates": self.num_updates(count, part.first_update)}

    def prepare(self, setting: Setting) -> None:
        start, end = self.branch_from, self.branch_until
        if (start is None) != (end is None) or (start is not None and end is not None and start >= end):
            raise AlmaError(
                f"--branch-from {start}, --branch-until {end}: expected both options, with --branch-from below "
                "--branch-until; give both, or omit both"
            )

    def before_step(self, optimizer: Any, update: int) -> None:
        if self.branch_from is not None and self.branch_until is not None:
            self._groups = optimizer.param_groups
            self._rates = [group["lr"] for group in self._groups]
            progress = (update - self.branch_from) / (self.branch_until - self.branch_from)
            for group in self._groups:
                group["lr"] *= 1.0 - min(1.0, max(0.0, progress)) ** 0.5

    def after_step(self, model: "nn.Module", update: int) -> None:
        for group, rate in zip(self._groups, self._rates, strict=True):  # for images, no scheduler resets the rate
            group["lr"] = rate


@register_feature
@dataclass
class BestCheckpoint(Feature):
    """Feature that evaluates the checkpoint with the lowest loss on ``valid`` instead of the last checkpoint."""

    predicts_with: ClassVar[Optional[str]] = "best"

    best_checkpoint: Optional[bool] = opt(
        None,
        "evaluate the checkpoint with the lowest loss on valid; without --carry-optimizer, also start the next stage "
        "from this checkpoint",
        kinds=("text",),
        side=PLAN,
    )

    def words(self) -> list[str]:
        return ["--best-checkpoint-metric", "nll_loss"]


@register_feature
@dataclass
class NewFirst(Feature):
    """Feature that adds a sample of the new training sequences before the sequences of all mega-batches."""

    new_first: Optional[float] = opt(
        None,
        "with --replay: start stages with a fraction F of the new text; --passes counts passes through the new text",
        range=real(0, 1, above=True),
        kinds=("text",),
        metavar="F",
        defaults={TRAINING: 0.0},
    )

    def check(self, run: PlannedRun) -> None:
        self.require_replay(run.replay)

    def require_replay(self, replay: bool) -> None:
        """Raise AlmaError if the option is given without ``--replay``."""
        if self.new_first and not replay:
            raise AlmaError(f"--new-first {self.new_first:g} requires --replay; add --replay")

    def draw_first(self, num_all: int, num_new: int, seed: int) -> "numpy.ndarray":
        """Return the indices of the sequences with which training starts: a random sample of the new sequences.

        If all sequences are new, the sample is empty.

        Args:
            num_all: number of all sequences, old and new; the new sequences come last.
            num_new: number of new sequences.
            seed: random seed.
        """
        import numpy

        share = self.new_first if self.new_first is not None and num_new < num_all else 0
        order = numpy.random.default_rng((seed, num_all)).permutation(numpy.arange(num_all - num_new, num_all))
        return order[: round(share * num_new)]


class _RejectedPrecision(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        reason = "would not use the GPU" if option_string in _FOR_TPUS else "does not allow an exact resume"
        raise AlmaError(f"{option_string}: this option {reason}; give --autocast bf16, or use fp32")


def refuse_inexact_precision(parser: argparse.ArgumentParser, evaluates: bool) -> None:
    """Make a fairseq parser reject TPU and bf16 options and, unless the command ``evaluates``, fp16 and AMP options."""
    group = parser.add_argument_group("rejected options", conflict_handler="resolve")  # replaces fairseq's options
    for option in _FOR_TPUS if evaluates else (*_FOR_TPUS, *_INEXACT):
        group.add_argument(option, action=_RejectedPrecision, nargs=0, default=False, help="see --autocast")


@register_feature
@dataclass
class Autocast(Feature):
    """Feature that runs forward passes under ``torch.autocast`` in bf16, and rejects fairseq's fp16 and bf16 options.

    fairseq's fp16 and bf16 optimizers do not save their fp32 weights, and ``--amp`` does not save the loss scale. A
    resumed training run would therefore differ from an uninterrupted one. With ``--bf16``, fairseq's parser also sets
    ``--tpu``.
    """

    autocast: Optional[str] = opt(
        None,
        "data type of matrix products; model weights, optimizer state and checkpoints are fp32",
        choices=("bf16",),
        side=TRAINING,
        defaults={TRAINING: NONE},
    )

    def prepare(self, setting: Setting) -> None:
        import torch

        if setting.device == "cpu":
            device, is_supported = "processor", torch.ops.mkldnn._is_mkldnn_bf16_supported()
        else:
            device, is_supported = "GPU", torch.cuda.is_bf16_supported(including_emulation=False)
        if not is_supported:
            raise AlmaError(f"--autocast bf16: this {device} does not support bf16; omit --autocast")

    def around_forward(self, model: "nn.Module") -> ContextManager[Any]:
        import torch

        return torch.autocast(next(model.parameters()).device.type, torch.bfloat16)


@register_feature
@dataclass
class TimedSaves(Feature):
    """Feature that saves a checkpoint every M minutes; fairseq supports only intervals in updates and in epochs.

    fairseq saves after each update whose number is a multiple of ``--save-interval-updates``. When a checkpoint is due,
    the feature sets this interval to the number of the current update. In distributed training, rank 0 measures the
    time.
    """

    save_interval_minutes: Optional[float] = opt(
        None,
        "checkpoint interval in minutes, in addition to --save-interval-updates",
        range=real(0, 1e8, above=True),
        side=TRAINING,
        kinds=("text",),
        metavar="M",
    )

    def prepare(self, setting: Setting) -> None:
        self._saved = time.monotonic()
        self._saving: Any = setting.saving
        self._interval = self._saving.save_interval_updates

    def after_step(self, model: "nn.Module", update: int) -> None:
        import torch

        assert self.save_interval_minutes is not None
        is_due = time.monotonic() - self._saved >= 60 * self.save_interval_minutes
        if torch.distributed.is_initialized():
            decision = torch.tensor([is_due], dtype=torch.uint8, device=next(model.parameters()).device)
            torch.distributed.broadcast(decision, 0)
            is_due = bool(decision.item())
        self._saving.save_interval_updates = update + 1 if is_due else self._interval

    def state_dict(self) -> dict[str, Any]:
        # fairseq calls this method on every save, which restarts the interval.
        self._saved = time.monotonic()
        self._saving.save_interval_updates = self._interval  # the user's interval, for the options in the checkpoint
        return {}
