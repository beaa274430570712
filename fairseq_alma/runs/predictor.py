"""Which checkpoint of a language model's run predicts: of a trained model, and of all that predict after a stage."""

from pathlib import Path
from typing import Any, Mapping

from fairseq_alma.checkpoints import LAST_CHECKPOINT
from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.plan import ModelId
from fairseq_alma.runs.run_folder import RunFolder

AVERAGE = "checkpoint_average.pt"
"""The averaged weights of a trained model, as a checkpoint of their own."""
BEST = "checkpoint_best.pt"
"""Where fairseq-train keeps the checkpoint with the lowest loss on ``valid``."""
BRANCH = "branch"
"""Folder of the copy of a model whose learning rate decays."""
ENSEMBLE_FILE = "ensemble.pt"


def predicting_checkpoint(folder: RunFolder, model: ModelId, predicts_with: str) -> Path:
    """Return the checkpoint by which a trained model predicts; see `AnytimeOptions.predicts_with`."""
    own = folder.model_folder(model)
    files = {"average": own / AVERAGE, "best": own / BEST, "branch": own / BRANCH / LAST_CHECKPOINT}
    return files.get(predicts_with, folder.checkpoint(model))


def stage_predictor(folder: RunFolder, record: Mapping[str, Any]) -> Path:
    """Return the checkpoint whose figures the record of a stage has.

    Args:
        folder: the run.
        record: of the stage.

    Raises:
        AlmaError: it is not kept.
    """
    stage = record["stage"]
    ensemble = folder.stage_folder(stage) / ENSEMBLE_FILE
    if ensemble.is_file():
        return ensemble
    model, members = ModelId(stage, 0), folder.members(stage)
    # Members of an ensemble that grows are numbered on from stage to stage; a uniform mixture is one model.
    if members and members != [model]:
        raise AlmaError(
            f"{ensemble}: the ensemble of stage {stage} is not kept, as its members are; join these by alma-ensemble, "
            "or run alma-stream --keep-checkpoints"
        )
    found = predicting_checkpoint(folder, model, record.get("anytime", {}).get("predicts_with", "last"))
    if not found.is_file():
        raise AlmaError(
            f"{found}: the weights of stage {stage} are not kept; alma-stream --keep-checkpoints keeps those of all "
            "stages, without it load_model(run) has the newest"
        )
    return found
