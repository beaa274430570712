"""Algorithm 1, once, for every learner and every kind of data.

Source: Algorithm 1 of the paper. What is trained and what predicts comes as plans (``strategy``); how it is trained and
tested is the back end's: commands in processes of their own for text, a training loop in this process for images.
"""

from typing import Any, Iterator, Mapping, Optional, Protocol, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.plan import Model, NeededModels, StagePlan, Training
from fairseq_alma.runs.run_folder import STAGE_RECORD, RunFolder


class Backend(Protocol):
    """Carries out the parts of a stage. Every step can be repeated: after a kill it goes on where it can."""

    def train(self, plan: StagePlan, lock: int) -> Mapping[str, Any]:
        """Train the plan's models to their end.

        Returns:
            ``num_updates``, those of each trained model (all get as many); ``train_tokens`` (or ``train_images``) and
            ``train_flops``, summed over the trained models.
        """

    def train_member(self, plan: StagePlan, training: Training, locks: Sequence[int]) -> Any:
        """Train one of the plan's models to its end, unless it is there already."""

    def is_trained(self, model: Model) -> bool:
        """Tell whether a model is trained to its end."""

    def test(self, plan: StagePlan, lock: int) -> Mapping[str, Any]:
        """Test what predicts after the stage.

        Returns:
            ``num_params``, ``num_experts``, ``num_members``, ``test_flops_per_token`` (or ``..._per_image``),
            ``valid`` and ``test``.
        """

    def keep_only(self, stage: int, needed: Sequence[Model]) -> None:
        """Remove the weights of the stages up to ``stage``, except what ``needed`` names."""


class Reporter(Protocol):
    """Tells the user about whole stages."""

    def skipped(self, plan: StagePlan, record: Mapping[str, Any]) -> None:
        """Say that a stage was complete already."""

    def completed(self, plan: StagePlan, record: Mapping[str, Any]) -> None:
        """Say that a stage is complete now."""

    def trained(self, plan: StagePlan, training: Training) -> None:
        """Say that one member of a stage is trained, and that the stage waits for the others."""


def each_stage(
    folder: RunFolder,
    plans: Sequence[StagePlan],
    backend: Backend,
    reporter: Reporter,
    only: Optional[int] = None,
    keep_checkpoints: bool = False,
) -> Iterator[bool]:
    """Run the stages that are not complete yet, in order.

    Args:
        folder: the run; its run.json is there already.
        plans: of all stages of the stream.
        backend: trains and tests.
        reporter: is told of every stage.
        only: run this stage alone; None: all.
        keep_checkpoints: remove nothing.

    Yields:
        After each stage whether it ran; False: it was complete.
    """
    needed = None if keep_checkpoints else NeededModels(plans)
    complete: set[int] = set()
    for plan in plans:
        if only is not None and plan.stage.index != only:
            continue
        record, ran = _finish_stage(folder, plan, backend, needed, complete)
        complete.add(plan.stage.index)
        if ran:
            reporter.completed(plan, record)
        else:
            reporter.skipped(plan, record)
        yield ran


def in_step(runs: Sequence[Iterator[bool]]) -> list[int]:
    """Run a stage of each run in turn, then the next stage: so that a stage can be trained for all of them at once.

    Args:
        runs: what `each_stage` returns for runs with the same stages.

    Returns:
        Number of stages that ran, of each run.
    """
    return [sum(ran) for ran in zip(*zip(*runs, strict=True), strict=True)]


