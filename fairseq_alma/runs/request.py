"""What ``alma-stream`` was asked for, in types, and what each kind of data makes of it."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Protocol, Sequence

from fairseq_alma.learners.learner import LEARNERS, Learner, build_learner, plan_stages
from fairseq_alma.learners.plan import Stage, StagePlan, stages
from fairseq_alma.learners.presets import filled
from fairseq_alma.options import flag
from fairseq_alma.runs.loop import Run
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.runs.steps import Backend
from fairseq_alma.runs.study import SAVE_EVERY_UPDATES, PartOptions, ProcessOptions, StudyOptions
from fairseq_alma.training.feature import Features
from fairseq_alma.training.stage_ends import BestCheckpoint


@dataclass(frozen=True, kw_only=True)
class RunRequest(StudyOptions, PartOptions, ProcessOptions):
    """Options of alma-stream, each of which was checked by itself.

    Attributes:
        learner: the class.
        learner_options: what the user gave of the learner's own options.
        features: what its trainings do beside learning, what runs on from stage to stage, and which model is tested.
        overridden: options of the learner that the preset sets and that the user gave with another value.
    """

    learner: type[Learner]
    learner_options: Mapping[str, Any]
    overridden: tuple[str, ...] = ()
    features: Features = field(default_factory=Features)

    @classmethod
    def of(cls, arguments: argparse.Namespace, learner: type[Learner], options: Mapping[str, Any]) -> "RunRequest":
        """Take the arguments of the same names, and fill in what a preset says of the learner's options."""
        names: list[str] = []
        if arguments.preset is not None:
            options, names = filled(options, arguments.preset.learner_options(learner.name))
        return cls.read(
            arguments,
            learner=learner,
            learner_options=options,
            overridden=tuple(map(flag, names)),
            features=Features.read(arguments),
        )

    def check(self, kind: str) -> None:
        """Raise ValueError, which begins with the option, if options contradict each other on a kind of data."""
        self._check_seeds(kind)
        given = [name for name in ("member", "jobs") if getattr(self, name) is not None]
        if given and len(self.seeds) > 1:
            raise ValueError(f"{flag(given[0])} goes with one --seed; give one call for each seed")
        if len(given) == 2:
            raise ValueError("--jobs trains all members, --member some; give one of them")
        if self.side_by_side is not None and not given:
            raise ValueError(
                "--side-by-side goes with --jobs or --member; without them all members are trained side by side"
            )
        if self.iid is not None and (self.wait != 1 or self.replay or self.drop_rest):
            raise ValueError("--iid is one stage: it does not go with --wait, --replay or --drop-rest")
        if kind == "images" and isinstance(self.save_every, int):
            raise ValueError(f"--save-every {self.save_every}: on images it is a time; give one such as 30s or 15m")
        if isinstance(self.save_every, str) and self.features[BestCheckpoint].best_checkpoint:
            raise ValueError(
                f"--save-every {self.save_every}: --best-checkpoint chooses among what is saved, which must not depend "
                "on the clock; give a number of updates"
            )
        if self.num_procs % self.nodes:
            raise ValueError(f"--nodes {self.nodes}: each needs as many processes; give --num-procs a multiple of it")
        if self.slurm is not None and given:
            raise ValueError(f"--slurm makes a job of each member; leave {flag(given[0])} out")
        if self.slurm is not None and len(self.seeds) > 1:
            raise ValueError("--slurm goes with one --seed; give one call for each seed")

    def _check_seeds(self, kind: str) -> None:
        for number, seed in enumerate(self.seeds):
            if seed in self.seeds[:number]:
                raise ValueError(f"--seed {seed}: given twice")
        if len(self.seeds) > 1 and kind == "images" and not self.learner.stacks_seeds:
            possible = ", ".join(sorted(name for name, each in LEARNERS["images"].items() if each.stacks_seeds))
            raise ValueError(f"--seed: several go with --learner {possible} on images; give one call for each")

    def record(self, kind: Optional[str] = None) -> dict[str, Any]:
        """Return what run.json says of the options, beside those of the learner."""
        given = {"iid": None} | super().record(kind) | self.features.record(kind)
        if self.features[BestCheckpoint].best_checkpoint:
            given["best_every"] = self.save_every or SAVE_EVERY_UPDATES  # which weights are looked at
        if kind == "images" and self.trains_members_apart:  # what is trained by itself differs in its last digits
            given["jobs"] = "given"
            given |= {"side_by_side": self.group_size} if self.group_size > 1 else {}
        return given

    @property
    def trains_members_apart(self) -> bool:
        """Whether members are trained in groups that are independent of each other, as several processes need it."""
        cluster = self.slurm is not None and self.learner.trains_members_alone
        return cluster or self.jobs is not None or self.member is not None

    @property
    def group_size(self) -> int:
        """Members of such a group."""
        return self.side_by_side or 1

    def folder(self, seed: int) -> RunFolder:
        """Return the folder of a seed's run: what --run says, or where there are several seeds a folder in it."""
        return RunFolder(self.run if len(self.seeds) == 1 else self.run / f"seed-{seed}")

    def build_learner(self, kind: str, seed: int) -> Learner:
        """Make the learner of one seed. Raises ValueError that begins with the option that is wrong."""
        return build_learner(self.learner, kind, seed, self.wait, self.learner_options)

    def plan(self, learner: Learner, kind: str, num_megabatches: int) -> list[StagePlan]:
        """Plan all stages of one run. Raises ValueError that begins with the option that is wrong."""
        planned = self.stages(num_megabatches)
        if self.stage is not None and not 0 <= self.stage < len(planned):
            raise ValueError(f"--stage {self.stage}: the run has stages 0 to {len(planned) - 1}")
        plans = plan_stages(learner, planned)
        if learner.looks_back and len(self.seeds) > 1:
            raise ValueError("--grow-when auto: seeds would not grow at the same time; give one call for each --seed")
        self._check_member(plans)
        return plans

    def chosen(self, plans: Sequence[StagePlan]) -> list[StagePlan]:
        """Return the plans of the stages that are run."""
        return [plan for plan in plans if self.stage in (None, plan.stage.index)]

    def stages(self, num_megabatches: int) -> list[Stage]:
        """Return the stages. Raises ValueError that begins with the option that leaves none."""
        if self.iid is not None:
            if self.iid > num_megabatches:
                raise ValueError(f"--iid {self.iid}: the stream has {num_megabatches} mega-batches; give at most that")
            return stages(num_megabatches, self.iid)[:1]
        planned = stages(num_megabatches, self.wait, self.replay, self.drop_rest)
        if not planned:
            raise ValueError(
                f"--wait {self.wait} --drop-rest: the stream has {num_megabatches} mega-batches, so no stage is left; "
                "give a smaller --wait"
            )
        return planned

    def _check_member(self, plans: Sequence[StagePlan]) -> None:
        if self.member is None:
            return
        members = sorted({training.model.member for plan in self.chosen(plans) for training in plan.trainings})
        for member in self.member:
            if member not in members:
                where = "the run trains" if self.stage is None else f"stage {self.stage} trains"
                raise ValueError(f"--member {member}: {where} members {', '.join(map(str, members))}")
        for plan in self.chosen(plans):
            for group in plan.groups(self.group_size):
                together = {training.model.member for training in group}
                if together & {*self.member} and not together <= {*self.member}:
                    names = " ".join(map(str, sorted(together)))
                    raise ValueError(f"--member: with --side-by-side {self.side_by_side} members {names} go together")


