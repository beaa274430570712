"""Write the results of a run to TensorBoard and Weights & Biases, if an option of fairseq-train asks for it.

Arrivals and mega-batches are numbered from 0, as in files and options:

- ``--tensorboard-logdir DIR``: the results are in ``DIR/PARENT/RUN/arrivals``, and the logs of fairseq-train are in
  ``DIR/PARENT/RUN/stage-NNN/member-M``.
- ``--wandb-project NAME``: one W&B run for the arrivals and one W&B run for each training run, in one group.
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
CURVE_OPTIONS = {TENSORBOARD: "tensorboard", WANDB: "wandb"}  # option -> package that it requires
COSTS = ("num_updates", "train_tokens", "train_images", "train_flops", "wall_seconds")


def arrival_points(run: RunFolder, plans: Sequence[StagePlan]) -> list[dict[str, float]]:
    """Return one dict of results per arrival, from the end of the first stage to the end of the last complete stage.

    An arrival within a later stage has the results of the previous stage (paper, section 3.1) and zero cost.
    """
    points: list[dict[str, float]] = []
    for plan in plans:
        record = run.read_stage(plan.stage.index)
        if record is None:
            break
        for arrival in plan.stage.arrivals[:-1] if points else ():
            points.append({**points[-1], **{f"stage/{name}": 0.0 for name in COSTS}, "arrival": arrival})
        points.append({**_flatten(record), "arrival": plan.stage.arrivals[-1]})
    return points


def _flatten(record: Mapping[str, Any], group: str = "stage/") -> dict[str, float]:
    """Return the numbers of a record, except the stage index, by keys such as ``test/loss`` or ``stage/num_params``."""
    figures: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            figures.update(_flatten(value, f"{name}/"))
        elif isinstance(value, (int, float)) and name != "stage":
            figures[f"{group}{name}"] = float(value)
    return figures


def wandb_environment(run: RunFolder, model: Optional[ModelId] = None) -> dict[str, str]:
    """Return environment variables that name the W&B run of a training run, or of the arrivals if ``model`` is None."""
    name = run.name if model is None else f"{run.name}/{run.model_folder(model).relative_to(run.root)}"
    identity = hashlib.sha256(f"{run.root.resolve()} {model}".encode()).hexdigest()[:16]
    return {"WANDB_NAME": name, "WANDB_RUN_GROUP": run.name, "WANDB_RUN_ID": identity, "WANDB_RESUME": "allow"}


class ArrivalCurves:
    """Writer of the results at each arrival to TensorBoard and W&B. Each launch replaces the run's TensorBoard files.

    Raises:
        AlmaError: a package that an option requires is not installed.
    """

    def __init__(self, run: RunFolder, plans: Sequence[StagePlan], options: Mapping[str, str]) -> None:
        self.run, self.plans = run, plans
        self.wanted = {name: options[name] for name in CURVE_OPTIONS if options.get(name)}
        self.num_written = 0
        self.writer: Any = None
        for option, value in self.wanted.items():
            package = CURVE_OPTIONS[option]
            found = importlib.util.find_spec(package)
            if found is None or found.origin is None:  # a folder named ``wandb`` is not the package
                raise AlmaError(f"{option} {value}: requires the package {package}; run pip install {package}")

    def catch_up(self, at_end: bool = False) -> None:
        """Write results of new arrivals to TensorBoard and, if ``at_end``, to W&B. On failure, only print a note."""
        try:
            points = arrival_points(self.run, self.plans) if self.wanted else []
            if TENSORBOARD in self.wanted:
                if self.writer is None:
                    from torch.utils.tensorboard import SummaryWriter

                    folder = Path(self.wanted[TENSORBOARD]) / self.run.name / "arrivals"
                    suffix = f".{wandb_environment(self.run)['WANDB_RUN_ID']}"  # another run may have the same name
                    for old in folder.glob(f"events.out.tfevents.*{suffix}"):
                        old.unlink()
                    self.writer = SummaryWriter(str(folder), filename_suffix=suffix)
                for point in points[self.num_written :]:
                    for name, value in point.items():
                        self.writer.add_scalar(name, value, int(point["arrival"]))
                self.writer.flush()
                self.num_written = len(points)
            if WANDB in self.wanted and at_end:
                import wandb

                with wandb.init(
                    project=self.wanted[WANDB],
                    job_type="arrivals",
                    id=wandb_environment(self.run)["WANDB_RUN_ID"],
                    group=self.run.name,
                    resume="allow",
                    name=os.environ.get("WANDB_NAME", self.run.name),
                    config=self.run.read_run(),
                ) as shown:
                    for point in points:
                        # A resumed W&B run has the arrivals that earlier launches wrote.
                        if point["arrival"] >= shown.step:
                            shown.log(dict(point), step=int(point["arrival"]))
        except Exception as error:
            print_line(f"note: cannot write curves of {self.run.root} ({' '.join(str(error).split())})", sys.stderr)
