"""Back end of ``alma-stream`` for streams of images. It trains and tests all stages in this process."""

import copy
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, Optional, Sequence

from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.images.image_train_options import ImageTrainOptions, feature_options
from fairseq_alma.learners.learner import ModelId, StagePlan, Training
from fairseq_alma.options import without
from fairseq_alma.runs.loop import Run, StageWork, Step
from fairseq_alma.runs.run_folder import RunFolder, predicting_checkpoint
from fairseq_alma.runs.study import RunRequest, seconds_of
from fairseq_alma.training.feature import Features, Setting
from fairseq_alma.watch.run_display import describe_stage

if TYPE_CHECKING:
    from fairseq_alma.images.stage_trainer import StageTrainer


class ImageJob:
    """Back end of ``alma-stream`` for streams of images, with the options of the runs; see `loop.Backend`.

    Args:
        request: options of ``alma-stream``.
        own_words: command-line arguments before ``--``.
        words: command-line arguments after ``--``.
        stream: stream of images.

    Raises:
        ValueError: an option after ``--`` is invalid.
    """

    unit = "image"
    trainer: "Optional[StageTrainer]" = None  # set by the function that `prepare` returns

    def __init__(
        self, request: RunRequest, own_words: Sequence[str], words: Sequence[str], stream: Optional[Stream]
    ) -> None:
        assert stream is not None  # only a text job supports runs without a stream
        self.request, self.own_words = request, own_words
        self.images = ImageStream.open(stream.root)
        self.options = ImageTrainOptions(words, request.learner, self.images.has_photographs, request.preset)
        self.overridden: tuple[str, ...] = self.options.overridden
        self.features = request.features.with_options(self.options.values_of(feature_options().values()))

    def last(self, name: str) -> Optional[tuple[str, ...]]:
        return self.options.values.get(name)

    def train_options(self) -> dict[str, str]:
        return {name: " ".join(values) for name, values in self.options.values.items()}

    def prepare(self, plans: Sequence[StagePlan]) -> "Callable[[Sequence[Run]], ImageJob]":
        """Check the options and the validation images. Return a function that creates the back end for given runs."""
        for plan in plans:
            if not len(self.images.indices("valid", plan.stage.megabatches)):
                raise AlmaError(
                    f"{self.images.stream.root}: stage {plan.stage.index} has no validation images to select the best "
                    "epoch; prepare the stream with fewer mega-batches, or increase --wait"
                )
        # Torch reads OMP_NUM_THREADS on import. On a busy machine, small networks are slower with several threads.
        if "mlp" in self.options.arch:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        # Import fairseq first: fairseq imports and registers our models, which fails if they are partly imported.
        import fairseq  # noqa: F401

        from fairseq_alma.images.firefly import amount_to_add
        from fairseq_alma.images.image_settings import ImageSettings
        from fairseq_alma.images.stage_trainer import StageTrainer
        from fairseq_alma.training.processes import keep_freed_memory

        trainings = [training for plan in plans for training in plan.trainings]
        settings = ImageSettings(self.images, self.options, trainings[0].num_joint, trainings[0].joint_logits)
        for growth in {training.growth for training in trainings if training.growth is not None}:
            if growth.method == "firefly":
                sizes = settings.images.shape[0], int(settings.cfg.model.channels), settings.images.num_classes
                amount_to_add(*sizes, growth.share, growth.share_of)  # raises AlmaError if the share is too small
        features = Features(self.features.each, Setting(settings.device.type, str(settings.cfg.optimizer._name)))
        features.prepare()

        def begin(runs: Sequence[Run]) -> ImageJob:
            job, request = copy.copy(self), self.request
            keep_freed_memory()
            how = (request.run, request.keep_checkpoints, features, seconds_of(request.save_every))
            job.trainer = StageTrainer(settings, runs, *how)
            return job

        return begin

    def print_plan(self, plans: Sequence[StagePlan], folder: RunFolder) -> None:
        """Print one command for each stage, with all training options."""
        print("# alma-stream runs all stages in one process; to run single stages, use these commands in this order")
        own = without(self.own_words, {"--dry-run": 0, "--stage": 1})
        for plan in self.request.chosen(plans):
            first, num_models = plan.trainings[0], len(plan.trainings) * plan.trainings[0].num_joint
            text = f"train {num_models} models" if num_models > 1 else "train a model"
            text += "" if first.start is None else f", starting from stage {first.start.stage}"
            if first.growth is not None:
                text += f", after growth ({first.growth.method})"
            if len(plan.predictors) > 1:
                text += f"; {len(plan.predictors)} models predict"
            print(f"# {describe_stage(plan, len(plans))}: {text}")
            command = ["alma-stream", *own, "--stage", str(plan.stage.index)]
            print(f"{shlex.join(command)} -- {shlex.join(self.options.words())}")

    def steps(self, folder: RunFolder, plan: StagePlan) -> "list[ImageStep]":
        groups = [tuple(plan.trainings)]
        if self.request.trains_members_separately:
            groups = [(training,) for training in plan.trainings]
        return [*(ImageStep(self, folder, plan, group) for group in groups), ImageStep(self, folder, plan, ())]

    def predictors(self, folder: RunFolder, plan: StagePlan) -> list[Path]:
        """Return the path of the checkpoint of each model that predicts after the stage."""
        return [predicting_checkpoint(folder, model, self.features.predicts_with) for model in plan.predictors]

    def keep_only(self, folder: RunFolder, stages: range, needed: Sequence[ModelId], gone: Sequence[ModelId]) -> None:
        assert self.trainer is not None
        self.trainer.stores[folder.root].remove(gone)


@dataclass(frozen=True)
class ImageStep(Step):
    """Step of a stage: train ``trainings`` in one network, or test the predictors if ``trainings`` is empty."""

    job: ImageJob
    folder: RunFolder
    plan: StagePlan
    trainings: tuple[Training, ...]

    @property
    def trains(self) -> tuple[ModelId, ...]:
        return tuple(training.model for training in self.trainings)

    def is_done(self, model: Optional[ModelId] = None) -> bool:
        assert self.job.trainer is not None
        store = self.job.trainer.stores[self.folder.root]
        models = [each for each in self.trains if model in (None, each)]
        return bool(self.trainings) and all(store.is_complete(each) for each in models)

    def run(self, work: StageWork) -> Mapping[str, Any]:
        assert self.job.trainer is not None
        return self.job.trainer.train(work, self.trainings) if self.trainings else self.job.trainer.test(work)
