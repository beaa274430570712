"""gMoE: one model whose layers get more experts between the stages (paper, section 4.2 and Appendix A).

Beside it a language model that gets layers, experts or both, by a schedule.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Mapping, Optional, Sequence

from fairseq_alma.growth import EXPERT_METHODS, LAYER_METHODS
from fairseq_alma.learners.learner import GrowingModel, is_growth_due, register_learner
from fairseq_alma.learners.plan import Growth, Stage, StagePlan
from fairseq_alma.options import opt, real, whole


def read_schedule(word: str) -> tuple[int, ...]:
    """Read the experts of each stage, ``4,6,8,12``. Raises ValueError if they are no growing whole numbers."""
    numbers = word.split(",")
    if not all(number.strip().isdecimal() and 0 < int(number) <= 10_000 for number in numbers):
        raise ValueError("whole numbers of at least 1 with commas are needed, such as 4,6,8,12")
    schedule = tuple(int(number) for number in numbers)
    for stage, (before, now) in enumerate(itertools.pairwise(schedule), 1):
        if now < before:
            raise ValueError(f"shrinks from {before} to {now} experts before stage {stage}; a model only grows")
    return schedule


def grow_every_option() -> Any:
    """Declare ``--grow-every``."""
    return opt(1, "grow when N more mega-batches have arrived (default: before each stage)", range=whole(1, 10_000))


@register_learner("gmoe", "text")
@dataclass(frozen=True)
class ScheduledMixture(GrowingModel):
    """One Switch model that gets more experts between the stages."""

    label: ClassVar[Optional[str]] = "gMoE"
    owned: ClassVar[Mapping[str, str]] = {
        "--num-experts": "give --grow-schedule before the --",
        "--gate-trees": "alma-grow decides the gates; give --grow-method before the --",
    }

    grow_schedule: Optional[tuple[int, ...]] = opt(
        None,
        "experts in each Switch layer during stage 0, 1, ...; the paper: 4,6,8,12",
        parse=read_schedule,
        metavar="E0,E1,...",
    )
    grow_method: str = opt(
        "copy",
        "as alma-grow --method; copy is the paper's, split is smooth",
        choices=("copy", "split", "scratch"),
    )
    grow_select: Optional[str] = opt(
        None,
        "which experts are copied or split, as alma-grow --select (default: loss)",
        choices=("loss", "usage", "random"),
    )
    grow_noise: Optional[float] = opt(
        None,
        "as alma-grow --noise: standard deviation of noise on the gate rows of copies, which without it tie with their "
        "originals and get no token until training breaks the tie (default: 0)",
        range=real(0, 1_000_000),
        metavar="X",
    )

    def __post_init__(self) -> None:
        if self.grow_select is None and self.grow_method != "scratch":
            object.__setattr__(self, "grow_select", "loss")  # the default depends on the method

    def check(self) -> None:
        """Refuse schedules that cannot be grown."""
        super().check()
        if self.grow_schedule is None:
            raise ValueError(
                f"--learner {self.name} needs --grow-schedule, the experts of each stage; the paper: 4,6,8,12"
            )
        if self.grow_noise and self.grow_method != "copy":
            raise ValueError(f"--grow-noise {self.grow_noise}: goes with --grow-method copy alone")
        if self.grow_method == "scratch":
            if self.grow_select is not None:
                raise ValueError("--grow-select has no meaning with --grow-method scratch, which copies no expert")
            return
        for stage, (before, now) in enumerate(itertools.pairwise(self.grow_schedule), 1):
            if now > 2 * before:
                raise ValueError(
                    f"--grow-schedule {self._shown}: from {before} to {now} experts before stage {stage}, but each of "
                    f"the {before} can be copied or split once; give at most {2 * before}, or --grow-method scratch"
                )

    def check_stages(self, planned: Sequence[Stage]) -> None:
        """Refuse a schedule for another number of stages."""
        if len(self._schedule) != len(planned):
            raise ValueError(
                f"--grow-schedule {self._shown}: {len(self._schedule)} numbers, the run has {len(planned)} stages; "
                "give one for each"
            )

    @property
    def first_num_experts(self) -> Optional[int]:
        """Experts of the first stage's model."""
        return self._schedule[0]

    def growth_before(self, stage: Stage, seed: int) -> Optional[Growth]:
        """Grow to the schedule's size."""
        num_new = self._schedule[stage.index] - self._schedule[stage.index - 1]
        if num_new == 0:
            return None
        return Growth(num_new, self.grow_method, self.grow_select or "loss", seed, noise=self.grow_noise or 0.0)

    @property
    def _schedule(self) -> tuple[int, ...]:
        assert self.grow_schedule is not None  # `check` has seen it
        return self.grow_schedule

    @property
    def _shown(self) -> str:
        return ",".join(map(str, self._schedule))


SIZES = ("layers", "experts")


