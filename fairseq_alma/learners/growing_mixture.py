"""Learners that train one model, which grows between stages (paper, section 4.2 and Appendix A).

For text, ``gmoe`` adds experts by a schedule, and ``grow`` adds layers, experts, or both. For images, ``gmoe``
splits or copies the expert with the largest loss in each layer, and ``firefly`` adds neurons to a VGG network by
gradient score (Wu et al. 2020).
"""

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar, Mapping, Optional, Sequence

from fairseq_alma.checkpoints.model_options import MAX_EXPERTS, USUAL_FREQUENCY
from fairseq_alma.growth import EXPERT_METHODS, SELECTIONS
from fairseq_alma.learners.learner import GrowingModel, Growth, Last, Stage, StagePlan, register_learner
from fairseq_alma.options import integer, opt, real

SIZES = {"layers": "--decoder-layers", "experts": "--num-experts"}  # size in a schedule -> option of fairseq-train
METHOD_HELP = "how experts are added (default: copy for gmoe on text, else split)"


def read_schedule(word: str, name: str = "experts") -> tuple[int, ...]:
    """Parse a schedule such as ``4,6,8,12``; return the size in each stage.

    ``name`` states what the sizes count, for error messages: ``experts`` or ``layers``.

    Raises:
        ValueError: a size is smaller than the size in the previous stage, or is not an integer from 1 to `MAX_EXPERTS`.
    """
    numbers = word.split(",")
    if not all(number.strip().isdecimal() and 0 < int(number) <= MAX_EXPERTS for number in numbers):
        raise ValueError(f"expected integers from 1 to {MAX_EXPERTS}, separated by commas, such as 4,6,8,12")
    schedule = tuple(map(int, numbers))
    for stage, (before, now) in enumerate(itertools.pairwise(schedule), 1):
        if now < before:
            raise ValueError(f"decreases from {before} to {now} {name} before stage {stage}; sizes must not decrease")
    return schedule


def read_sizes(word: str) -> str:
    """Check a schedule such as ``experts=4,8,12 layers=2,4,4``. Return the schedule, sorted in the order of `SIZES`."""
    sizes: dict[str, tuple[int, ...]] = {}
    for part in word.split():
        name, _, numbers = part.partition("=")
        if name not in SIZES or name in sizes:
            raise ValueError(f"expected layers=SIZES, experts=SIZES, or both in one pair of quotes, found {part}")
        sizes[name] = read_schedule(numbers, name)
    if len({*map(len, sizes.values())}) != 1:
        raise ValueError("expected lists of equal length, one number per stage, such as layers=1,6,6 experts=4,4,8")
    return " ".join(f"{name}={','.join(map(str, sizes[name]))}" for name in SIZES if name in sizes)