class Job(Protocol):
    """What differs between text and images. Made from the request, the stream and the words after ``--``.

    Attributes:
        unit: of the data, ``word`` or ``image``.
        overridden: options after ``--`` that the preset sets and that were given with another value.
    """

    unit: str
    overridden: tuple[str, ...]

    def train_options(self) -> dict[str, str]:
        """Return what run.json says of the options after ``--``."""

    def last(self, name: str) -> Optional[tuple[str, ...]]:
        """Return the values of an option after ``--``, of its last occurrence; None: it has none."""

    def print_plan(self, plans: Sequence[StagePlan], folder: RunFolder) -> None:
        """Print what the stages that were asked for would run in the folder of a run."""

    def predictor(self, folder: RunFolder, plan: StagePlan) -> tuple[Path, Sequence[Path]]:
        """Return the checkpoint that stands for what predicts after a stage, and those to make it of, if any."""

    def work(self) -> Callable[[StagePlan], float]:
        """Return a function that tells how long a stage's training is, in any unit."""

    def prepare(self, plans: Sequence[StagePlan]) -> Callable[[Sequence[Run]], Backend]:
        """Check that the options make a model, before anything is written.

        Returns:
            A function that makes what trains and tests, for the run of each seed.

        Raises:
            AlmaError: they make none.
        """
