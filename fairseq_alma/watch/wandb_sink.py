"""Points of a run for Weights & Biases, online or offline."""

import importlib.util
import os
import secrets
import shutil
from pathlib import Path
from typing import Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.files import as_record, read_json_object, write_json_atomically
from fairseq_alma.runs.records import WandbRecord
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.watch.arrival_curves import ArrivalPoint

WANDB = "--wandb-project"
WANDB_RECORD = "wandb.json"


class WandbSink:
    """Writes a run's points into one run of a project, over all launches.

    Args:
        run: the run.
        project: of Weights & Biases.
    """

    def __init__(self, run: RunFolder, project: str) -> None:
        self.run = run
        self.project = project

    def require(self) -> None:
        """See `arrival_curves.Sink`."""
        found = importlib.util.find_spec("wandb")
        # Weights & Biases makes a folder of its own name, which can be imported, and is of no use.
        if found is None or found.origin is None:
            raise AlmaError(
                f"{WANDB} {self.project}: Weights & Biases is not installed; pip install wandb, or leave the option out"
            )
        # Is there a login?
        self.write([])

    def write(self, points: Sequence[ArrivalPoint]) -> None:
        """See `arrival_curves.Sink`."""
        import wandb

        identity = wandb_id(self.run.root / WANDB_RECORD)
        try:
            shown = wandb.init(
                project=self.project,
                id=identity,
                resume="allow",
                name=os.environ.get("WANDB_NAME", self.run.name),
                group=self.run.name,
                job_type="arrivals",
                config=self.run.read_run(),
                settings=wandb.Settings(silent=True, console="off"),
            )
            shown.define_metric("arrival")
            shown.define_metric("*", step_metric="arrival")
            # Online, the points before this one are there already; offline, each launch writes all.
            first = shown.step
            for point in points:
                if point.arrival >= first:
                    shown.log({**point.figures, "arrival": point.arrival}, step=point.arrival)
            files = Path(shown.dir).parent
            shown.finish()
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split())
            raise AlmaError(
                f"{WANDB} {self.project}: Weights & Biases refuses ({reason}); call wandb login, or set "
                "WANDB_MODE=offline"
            ) from error
        finally:
            # Its threads and its service would be handed on to the processes that are started here.
            wandb.teardown()
        _remove_older(files, identity)


def wandb_id(path: Path) -> str:
    """Return the identity that Weights & Biases knows something by, drawn when it is asked for first.

    Args:
        path: the file that keeps it.
    """
    if not path.is_file():
        write_json_atomically(path, {"id": secrets.token_hex(4)})
    remedy = "remove the file; its curves begin anew"
    return as_record(read_json_object(path, remedy), WandbRecord, path, remedy).id


def _remove_older(files: Path, identity: str) -> None:
    """Remove what was written offline before: `wandb sync` would send each point once for each time it was written.

    Args:
        files: the folder just written.
        identity: of the run.
    """
    for folder in files.parent.glob(f"offline-run-*-{identity}*"):
        if folder.name != files.name:
            shutil.rmtree(folder, ignore_errors=True)
