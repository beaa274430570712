"""Learners whose one model grows between the stages (paper, section 4.2 and Appendix A).

Text: gMoE gets experts by a schedule, ``grow`` gets layers, experts, or both. Images: gMoE splits the losing expert of
each layer; FF is a VGG network that gets neurons or layers by gradient score (Wu et al. 2020).
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Mapping, Optional, Sequence

from fairseq_alma.checkpoints.model_options import MAX_EXPERTS, USUAL_FREQUENCY
from fairseq_alma.growth import EXPERT_METHODS, SELECTIONS
from fairseq_alma.learners.learner import GrowingModel, Growth, Last, Stage, StagePlan, is_growth_due, register_learner
from fairseq_alma.options import integer, opt, real

SIZES = {"layers": "--decoder-layers", "experts": "--num-experts"}
"""What a schedule of ``--learner grow`` may have -> the option of fairseq-train."""


def read_schedule(word: str, what: str = "experts") -> tuple[int, ...]:
    """Read the sizes of each stage, ``4,6,8,12``. Raises ValueError if they are no growing whole numbers."""
    numbers = word.split(",")
    if not all(number.strip().isdecimal() and 0 < int(number) <= MAX_EXPERTS for number in numbers):
        raise ValueError("whole numbers of at least 1 with commas are needed, such as 4,6,8,12")
    schedule = tuple(int(number) for number in numbers)
    for stage, (before, now) in enumerate(itertools.pairwise(schedule), 1):
        if now < before:
            raise ValueError(f"shrinks from {before} to {now} {what} before stage {stage}; a model only grows")
    return schedule


def read_sizes(word: str) -> str:
    """Check a schedule such as ``experts=4,8,12 layers=2,4,4``, and return it in the order of `SIZES`."""
    sizes: dict[str, tuple[int, ...]] = {}
    for part in word.split():
        name, _, numbers = part.partition("=")
        if name not in SIZES or name in sizes:
            raise ValueError(f"{part}: layers=1,6,6,6 is needed, or experts=..., or both in one pair of quotes")
        sizes[name] = read_schedule(numbers, name)
    if not sizes or len({*map(len, sizes.values())}) > 1:
        raise ValueError("as many numbers of each are needed, one for each stage, such as layers=1,6,6,6")
    return " ".join(f"{name}={','.join(map(str, sizes[name]))}" for name in SIZES if name in sizes)


def number_after(last: Last, name: str) -> Optional[int]:
    """Return the value of an option after ``--``; None: it is not given, or no number, which fairseq-train refuses."""
    word = " ".join(last(name) or ())
    return int(word) if word.isdecimal() else None


@register_learner("grow", "text")
@dataclass(frozen=True)
class ScheduledGrowth(GrowingModel):
    """One language model that gets more layers, more experts, or both, between the stages."""

    label: ClassVar[Optional[str]] = "Grow"

    grow_schedule: Optional[str] = opt(
        None,
        "layers, experts in each layer that has any, or both in quotes, during stage 0, 1, ...: layers=1,6,6,6",
        parse=read_sizes,
        metavar="E0,E1,...",
    )
    grow_method: str = opt("split", "of experts, as alma-grow --method: split is smooth", choices=EXPERT_METHODS)
    grow_select: str = opt("loss", "which experts are copied or split, as alma-grow --select", choices=SELECTIONS)
    grow_noise: float = opt(
        0.0,
        "as alma-grow --noise: standard deviation of noise on the gate rows of copies, which without it tie with their "
        "originals and get no token until training breaks the tie",
        range=real(0, 1_000_000),
        metavar="X",
    )

    def __post_init__(self) -> None:
        owned = {SIZES[name]: f"give --grow-schedule {name}=... before the --" for name in self.sizes}
        owned["--gate-trees"] = "alma-grow decides the gates; give --grow-method before the --"
        object.__setattr__(self, "owned", owned)  # what the schedule has, nothing else

    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """The schedule: each of `SIZES` that grows -> its size in each stage."""
        parts = (part.partition("=") for part in (self.grow_schedule or "").split())
        return {name: read_schedule(numbers, name) for name, _, numbers in parts}

    def check(self) -> None:
        """Refuse a schedule that is missing or cannot be grown."""
        if self.grow_schedule is None:
            example = "layers=1,6,6,6" if self.name == "grow" else "4,6,8,12, the paper's experts of each stage"
            raise ValueError(f"--learner {self.name} needs --grow-schedule, such as {example}")
        super().check()
        if self.grow_noise and self.grow_method != "copy":
            raise ValueError(f"--grow-noise {self.grow_noise}: goes with --grow-method copy alone")
        if self.grow_method == "scratch":
            if self.grow_select != "loss":
                raise ValueError("--grow-select has no meaning with --grow-method scratch, which copies no expert")
            return
        for stage, (before, now) in enumerate(itertools.pairwise(self.sizes.get("experts", ())), 1):
            if now > 2 * before > 2:  # a dense model gets any number of copies
                raise ValueError(
                    f"--grow-schedule {self.grow_schedule}: from {before} to {now} experts before stage {stage}, but "
                    f"each of the {before} can be copied or split once; give at most {2 * before}, or --grow-method "
                    "scratch"
                )

    def check_stages(self, planned: Sequence[Stage]) -> None:
        """Refuse a schedule for another number of stages."""
        for name, numbers in self.sizes.items():
            if len(numbers) != len(planned):
                raise ValueError(
                    f"--grow-schedule {self.grow_schedule}: {len(numbers)} numbers of {name}, the run has "
                    f"{len(planned)} stages; give one for each"
                )

    def check_model(self, last: Last) -> None:
        """Refuse to add experts where no layer has any."""
        given = number_after(last, "--moe-freq")
        every = USUAL_FREQUENCY if given is None else given
        for stage, (before, now) in enumerate(itertools.pairwise(self.sizes.get("experts", ())), 1):
            layers = self.sizes["layers"][stage] if "layers" in self.sizes else number_after(last, "--decoder-layers")
            if now != before and (every == 0 or (layers is not None and layers < every)):
                raise ValueError(
                    f"--grow-schedule {self.grow_schedule}: no layer has experts to add to (--moe-freq {every}, layers "
                    f"{'as given' if layers is None else layers}); give a --moe-freq of 1 to the number of layers"
                )

    @property
    def first_num_experts(self) -> Optional[int]:
        return self.sizes["experts"][0] if "experts" in self.sizes else None

    def plan(self, stage: Stage) -> StagePlan:
        """Grow to the schedule's sizes, and train all of it."""
        planned = super().plan(stage)
        layers = self.sizes["layers"][stage.index] if "layers" in self.sizes else None
        return replace(planned, trainings=tuple(replace(each, num_layers=layers) for each in planned.trainings))

    def growth_before(self, stage: Stage, seed: int) -> Optional[Growth]:
        """Grow to the schedule's sizes."""
        added = {name: numbers[stage.index] - numbers[stage.index - 1] for name, numbers in self.sizes.items()}
        if not any(added.values()):
            return None
        layers = self.sizes["layers"][stage.index] if added.get("layers") else None
        how = self.grow_method, self.grow_select, seed
        return Growth(added.get("experts", 0), *how, noise=self.grow_noise, layers=layers)