@register_learner("grow", "text")
@dataclass(frozen=True)
class ScheduledGrowth(GrowingModel):
    """One language model to which growth steps between stages add layers, experts, or both."""

    label: ClassVar[Optional[str]] = "Grow"

    grow_schedule: Optional[str] = opt(
        None,
        "sizes in each stage: numbers of experts such as 4,6,8 (gmoe), or 'layers=1,6,6 experts=4,6,8' (grow)",
        parse=read_sizes,
        metavar="SIZES",
    )
    grow_method: str = opt("split", METHOD_HELP, choices=EXPERT_METHODS)
    grow_select: str = opt("loss", "rule for the experts to copy or split: see alma-grow --select", choices=SELECTIONS)
    grow_noise: float = opt(
        0.0, "standard deviation of Gaussian noise added to copied gate rows", range=real(0, 1_000_000), metavar="X"
    )

    @property
    def owned(self) -> Mapping[str, str]:  # type: ignore[override]  # a size outside the schedule may be given after --
        sizes = dict.fromkeys((SIZES[name] for name in self.sizes), "give --grow-schedule before the --")
        return {**sizes, "--gate-trees": "give --grow-method before the --"}

    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the schedule: name of a size (a key of `SIZES`) -> value of the size in each stage."""
        parts = (part.rpartition("=") for part in (self.grow_schedule or "").split())
        return {name or "experts": read_schedule(numbers, name or "experts") for name, _, numbers in parts}

    def check(self) -> None:
        if self.grow_schedule is None:
            example = "layers=1,6,6,6 or experts=4,6,8,12" if self.name == "grow" else "4,6,8,12 (the paper's sizes)"
            raise ValueError(f"--learner {self.name}: --grow-schedule is missing; give --grow-schedule {example}")
        super().check()
        if self.grow_noise and self.grow_method != "copy":
            raise ValueError(
                f"--grow-noise {self.grow_noise}: requires --grow-method copy; give this method or remove --grow-noise"
            )
        is_scratch = self.grow_method == "scratch"
        if is_scratch and self.grow_select != "loss":
            raise ValueError(
                f"--grow-select {self.grow_select}: --grow-method scratch selects no experts; remove --grow-select"
            )
        for stage, (before, now) in enumerate(itertools.pairwise(self.sizes.get("experts", ())), 1):
            if now > 2 * before > 2 and not is_scratch:  # a dense layer can be copied any number of times
                raise ValueError(
                    f"--grow-schedule {self.grow_schedule}: grows from {before} to {now} experts before stage {stage}, "
                    f"but a growth step at most doubles the number; give at most {2 * before}, or --grow-method scratch"
                )

    def check_stages(self, planned: Sequence[Stage]) -> None:
        for name, numbers in self.sizes.items():
            if len(numbers) != len(planned):
                raise ValueError(
                    f"--grow-schedule {self.grow_schedule}: expected numbers of {name} for {len(planned)} stages, "
                    f"found {len(numbers)} numbers; give one number for each stage"
                )

    def check_model(self, last: Last) -> None:
        given = {name: " ".join(last(name) or ()) for name in ("--moe-freq", "--decoder-layers")}
        every = int(given["--moe-freq"]) if given["--moe-freq"].isdecimal() else USUAL_FREQUENCY
        layers = int(given["--decoder-layers"]) if given["--decoder-layers"].isdecimal() else None
        for stage, (before, now) in enumerate(itertools.pairwise(self.sizes.get("experts", ())), 1):
            layers = self.sizes["layers"][stage] if "layers" in self.sizes else layers
            if now != before and (every == 0 or (layers is not None and layers < every)):
                raise ValueError(
                    f"--grow-schedule {self.grow_schedule}: no layer has experts (--moe-freq {every}"
                    f"{'' if layers is None else f', {layers} layers'}); give --moe-freq from 1 to the number of layers"
                )

    def plan(self, stage: Stage) -> StagePlan:
        planned = super().plan(stage)
        # A later stage reads the number of experts from the grown checkpoint.
        sizes = tuple(
            (SIZES[name], str(numbers[stage.index]))
            for name, numbers in self.sizes.items()
            if name == "layers" or stage.index == 0
        )
        return replace(planned, trainings=tuple(replace(training, sizes=sizes) for training in planned.trainings))

    def growth_before(self, stage: Stage, seed: int) -> Optional[Growth]:
        added = {name: numbers[stage.index] - numbers[stage.index - 1] for name, numbers in self.sizes.items()}
        if not any(added.values()):
            return None
        return Growth(
            added.get("experts", 0),
            self.grow_method,
            self.grow_select,
            seed,
            noise=self.grow_noise,
            layers=self.sizes["layers"][stage.index] if added.get("layers") else None,
            is_first=bool(added.get("experts")) and self.sizes["experts"][stage.index - 1] == 1,
        )


@register_learner("gmoe", "text")
@dataclass(frozen=True)
class ScheduledMixture(ScheduledGrowth):
    """One language model to which growth steps add experts. The default method is ``copy``, as in the paper."""

    label: ClassVar[Optional[str]] = "gMoE"

    grow_schedule: Optional[str] = opt(
        None, "experts in each stage", parse=lambda word: ",".join(map(str, read_schedule(word))), metavar="SIZES"
    )
    grow_method: str = opt("copy", METHOD_HELP, choices=EXPERT_METHODS)


@dataclass(frozen=True)
class PeriodicGrowth(GrowingModel):
    """Base class of learners with one image model that grows after every ``grow_every`` mega-batches."""

    grow_every: int = opt(
        1, "growth interval in mega-batches (default: grow before each stage)", range=integer(1, 10_000)
    )

    def is_due(self, stage: Stage) -> bool:
        """Return whether the model grows before a stage.

        With waiting time 10 and ``grow_every`` 50, the model grows before stages 5, 10, …. With waiting time 100, it
        grows before each stage.
        """
        first = stage.arrivals[0]
        before = 0 if stage.index == 1 else first - self.wait  # --first-wait can make the first stage longer
        return first // self.grow_every > before // self.grow_every


@register_learner("gmoe", "images")
@dataclass(frozen=True)
class TreeMixture(PeriodicGrowth):
    """One image model; a growth step splits or copies the expert with the largest validation loss in each layer."""

    label: ClassVar[Optional[str]] = "gMoE"
    arch_prefix: ClassVar[Optional[str]] = "alma_moe"
    image_architectures: ClassVar[tuple[str, str]] = ("alma_moe_mlp", "alma_moe_vgg")
    owned: ClassVar[Mapping[str, str]] = {"--gate-trees": "--learner gmoe sets the gate trees; remove --gate-trees"}

    grow_method: str = opt("split", METHOD_HELP, choices=("split", "copy"))

    def growth_before(self, stage: Stage, seed: int) -> Optional[Growth]:
        return Growth(1, self.grow_method, "loss", seed) if self.is_due(stage) else None


@register_learner("firefly", "images")
@dataclass(frozen=True)
class Firefly(PeriodicGrowth):
    """VGG network to which growth steps add neurons.

    A step adds a share of the parameters in the paper (Appendix B.1), and of the neurons in the released code.
    """

    label: ClassVar[Optional[str]] = "FF"
    arch_prefix: ClassVar[Optional[str]] = "alma_firefly"
    image_architectures: ClassVar[tuple[str, str]] = ("alma_firefly_vgg", "alma_firefly_vgg")

    grow_share: float = opt(
        0.25,
        "size to add in a growth step, as a fraction of the initial size",
        range=real(0, 1000, above=True),
        metavar="X",
    )
    grow_share_of: str = opt("parameters", "unit of --grow-share", choices=("parameters", "neurons"))

    def growth_before(self, stage: Stage, seed: int) -> Optional[Growth]:
        return Growth(1, "firefly", "loss", seed, self.grow_share, self.grow_share_of) if self.is_due(stage) else None
