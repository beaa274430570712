"""``alma-stream`` on streams of images: training and tests in this process."""

import argparse
import os
import shlex
from typing import TYPE_CHECKING, Any, Callable, Optional, Sequence

from fairseq_alma.backends.images.image_train_options import ImageTrainOptions
from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.data.stream import Stream
from fairseq_alma.learners.plan import StagePlan
from fairseq_alma.runs.run_display import RunDisplay, describe_stage
from fairseq_alma.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from fairseq_alma.backends.images.image_backend import ImageBackend


class ImageJob:
    """What alma-stream does with images; see `stream.Job`.

    Args:
        parser: for errors in the options after ``--``.
        arguments: what stands before ``--``.
        words: what stands after it.
        stream: the data.
    """

    unit = "image"
    recorded: tuple[str, ...] = (
        "wait",
        "replay",
        "drop_rest",
        "iid",
        "init",
        "num_members",
        "grow_every",
        "grow_share",
        "combine",
        "keep_checkpoints",
    )

    def __init__(
        self,
        parser: argparse.ArgumentParser,
        arguments: argparse.Namespace,
        words: Sequence[str],
        stream: Optional[Stream],
    ) -> None:
        assert stream is not None
        self.arguments = arguments
        self.images = ImageStream.open(stream.root)
        try:
            self.options = ImageTrainOptions(words, arguments.learner, self.images.has_photographs)
        except ValueError as error:
            parser.error(str(error))

    def train_options(self) -> dict[str, Any]:
        """Return what run.json says of the options after ``--``, the paper's values included."""
        return self.options.as_dict()

    def print_plan(self, plans: Sequence[StagePlan]) -> None:
        """Print, for the stages that were asked for, fairseq's command that trains one model on the same images."""
        arguments = self.arguments
        print("# all stages run in one process; the commands train a single model on the same images, from scratch")
        for plan in plans:
            if arguments.stage not in (None, plan.stage.index):
                continue
            print(f"# {describe_stage(plan, len(plans))}: {_describe_trainings(plan)}")
            words = ["fairseq-train", str(arguments.stream), "--user-dir", "fairseq_alma"]
            words += ["--task", "alma_image_classification", "--megabatch", str(plan.stage.last_arrival)]
            words += ["--wait", str(len(plan.stage.arrivals))] + ["--replay"] * arguments.replay
            words += ["--criterion", "alma_image_cross_entropy", "--seed", str(plan.trainings[0].seed)]
            print(shlex.join([*words, *self.options.words()]))

    def work(self) -> Callable[[StagePlan], float]:
        """Return how the trainings of two stages compare: by their images."""
        return lambda plan: float(len(plan.stage.megabatches))

    def check(self) -> None:
        """Read the options as fairseq does, and build a network."""
        # Before torch is imported: networks this small, on a machine that is not idle, are slower with several threads.
        if "mlp" in self.options.arch:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        from fairseq_alma.backends.images.image_settings import ImageSettings

        num_joint = self.arguments.num_members if self.arguments.learner == "umix" else 1
        self.settings = ImageSettings(self.images, self.options, num_joint)
        if self.arguments.learner == "firefly":
            self.settings.check_share(self.arguments.grow_share)

    def backends(self, runs: Sequence[tuple[RunFolder, RunDisplay, Sequence[StagePlan]]]) -> "list[ImageBackend]":
        """Return what trains and tests; those of several seeds train side by side."""
        from fairseq_alma.backends.images.image_backend import ImageBackend

        backends = [ImageBackend(self.settings, folder, display, len(plans)) for folder, display, plans in runs]
        everyone = [(backend.models, plans) for backend, (_, _, plans) in zip(backends, runs, strict=True)]
        for number, backend in enumerate(backends):
            backend.companions = everyone[:number] + everyone[number + 1 :]
        return backends


def _describe_trainings(plan: StagePlan) -> str:
    """Say what is trained, from where, and what grows."""
    first = plan.trainings[0]
    text = "train" if first.start is None else f"go on from stage {first.start.stage} with"
    text += (
        f" {len(plan.trainings) * first.num_joint} models" if len(plan.trainings) * first.num_joint > 1 else " a model"
    )
    if first.growth is not None:
        text += f", after growth ({first.growth.method})"
    return text + (f"; {len(plan.predictors)} predict" if len(plan.predictors) > 1 else "")