def read_sizes(word: str) -> str:
    """Check a schedule ``experts=4,8,12 layers=2,4,4``, spell it in one way. Raises ValueError with what is wrong."""
    sizes: dict[str, tuple[int, ...]] = {}
    for part in word.split():
        name, _, numbers = part.partition("=")
        if name not in SIZES or name in sizes:
            raise ValueError(f"{part}: layers=1,6,6,6 is needed, or experts=4,8,12,16, or both in one pair of quotes")
        try:
            sizes[name] = read_schedule(numbers)
        except ValueError as error:
            raise ValueError(str(error).replace(" experts ", f" {name} ")) from error
    if not sizes or len({*map(len, sizes.values())}) > 1:
        raise ValueError("as many layers as experts are needed, one for each stage, such as layers=1,6,6,6")
    return " ".join(f"{name}={','.join(map(str, sizes[name]))}" for name in SIZES if name in sizes)


@register_learner("grow", "text")
@dataclass(frozen=True)
class ScheduledGrowth(GrowingModel):
    """One Switch model that gets more layers, more experts, or both, between the stages."""

    label: ClassVar[Optional[str]] = "Grow"
    owned: ClassVar[Mapping[str, str]] = {
        "--decoder-layers": "give --grow-schedule layers=... before the --",
        "--num-experts": "give --grow-schedule 'layers=1,6 experts=4,4' before the --",
        "--gate-trees": "alma-grow decides the gates; give --grow-method before the --",
    }

    grow_schedule: Optional[str] = opt(
        None,
        "layers, or experts in each Switch layer, or both in quotes, during stage 0, 1, ...: layers=1,6,6,6",
        parse=read_sizes,
        metavar="E0,E1,...",
    )
    grow_method: Optional[str] = opt(
        None,
        "as alma-grow --method: of experts, if any are added (default: split), else of layers (default: zero)",
        choices=(*EXPERT_METHODS, *LAYER_METHODS),
    )

    def check(self) -> None:
        """Refuse methods that do not go with what grows."""
        super().check()
        if self.grow_schedule is None:
            raise ValueError("--learner grow needs --grow-schedule, such as layers=1,6,6,6: the layers of each stage")
        methods = EXPERT_METHODS if "experts" in self._sizes else LAYER_METHODS
        if self.grow_method not in (None, *methods):
            raise ValueError(f"--grow-method {self.grow_method}: what grows is added by {', '.join(methods)}")

    def check_stages(self, planned: Sequence[Stage]) -> None:
        """Refuse a schedule for another number of stages, and experts of which there are too few to split."""
        for name, numbers in self._sizes.items():
            if len(numbers) != len(planned):
                raise ValueError(
                    f"--grow-schedule {self.grow_schedule}: {len(numbers)} numbers of {name}, the run has "
                    f"{len(planned)} stages; give one for each"
                )
        for before, now in itertools.pairwise(self._sizes.get("experts", ())):
            if now > 2 * before and self.grow_method != "scratch":
                raise ValueError(
                    f"--grow-schedule {self.grow_schedule}: from {before} to {now} experts, but each can be copied or "
                    f"split once; give at most {2 * before}, or --grow-method scratch"
                )

    @property
    def first_num_experts(self) -> Optional[int]:
        """Experts of the first stage's model."""
        return self._sizes["experts"][0] if "experts" in self._sizes else None

    def plan(self, stage: Stage) -> StagePlan:
        """Grow to the schedule's sizes, and train all of it."""
        planned = super().plan(stage)
        if "layers" not in self._sizes:
            return planned
        layers = self._sizes["layers"][stage.index]
        return replace(planned, trainings=tuple(replace(each, num_layers=layers) for each in planned.trainings))

    def growth_before(self, stage: Stage, seed: int) -> Optional[Growth]:
        """Grow to the schedule's sizes."""
        now, before = (
            {name: sizes[index] for name, sizes in self._sizes.items()} for index in (stage.index, stage.index - 1)
        )
        if now == before:
            return None
        num_new = now.get("experts", 0) - before.get("experts", 0)
        layers = now["layers"] if now.get("layers") != before.get("layers") else None
        method = (self.grow_method or "split") if num_new else (self.grow_method or LAYER_METHODS[0])
        if not num_new and method in EXPERT_METHODS:
            method = LAYER_METHODS[0]  # of a schedule of both, of which the layers grow alone here
        return Growth(num_new, method, "loss", seed, layers=layers)

    @property
    def _sizes(self) -> dict[str, tuple[int, ...]]:
        parts = (part.partition("=") for part in (self.grow_schedule or "").split())
        return {name: read_schedule(numbers) for name, _, numbers in parts}


@register_learner("gmoe", "images")
@dataclass(frozen=True)
class TreeMixture(GrowingModel):
    """One model: in each layer the expert with the largest validation loss becomes two (a tree, or flat)."""

    label: ClassVar[Optional[str]] = "gMoE"
    arch_prefix: ClassVar[Optional[str]] = "alma_moe"
    image_architectures: ClassVar[tuple[str, str]] = ("alma_moe_mlp", "alma_moe_vgg")
    owned: ClassVar[Mapping[str, str]] = {"--gate-trees": "gmoe grows its trees by itself"}

    grow_every: int = grow_every_option()
    grow_method: str = opt(
        "split",
        "split an expert under a new gate of two, smoothly, or copy it with its row of one flat gate, as v1's ablation",
        choices=("split", "copy"),
        quiet=True,
    )

    def growth_before(self, stage: Stage, seed: int) -> Optional[Growth]:
        """Split or copy one expert of each layer."""
        if not is_growth_due(stage, self.wait, self.grow_every):
            return None
        return Growth(1, self.grow_method, "loss", seed)
