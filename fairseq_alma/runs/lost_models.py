"""Models that a stage takes from others and that are gone or damaged: which stages must run again to have them back."""

from typing import TYPE_CHECKING, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.plan import ModelId, StagePlan
from fairseq_alma.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from fairseq_alma.runs.loop import Backend


def require_models(folder: RunFolder, plans: Sequence[StagePlan], stage: int, backend: "Backend") -> None:
    """Raise AlmaError unless the models of other stages that a stage needs are there.

    Args:
        folder: of the run.
        plans: of all its stages.
        stage: that is about to run.
        backend: knows the models.

    Raises:
        AlmaError: names the first model that is not there, and all stages that must run again: the weights that they
            start from may be gone as well.
    """
    lost = [model for model in _needed(folder, plans[stage], backend) if not backend.has_weights(folder, model)]
    if not lost:
        return
    again: set[int] = set()
    left = [*lost]
    while left:
        model = left.pop()
        if model.stage not in again and not backend.has_weights(folder, model):
            again.add(model.stage)
            left += _needed(folder, plans[model.stage], backend)
    path = folder.checkpoint(lost[0])
    which = "that stage" if len(again) == 1 else "those stages"
    raise AlmaError(
        f"{path}: {'damaged' if path.is_file() else 'not there'}, but a later stage needs it; remove "
        f"{', '.join(str(folder.stage_folder(each)) for each in sorted(again))} to train {which} again"
    )


def _needed(folder: RunFolder, plan: StagePlan, backend: "Backend") -> list[ModelId]:
    """Return the models of other stages that a stage starts from, where it is not trained yet, or predicts with."""
    missing = [training for training in plan.trainings if not backend.has_weights(folder, training.model)]
    starts = [training.start for training in missing if training.start is not None]
    return starts + [model for model in plan.predictors if model.stage != plan.stage.index]
