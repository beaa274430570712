"""Which curves the user wants to watch, and where they go; asked for with fairseq's own options.

``--tensorboard-logdir DIR`` makes ``DIR/RUN/`` the one log folder of the run, RUN being the name of its folder:
``arrivals/`` has the figures of `ArrivalLog`, ``stage-NNN/member-M/`` what fairseq-train says of each update, which
would overwrite one another in one place. With ``--wandb-project`` the run and each training are a run each, in one
group.
"""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Optional

from fairseq_alma.errors import AlmaError
from fairseq_alma.json_files import as_record, read_json_object, write_json_atomically
from fairseq_alma.learners.plan import ModelId
from fairseq_alma.runs.records import WandbRecord
from fairseq_alma.runs.run_folder import RUN_RECORD, RunFolder
from fairseq_alma.runs.tensorboard_files import rewind_curves

TENSORBOARD = "--tensorboard-logdir"
WANDB = "--wandb-project"
LIVE_OPTIONS = (TENSORBOARD, WANDB)
OWNER = "run.txt"
WANDB_RECORD = "wandb.json"


@dataclass(frozen=True)
class LiveLog:
    """The curves that a user wants.

    Attributes:
        tensorboard: folder for TensorBoard, shared by as many runs as one likes; None: not wanted.
        wandb_project: project of Weights & Biases; None: not wanted.
    """

    tensorboard: Optional[Path] = None
    wandb_project: Optional[str] = None

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> "LiveLog":
        """Find out from the options after ``--``: option and value.

        Raises:
            ValueError: one of the options is cut short or without its value.
        """
        for full in LIVE_OPTIONS:
            for name in options:
                if name != full and len(name) > 4 and full.startswith(name):
                    raise ValueError(f"{name} after the --: write {full}")
            if full in options and not options[full]:
                what = "a folder" if full == TENSORBOARD else "the name of a project"
                raise ValueError(f"{full} after the --: {what} is needed behind it")
        folder = options.get(TENSORBOARD)
        return cls(Path(folder) if folder else None, options.get(WANDB))

    def folder(self, run: RunFolder) -> Path:
        """Return the log folder of a run."""
        assert self.tensorboard is not None
        return self.tensorboard / run_name(run)

    def curves(self, run: RunFolder, model: ModelId) -> Path:
        """Return the folder for the curves of one training."""
        return self.folder(run) / run.model_folder(model).relative_to(run.root)

    def claim_folder(self, run: RunFolder) -> None:
        """Make the log folder the run's own.

        Raises:
            AlmaError: another run of the same name uses it.
        """
        owner, me = self.folder(run) / OWNER, str(run.root.resolve())
        before = owner.read_text(encoding="utf-8").strip() if owner.is_file() else me
        # A run that was moved or removed has no claim.
        if before != me and (Path(before) / RUN_RECORD).is_file():
            raise AlmaError(
                f"{TENSORBOARD} {self.tensorboard}: {owner.parent} shows another run, {before}; "
                "give another folder, or the run's folder another name"
            )
        owner.parent.mkdir(parents=True, exist_ok=True)
        owner.write_text(f"{me}\n", encoding="utf-8")

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
            _training_record(run, model).unlink(missing_ok=True)

    def wandb_environment(self, run: RunFolder, model: ModelId) -> dict[str, str]:
        """Return the environment that names a training to Weights & Biases."""
        if self.wandb_project is None:
            return {}
        name = f"{run_name(run)}/{run.model_folder(model).relative_to(run.root)}"
        return {"WANDB_NAME": name, "WANDB_RUN_GROUP": run_name(run)}

    def wandb_identity(self, run: RunFolder, model: ModelId) -> dict[str, str]:
        """Return the environment by which a training that was cut off goes on with its curves."""
        if self.wandb_project is None:
            return {}
        return {"WANDB_RUN_ID": wandb_id(_training_record(run, model)), "WANDB_RESUME": "allow"}


def run_name(run: RunFolder) -> str:
    """Return what a run is called where it is shown: the name of its folder."""
    return run.root.resolve().name


def wandb_id(path: Path) -> str:
    """Return the identity that Weights & Biases knows something by, drawn when it is asked for first.

    Args:
        path: the file that keeps it.
    """
    if not path.is_file():
        write_json_atomically(path, {"id": secrets.token_hex(4)})
    remedy = "remove the file; its curves begin anew"
    return as_record(read_json_object(path, remedy), WandbRecord, path, remedy).id


def _training_record(run: RunFolder, model: ModelId) -> Path:
    return run.stage_folder(model.stage) / f"wandb-member-{model.member}.json"
