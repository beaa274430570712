"""TensorBoard's event files, through the package that fairseq uses itself."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

EVENTS = "events.out.tfevents.*"
PACKAGES = {"tensorboard": "torch.utils.tensorboard", "tensorboardX": "tensorboardX"}


def can_write_events() -> bool:
    """Tell whether one of the packages is installed."""
    return any(importlib.util.find_spec(package) for package in PACKAGES)


def open_events(folder: Path, first_step: int) -> Any:
    """Return a ``SummaryWriter`` with a new event file.

    Args:
        folder: where the file goes.
        first_step: what TensorBoard has read from this step on, in older files of the folder, it forgets.
    """
    # Imported when it is needed: it takes seconds. fairseq takes the first of these that is there, too.
    installed = next(module for package, module in PACKAGES.items() if importlib.util.find_spec(package))
    return importlib.import_module(installed).SummaryWriter(str(folder), purge_step=first_step)


def rewind_curves(folder: Path, num_updates: int) -> None:
    """Take back what the curves of a training show beyond its last checkpoint: it will be done, and drawn, again.

    Args:
        folder: with the event files of the training, in whatever subfolders.
        num_updates: updates at that checkpoint; 0: the training begins from its start.
    """
    files = list(folder.rglob(EVENTS))
    if num_updates == 0:
        for file in files:
            file.unlink()
        return
    for parent in sorted({file.parent for file in files}):
        # Twice, because TensorBoard takes the first such note in a folder for the begin of it all.
        for _ in range(2):
            open_events(parent, num_updates + 1).close()