def train_member(
    folder: RunFolder,
    plans: Sequence[StagePlan],
    member: int,
    backend: Backend,
    reporter: Reporter,
    only: Optional[int] = None,
) -> None:
    """Train one member alone, in the stages that are not complete yet; other members may be trained at the same time.

    No stage becomes complete by it: that takes `each_stage`, which finds all members there.

    Args:
        folder: the run; its run.json is there already.
        plans: of all stages of the stream.
        member: its number; stages that do not train it are passed over.
        backend: trains.
        reporter: is told of every stage.
        only: train it in this stage alone; None: in all.
    """
    for plan in plans:
        training = plan.training_of(member)
        if training is None or (only is not None and plan.stage.index != only):
            continue
        record = _complete_record(folder, plan)
        if record is not None:
            reporter.skipped(plan, record)
            continue
        start = training.start
        if start is not None and folder.read_stage(start.stage) is None and not backend.is_trained(start):
            raise AlmaError(
                f"{folder.model_folder(start)}: not trained to its end, and member {member} of stage "
                f"{plan.stage.index} starts from there; run --stage {start.stage} --member {start.member} first"
            )
        with folder.lock_member(training.model) as locks:
            clock = folder.start_clock(plan.stage.index, member)
            backend.train_member(plan, training, locks)
            clock.stop()
        reporter.trained(plan, training)


def _finish_stage(
    folder: RunFolder, plan: StagePlan, backend: Backend, needed: Optional[NeededModels], complete: set[int]
) -> tuple[dict[str, Any], bool]:
    """Bring a stage to its end: run it unless it is complete, then tidy up.

    Args:
        folder: the run.
        plan: of the stage.
        backend: trains and tests.
        needed: which weights must stay; None: all.
        complete: stages that are known to be complete.

    Returns:
        The stage's record, and whether it ran.
    """
    stage = plan.stage.index
    record = _complete_record(folder, plan)
    if record is not None and folder.is_tidy(stage):
        return record, False
    if record is None:
        _require_starts(folder, plan, complete)
    with folder.lock_stage(stage) as lock:
        # Another alma-stream may have completed it in the meantime.
        record = _complete_record(folder, plan)
        ran = record is None
        if record is None:
            record = _run_stage(folder, plan, backend, lock)
        if needed is not None:
            backend.keep_only(stage, needed.after(stage))
        folder.mark_tidy(stage)
    return record, ran


def _run_stage(folder: RunFolder, plan: StagePlan, backend: Backend, lock: int) -> dict[str, Any]:
    """Train and test one stage, and write its record last."""
    clock = folder.start_clock(plan.stage.index)
    trained = backend.train(plan, lock)
    tested = backend.test(plan, lock)
    record = {
        "stage": plan.stage.index,
        "megabatches": list(plan.stage.megabatches),
        **trained,
        **tested,
        "wall_seconds": round(clock.seconds() + folder.seconds_of_members(plan.stage.index), 1),
    }
    folder.write_stage(plan.stage.index, record)
    return record


def _complete_record(folder: RunFolder, plan: StagePlan) -> Optional[dict[str, Any]]:
    """Return the record of a complete stage, once it is sure that it is the record of this plan."""
    record = folder.read_stage(plan.stage.index)
    if record is None:
        return None
    path = folder.stage_folder(plan.stage.index) / STAGE_RECORD
    if record["megabatches"] != list(plan.stage.megabatches):
        raise AlmaError(
            f"{path}: trained on mega-batches {record['megabatches']}, but the stream as it is now gives this "
            f"stage {list(plan.stage.megabatches)}; a stream that is to grow needs --drop-rest; give another --run"
        )
    return record


def _require_starts(folder: RunFolder, plan: StagePlan, complete: set[int]) -> None:
    """Raise AlmaError unless the stages that this one takes weights from are complete."""
    starts = {training.start.stage for training in plan.trainings if training.start is not None}
    others = {model.stage for model in plan.predictors} - {plan.stage.index}
    for stage in sorted((starts | others) - complete):
        if folder.read_stage(stage) is None:
            use, remedy = "predicts with", "run that stage first"
            if stage in starts:
                use, remedy = "starts from", "run that stage first, or use --init scratch"
            raise AlmaError(
                f"{folder.stage_folder(stage) / STAGE_RECORD}: not there, and stage {plan.stage.index} {use} "
                f"the weights of stage {stage}; {remedy}"
            )
