"""What ``alma-stream`` was asked for, in types, and what each kind of data makes of it."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Protocol, Sequence

from fairseq_alma.learners.learner import Learner, build_learner, plan_stages
from fairseq_alma.learners.plan import MAX_MEMBERS, StagePlan
from fairseq_alma.learners.presets import PRESETS, Preset, filled
from fairseq_alma.learners.schedule import Stage, stages
from fairseq_alma.options import flag
from fairseq_alma.runs.loop import Run
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.runs.steps import Backend
from fairseq_alma.training.anytime_options import PAPERS_WAY, AnytimeOptions
from fairseq_alma.training.stage_end_options import NO_STAGE_ENDS, StageEndOptions

OF_EVERY_RUN = ("wait", "replay", "drop_rest", "iid", "keep_checkpoints")
"""Options that run.json names whatever the data are, beside those of the learner."""


@dataclass(frozen=True)
class RunRequest:
    """Options of alma-stream, checked one by one.

    Attributes:
        stream: folder of the stream.
        run: folder of the run.
        learner: the class.
        learner_options: what the user gave of the learner's own options.
        seeds: of the runs; several are trained side by side.
        wait: mega-batches gathered before an update.
        replay: train on all mega-batches so far.
        drop_rest: leave the last mega-batches where fewer than ``wait`` are left.
        iid: one stage on the union of so many mega-batches; None: a stream.
        stage: the one stage that is run; None: all.
        member: the members that are trained, and no stage completed; None: all.
        jobs: processes that train members at the same time; None: as many as the kind of data takes by itself.
        side_by_side: images: members that such a process trains in one network; None: each by itself.
        keep_checkpoints: remove nothing.
        save_every: text: updates between two checkpoints within a stage.
        matrix: text: test the held-out and a training slice of every mega-batch after each stage.
        validate: text: let fairseq-train validate whenever it saves.
        num_procs: text: processes that train a model together.
        nodes: text: of a cluster, that these processes are dealt to.
        slurm: queue jobs, with these options of sbatch; None: run here.
        progress_to: file descriptor that is told how far the members are; None: the user is.
        finetune_from_model: text: checkpoint that begins what would begin with random weights; None: these do.
        then_evaluate: command that evaluates each stage; None: none does.
        anytime: text: what runs on from stage to stage, and which model is tested.
        stage_ends: images: what predicts after a stage, and what the next one begins with.
        preset: images: the named settings that fill in what the user did not give; None: none was named.
        overridden: options of the learner that the preset sets and that the user gave with another value.
    """

    stream: Path
    run: Path
    learner: type[Learner]
    learner_options: Mapping[str, Any]
    seeds: tuple[int, ...]
    wait: int
    replay: bool
    drop_rest: bool
    iid: Optional[int]
    stage: Optional[int]
    member: Optional[tuple[int, ...]]
    jobs: Optional[int]
    side_by_side: Optional[int]
    keep_checkpoints: bool
    save_every: int
    validate: bool
    matrix: bool
    num_procs: int
    nodes: int
    slurm: Optional[Mapping[str, str]]
    progress_to: Optional[int]
    preset: Optional[Preset]
    overridden: tuple[str, ...]
    finetune_from_model: Optional[Path] = None
    then_evaluate: Optional[str] = None
    anytime: AnytimeOptions = PAPERS_WAY
    stage_ends: StageEndOptions = NO_STAGE_ENDS

    @classmethod
    def of(cls, arguments: argparse.Namespace, learner: type[Learner], options: Mapping[str, Any]) -> "RunRequest":
        """Take the arguments of the same names."""
        preset = PRESETS[arguments.preset] if arguments.preset is not None else None
        overridden: list[str] = []
        if preset is not None:
            options, names = filled(options, preset.learner_options(learner.name))
            overridden = [flag(name) for name in names]
        own: dict[str, Any] = {"learner": learner, "learner_options": options, "seeds": tuple(arguments.seed)}
        own["member"] = None if arguments.member is None else tuple(arguments.member)
        own["anytime"] = AnytimeOptions.read(arguments)
        own["stage_ends"] = StageEndOptions.read(arguments)
        own |= {"preset": preset, "overridden": tuple(overridden)}
        return cls(**own, **{name: vars(arguments)[name] for name in cls.__dataclass_fields__ if name not in own})

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
        planned = self._stages(num_megabatches)
        if self.stage is not None and not 0 <= self.stage < len(planned):
            raise ValueError(f"--stage {self.stage}: the run has stages 0 to {len(planned) - 1}")
        plans = plan_stages(learner, planned, MAX_MEMBERS if kind == "text" else None)
        self._check_member(plans)
        self.anytime.check_plans(plans, self.replay)
        return plans

    def chosen(self, plans: Sequence[StagePlan]) -> list[StagePlan]:
        """Return the plans of the stages that are run."""
        return [plan for plan in plans if self.stage in (None, plan.stage.index)]

    def _stages(self, num_megabatches: int) -> list[Stage]:
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

    def recorded(self) -> dict[str, Any]:
        """Return options of alma-stream that run.json names, beside those of every run and of the learner."""

    def train_options(self) -> dict[str, str]:
        """Return what run.json says of the options after ``--``."""

    def check(self, plans: Sequence[StagePlan]) -> None:
        """Raise ValueError, which begins with the option, if options before and after ``--`` contradict each other."""

    def print_plan(self, plans: Sequence[StagePlan]) -> None:
        """Print what the stages that were asked for would run."""

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
