"""Which curves the user wants to watch, and where they go; asked for with fairseq's own options.

``--tensorboard-logdir DIR`` makes ``DIR/RUN/`` the one log folder of the run, RUN being the name of its folder:
``arrivals/`` has the figures of `ArrivalCurves`, ``stage-NNN/member-M/`` what fairseq-train says of each update, which
would overwrite one another in one place. With ``--wandb-project`` the run and each training are a run each, in one
group.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Optional

from fairseq_alma.learners.plan import ModelId
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.watch.arrival_curves import Sink
from fairseq_alma.watch.tensorboard_sink import TENSORBOARD, TensorBoardSink, rewind_curves
from fairseq_alma.watch.wandb_sink import WANDB, WandbSink, wandb_id

CURVE_OPTIONS = (TENSORBOARD, WANDB)


@dataclass(frozen=True)
class CurveOptions:
    """The curves that a user wants.

    Attributes:
        tensorboard: folder for TensorBoard, shared by as many runs as one likes; None: not wanted.
        wandb_project: project of Weights & Biases; None: not wanted.
    """

    tensorboard: Optional[Path] = None
    wandb_project: Optional[str] = None

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> "CurveOptions":
        """Find out from the options after ``--``: option and value.

        Raises:
            ValueError: one of the options is cut short or without its value.
        """
        for full in CURVE_OPTIONS:
            for name in options:
                if name != full and len(name) > 4 and full.startswith(name):
                    raise ValueError(f"{name} after the --: write {full}")
            if full in options and not options[full]:
                what = "a folder" if full == TENSORBOARD else "the name of a project"
                raise ValueError(f"{full} after the --: {what} is needed behind it")
        folder = options.get(TENSORBOARD)
        return cls(Path(folder) if folder else None, options.get(WANDB))

    def sinks(self, run: RunFolder) -> list[Sink]:
        """Return where the points of a run go."""
        sinks: list[Sink] = []
        if self.tensorboard is not None:
            sinks.append(TensorBoardSink(run, self.tensorboard))
        if self.wandb_project is not None:
            sinks.append(WandbSink(run, self.wandb_project))
        return sinks

    def curves(self, run: RunFolder, model: ModelId) -> Path:
        """Return the folder for the curves of one training."""
        assert self.tensorboard is not None
        return self.tensorboard / _name(run, model)

    def rewind(self, run: RunFolder, model: ModelId, num_updates: int) -> None:
        """Take the curves of a training back to its last checkpoint, so that nothing is drawn twice.

        Args:
            run: the run.
            model: that is trained.
            num_updates: updates at the checkpoint; 0: the training begins from its start.
        """
        if self.tensorboard is not None:
            rewind_curves(self.curves(run, model), num_updates)
        if num_updates == 0:
            _identity_file(run, model).unlink(missing_ok=True)

    def wandb_environment(self, run: RunFolder, model: ModelId) -> dict[str, str]:
        """Return the environment that names a training to Weights & Biases."""
        if self.wandb_project is None:
            return {}
        return {"WANDB_NAME": _name(run, model), "WANDB_RUN_GROUP": run.name}

    def wandb_identity(self, run: RunFolder, model: ModelId) -> dict[str, str]:
        """Return the environment by which a training that was cut off resumes its curves."""
        if self.wandb_project is None:
            return {}
        return {"WANDB_RUN_ID": wandb_id(_identity_file(run, model)), "WANDB_RESUME": "allow"}


def _name(run: RunFolder, model: ModelId) -> str:
    return f"{run.name}/{run.model_folder(model).relative_to(run.root)}"


def _identity_file(run: RunFolder, model: ModelId) -> Path:
    return run.stage_folder(model.stage) / f"wandb-member-{model.member}.json"
