"""Results of a run that must not depend on interruptions."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch


def stage_records(run: Path) -> list[dict[str, Any]]:
    """Return the records of the complete stages, without the wall time."""
    records = [json.loads(path.read_text()) for path in sorted(run.glob("stage-*/stage.json"))]
    return [{name: value for name, value in record.items() if name != "wall_seconds"} for record in records]


def weight_sums(run: Path) -> dict[str, str]:
    """Return the sha256 of the weights of every model of a run, by the path of its checkpoint in the run."""
    return {str(path.relative_to(run)): _weight_sum(path) for path in sorted(run.glob("**/checkpoint_last.pt"))}


def _weight_sum(path: Path) -> str:
    weights = torch.load(path, weights_only=True, map_location="cpu")["model"]
    digest = hashlib.sha256()
    for tensor in weights.values():
        if isinstance(tensor, torch.Tensor):
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