@register_learner("gmoe", "text")
@dataclass(frozen=True)
class ScheduledMixture(ScheduledGrowth):
    """One language model that gets more experts between the stages."""

    label: ClassVar[Optional[str]] = "gMoE"
    owned: ClassVar[Mapping[str, str]] = {
        "--num-experts": "give --grow-schedule before the --",
        "--gate-trees": "alma-grow decides the gates; give --grow-method before the --",
    }

    grow_schedule: Optional[str] = opt(
        None,
        "experts in each layer that has any, during stage 0, 1, ...; the paper: 4,6,8,12",
        parse=lambda word: ",".join(map(str, read_schedule(word))),
        metavar="E0,E1,...",
    )
    grow_method: str = opt(
        "copy", "as alma-grow --method; copy is the paper's, split is smooth", choices=EXPERT_METHODS
    )

    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        return {} if self.grow_schedule is None else {"experts": read_schedule(self.grow_schedule)}


def grow_every_option() -> Any:
    """Declare ``--grow-every``."""
    return opt(1, "grow when N more mega-batches have arrived (default: before each stage)", range=integer(1, 10_000))


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


@register_learner("firefly", "images")
@dataclass(frozen=True)
class Firefly(GrowingModel):
    """A VGG network that gets neurons, a fixed share of the first size each time."""

    label: ClassVar[Optional[str]] = "FF"
    arch_prefix: ClassVar[Optional[str]] = "alma_firefly"
    image_architectures: ClassVar[tuple[str, str]] = ("alma_firefly_vgg", "alma_firefly_vgg")

    grow_every: int = grow_every_option()
    grow_share: float = opt(
        0.25, "what a growth step adds, as a share of the first size", range=real(0, 1000, above=True), metavar="X"
    )
    grow_share_of: str = opt(
        "parameters",
        "what --grow-share counts: parameters, as the paper's Appendix B.1 has it, or neurons, as its released code "
        "does",
        choices=("parameters", "neurons"),
        quiet=True,
    )

    def growth_before(self, stage: Stage, seed: int) -> Optional[Growth]:
        """Add neurons."""
        if not is_growth_due(stage, self.wait, self.grow_every):
            return None
        return Growth(1, "firefly", "loss", seed, self.grow_share, self.grow_share_of)
