"""What the version before left behind, beside this file: a stream and runs of each kind, and how they were made.

``text.tar.xz`` and ``images.tar.xz`` hold, side by side:

    SOURCES, STREAM       what the stream was made from, and the stream
    finished/NAME         a run that is complete
    begun/NAME            the same run when its stage 0 was complete and nothing else had begun
    killed/NAME           the same run when SIGKILL had ended it in the middle of the training of stage 1

``commands.json`` has the command of each run, given in the folder of the stream with ``--run runs/NAME``, the sha256 of
its final weights, and the machine on which they came out so. ``make_archives.py`` made all of it.
"""

import hashlib
import json
import os
import platform
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
COMMANDS = HERE / "commands.json"
KINDS = ("text", "images")
STATES = ("finished", "begun", "killed")
# Threads share sums among themselves, each number of them in another order.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def read_commands() -> dict[str, Any]:
    return json.loads(COMMANDS.read_text())


def archive_of(kind: str) -> Path:
    return HERE / f"{kind}.tar.xz"


def unpack(kind: str, root: Path) -> Path:
    """Unpack an archive into a folder, and return the folder."""
    with tarfile.open(archive_of(kind)) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # CPython before 3.11.4 has none
        archive.extractall(root)
    return root


def take_over(archive: Path, kind: str, state: str, name: str, root: Path) -> Path:
    """Put a run and its stream into a folder in which the run's command can be given; return the run's folder."""
    shutil.copytree(archive / stream_of(kind), root / stream_of(kind), dirs_exist_ok=True)
    return shutil.copytree(archive / state / name, root / "runs" / name)


def stream_of(kind: str) -> str:
    return f"{kind}-stream"


def machine() -> dict[str, str]:
    """Return what decides in which order numbers are added up: where it is equal, results are, to the last bit."""
    return {
        "machine": platform.machine(),
        "vendor": _vendor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def _vendor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if sys.platform.startswith("linux") and cpuinfo.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


def stage_records(run: Path) -> list[dict[str, Any]]:
    """Return the records of the complete stages, without the time they took."""
    records = [json.loads(path.read_text()) for path in sorted(run.glob("stage-*/stage.json"))]
    return [{name: value for name, value in record.items() if name != "wall_seconds"} for record in records]


def weight_sums(run: Path) -> dict[str, str]:
    """Return the sha256 of the weights of every model of a run, by the path of its checkpoint in the run."""
    return {str(path.relative_to(run)): _weight_sum(path) for path in sorted(run.glob("**/checkpoint_last.pt"))}


def _weight_sum(path: Path) -> str:
    weights = torch.load(path, weights_only=True, map_location="cpu")["model"]
    return sha256_of(tensor for tensor in weights.values() if isinstance(tensor, torch.Tensor))


def sha256_of(tensors) -> str:
    """Return the sha256 of the tensors' bytes, in their order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
