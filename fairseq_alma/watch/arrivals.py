"""Figures over arrivals in TensorBoard and Weights & Biases, asked for by fairseq's own options after ``--``.

``--tensorboard-logdir DIR``: ``DIR/RUN/arrivals`` has them, ``DIR/RUN/stage-NNN/member-M`` what fairseq-train logs of
each training. ``--wandb-project NAME``: the run and each training are a run each, in one group. Each launch writes
all arrivals that are complete, and then each new one.
"""

import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import ModelId, StagePlan
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.terminal import print_line

TENSORBOARD, WANDB = "--tensorboard-logdir", "--wandb-project"
CURVE_OPTIONS = (TENSORBOARD, WANDB)
PACKAGES = {TENSORBOARD: ("torch.utils.tensorboard", "tensorboard"), WANDB: ("wandb", "wandb")}
SPENT = ("num_updates", "train_tokens", "train_images", "train_flops", "wall_seconds")
"""What a stage costs; an arrival that only waits costs nothing."""


def arrival_points(run: RunFolder, plans: Sequence[StagePlan]) -> list[dict[str, float]]:
    """Return the figures of each arrival of the complete stages, from the first update on.

    While a learner waits, the model of its last update counts, as in the paper's section 3.1.
    """
    points: list[dict[str, float]] = []
    before: Optional[dict[str, float]] = None
    for plan in plans:
        record = run.read_stage(plan.stage.index)
        if record is None:
            break
        for arrival in plan.stage.arrivals[:-1] if before is not None else ():
            points.append({**(before or {}), **{f"stage/{name}": 0.0 for name in SPENT}, "arrival": arrival})
        before = _flatten(record)
        points.append({**before, "arrival": plan.stage.last_arrival})
    return points


def _flatten(record: Mapping[str, Any], group: str = "stage/") -> dict[str, float]:
    """Return the numbers of a stage's record: ``test/loss``, ``stage/num_params``, …"""
    figures: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            figures.update(_flatten(value, f"{name}/"))
        elif isinstance(value, (int, float)) and name != "stage":
            figures[f"{group}{name}"] = float(value)
    return figures


def curves_folder(logdir: str, run: RunFolder, model: ModelId) -> Path:
    """Return the folder for TensorBoard's curves of one training."""
    return Path(logdir) / run.name / run.model_folder(model).relative_to(run.root)


def wandb_environment(run: RunFolder, model: ModelId) -> dict[str, str]:
    """Return the variables that name a training to Weights & Biases."""
    identity = hashlib.sha256(f"{run.root.resolve()} {model}".encode()).hexdigest()[:16]
    name = f"{run.name}/{run.model_folder(model).relative_to(run.root)}"
    return {"WANDB_NAME": name, "WANDB_RUN_GROUP": run.name, "WANDB_RUN_ID": identity, "WANDB_RESUME": "allow"}


class ArrivalCurves:
    """Writes the figures of a run's arrivals while it runs.

    Args:
        run: its folder.
        plans: of all its stages.
        options: after ``--``: option and value.
    """

    def __init__(self, run: RunFolder, plans: Sequence[StagePlan], options: Mapping[str, str]) -> None:
        self.run, self.plans = run, plans
        self.wanted = {name: options[name] for name in CURVE_OPTIONS if options.get(name)}
        self.num_written = 0
        self.writer: Any = None

    def begin(self) -> None:
        """Raise AlmaError unless the packages are installed."""
        for option, value in self.wanted.items():
            module, package = PACKAGES[option]
            found = importlib.util.find_spec(package)
            if found is None or found.origin is None:  # W&B makes a folder of its own name, which can be imported
                raise AlmaError(f"{option} {value}: {module} is not installed; pip install {package}")

    def catch_up(self, at_end: bool = False) -> None:
        """Write what is complete and not written yet; what goes wrong is a note: training continues."""
        if not self.wanted:
            return
        try:
            points = arrival_points(self.run, self.plans)
            if TENSORBOARD in self.wanted:
                self._to_tensorboard(points[self.num_written :])
            if WANDB in self.wanted and at_end:
                self._to_wandb(points)
            self.num_written = len(points)
        except Exception as error:
            print_line(f"note: curves of {self.run.root} are not written ({' '.join(str(error).split())})", sys.stderr)

    def _to_tensorboard(self, points: Sequence[Mapping[str, float]]) -> None:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            folder = Path(self.wanted[TENSORBOARD]) / self.run.name / "arrivals"
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
            self.writer = SummaryWriter(str(folder))
        for point in points:
            for name, value in point.items():
                self.writer.add_scalar(name, value, int(point["arrival"]))
        self.writer.flush()

    def _to_wandb(self, points: Sequence[Mapping[str, float]]) -> None:
        import wandb

        identity = hashlib.sha256(str(self.run.root.resolve()).encode()).hexdigest()[:16]
        name = os.environ.get("WANDB_NAME", self.run.name)
        how: dict[str, Any] = {"id": identity, "resume": "allow", "name": name, "group": self.run.name}
        with wandb.init(project=self.wanted[WANDB], config=self.run.read_run(), job_type="arrivals", **how) as shown:
            first = shown.step  # online, the points before are there
            for point in points:
                if point["arrival"] >= first:
                    shown.log(dict(point), step=int(point["arrival"]))
