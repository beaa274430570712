"""``alma-stream`` on streams of images: training and tests in this process."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Optional, Sequence

from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.images.image_train_options import ImageTrainOptions
from fairseq_alma.learners.plan import StagePlan
from fairseq_alma.options import without
from fairseq_alma.runs.loop import Run
from fairseq_alma.runs.request import RunRequest
from fairseq_alma.runs.run_folder import EVALUATED_FILE, RunFolder, predicting_checkpoint
from fairseq_alma.terminal import shell_words
from fairseq_alma.training.feature import Features, Setting
from fairseq_alma.watch.run_display import describe_stage

if TYPE_CHECKING:
    from fairseq_alma.images.image_backend import ImageBackend


class ImageJob:
    """What alma-stream does with images; see `request.Job`.

    Args:
        request: what stands before ``--``.
        own_words: the same as it was typed.
        words: what stands after it.
        stream: the data.

    Raises:
        ValueError: an option after ``--`` is wrong.
    """

    unit = "image"

    def __init__(
        self, request: RunRequest, own_words: Sequence[str], words: Sequence[str], stream: Optional[Stream]
    ) -> None:
        assert stream is not None  # of text, where there is none
        self.request, self.own_words = request, own_words
        self.images = ImageStream.open(stream.root)
        self.options = ImageTrainOptions(words, request.learner, self.images.has_photographs, request.preset)
        self.overridden: tuple[str, ...] = self.options.overridden
        self.features = request.features.with_options(self.options.feature_values())

    def last(self, name: str) -> Optional[tuple[str, ...]]:
        """Return the values of an option after ``--``; see `request.Job`."""
        return self.options.last(name)

    def train_options(self) -> dict[str, str]:
        """Return what run.json says of the options after ``--``, the paper's values included."""
        return self.options.as_dict()

    def print_plan(self, plans: Sequence[StagePlan]) -> None:
        """Print the commands that run the stages one by one, with every option of the training."""
        print("# the stages run in one process; each of these commands runs one of them, in this order")
        for plan in self.request.chosen(plans):
            print(f"# {describe_stage(plan, len(plans))}: {_describe_trainings(plan)}")
            own = shell_words(
                [
                    "alma-stream",
                    *without(self.own_words, {"--dry-run": 0, "--stage": 1}),
                    "--stage",
                    str(plan.stage.index),
                ]
            )
            print(f"{own} -- {shell_words(self.options.all_words())}")

    def predictor(self, folder: RunFolder, plan: StagePlan) -> tuple[Path, Sequence[Path]]:
        """Return the checkpoint that stands for what predicts after a stage; see `request.Job`."""
        members = [predicting_checkpoint(folder, model, self.features.predicts_with) for model in plan.predictors]
        if len(members) == 1:
            return members[0], ()
        return folder.stage_folder(plan.stage.index) / EVALUATED_FILE, members

    def work(self) -> Callable[[StagePlan], float]:
        """Return how the trainings of two stages compare: by their images."""
        return lambda plan: float(len(plan.stage.megabatches))

    def prepare(self, plans: Sequence[StagePlan]) -> "Callable[[Sequence[Run]], ImageBackend]":
        """Read the options as fairseq does, and build a network; see `request.Job`."""
        self._check_validation(plans)
        # Before torch is imported: networks this small, on a machine that is not idle, are slower with several threads.
        if "mlp" in self.options.arch:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        import fairseq  # noqa: F401  first: it registers the models here, which must not be half-way through their import

        from fairseq_alma.images.image_backend import ImageBackend
        from fairseq_alma.images.image_settings import ImageSettings

        trainings = [training for plan in plans for training in plan.trainings]
        settings = ImageSettings(self.images, self.options, trainings[0].num_joint, trainings[0].joint_logits)
        for growth in {training.growth for training in trainings if training.growth is not None}:
            settings.check_growth(growth)
        group_size = self.request.group_size if self.request.trains_members_apart else None
        setting = Setting(settings.device.type, str(settings.cfg.optimizer._name))
        features = Features(self.features.each, setting)
        features.prepare()
        how = (group_size, self.request.keep_checkpoints, features)
        return lambda runs: ImageBackend(settings, runs, self.request.run, *how)

    def _check_validation(self, plans: Sequence[StagePlan]) -> None:
        """Raise AlmaError if a stage has nothing by which its best epoch is told."""
        for plan in plans:
            if not len(self.images.valid_indices(plan.stage.megabatches)):
                raise AlmaError(
                    f"{self.images.stream.root}: stage {plan.stage.index} has no validation images, by which its best "
                    "epoch is told; prepare the stream with fewer mega-batches, or gather more for a stage (--wait)"
                )


def _describe_trainings(plan: StagePlan) -> str:
    """Say what is trained, from where, and what grows."""
    first = plan.trainings[0]
    text = "train" if first.start is None else f"resume from stage {first.start.stage} with"
    number = len(plan.trainings) * first.num_joint
    text += f" {number} models" if number > 1 else " a model"
    if first.growth is not None:
        text += f", after growth ({first.growth.method})"
    return text + (f"; {len(plan.predictors)} predict" if len(plan.predictors) > 1 else "")
