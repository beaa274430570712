"""gMoE: one model whose layers get more experts between the stages (paper, section 4.2 and Appendix A).

Beside it a language model that gets layers, wider ones, experts, or several of these, by a schedule; and FF, a VGG
network that gets more neurons in its layers, more layers, or both, by gradient score (Wu et al. 2020).
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Mapping, Optional, Sequence

from fairseq_alma.checkpoints.model_options import USUAL_FREQUENCY
from fairseq_alma.growth import EXPERT_METHODS, LAYER_METHODS, SELECTIONS
from fairseq_alma.learners.learner import GrowingModel, Growth, Last, Stage, StagePlan, is_growth_due, register_learner
from fairseq_alma.options import flag, opt, real, whole


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


def require_stages(shown: str, what: str, numbers: Sequence[int], planned: Sequence[Stage]) -> None:
    """Raise ValueError if a schedule is one for another number of stages."""
    if len(numbers) != len(planned):
        raise ValueError(
            f"--grow-schedule {shown}: {len(numbers)} numbers of {what}, the run has {len(planned)} stages; give one "
            "for each"
        )


def require_parents(shown: str, numbers: Sequence[int]) -> None:
    """Raise ValueError if more experts are to be added than there are to be copied or split."""
    for stage, (before, now) in enumerate(itertools.pairwise(numbers), 1):
        if now > 2 * before:
            raise ValueError(
                f"--grow-schedule {shown}: from {before} to {now} experts before stage {stage}, but each of the "
                f"{before} can be copied or split once; give at most {2 * before}, or --grow-method scratch"
            )


def number_after(last: Last, name: str) -> Optional[int]:
    """Return the value of an option after ``--``; None: it is not given, or no number, which fairseq-train refuses."""
    word = " ".join(last(name) or ())
    return int(word) if word.isdecimal() else None


def moe_frequency(last: Last) -> int:
    """Return every how manieth layer of the model has experts."""
    given = number_after(last, "--moe-freq")
    return USUAL_FREQUENCY if given is None else given


def require_switch_layer(shown: str, every: int, num_layers: Optional[int] = None) -> None:
    """Raise ValueError if a model to which experts are added has no layer for them."""
    if every == 0:
        raise ValueError(
            f"--grow-schedule {shown}: --moe-freq 0 after the -- leaves no layer that experts could be added to; "
            "leave --moe-freq out"
        )
    if num_layers is not None and num_layers < every:
        raise ValueError(
            f"--grow-schedule {shown}: every {every}. layer has experts (--moe-freq {every}), and {num_layers} "
            f"layers have none to add experts to; give {every} layers or more, or --moe-freq {num_layers}"
        )


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
        choices=SELECTIONS,
    )
    grow_noise: Optional[float] = opt(
        None,
        "as alma-grow --noise: standard deviation of noise on the gate rows of copies, which without it tie with their "
        "originals and get no token until training breaks the tie (default: 0)",
        range=real(0, 1_000_000),
        metavar="X",
    )
    grow_renew_share: Optional[float] = opt(
        None,
        "as alma-grow --renew-share: share of the hidden units of copies that are drawn anew (default: 0)",
        range=real(0, 1),
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
        for name in ("grow_noise", "grow_renew_share"):
            if getattr(self, name) and self.grow_method != "copy":
                raise ValueError(f"{flag(name)} {getattr(self, name)}: goes with --grow-method copy alone")
        if self.grow_method == "scratch":
            if self.grow_select is not None:
                raise ValueError("--grow-select has no meaning with --grow-method scratch, which copies no expert")
            return
        require_parents(self._shown, self.grow_schedule)

    def check_stages(self, planned: Sequence[Stage]) -> None:
        """Refuse a schedule for another number of stages."""
        require_stages(self._shown, "experts", self._schedule, planned)

    def check_model(self, last: Last) -> None:
        """Refuse a model without experts."""
        if len({*self._schedule}) > 1:
            require_switch_layer(self._shown, moe_frequency(last), number_after(last, "--decoder-layers"))

    @property
    def first_num_experts(self) -> Optional[int]:
        """Experts of the first stage's model."""
        return self._schedule[0]

    def growth_before(self, stage: Stage, seed: int) -> Optional[Growth]:
        """Grow to the schedule's size."""
        num_new = self._schedule[stage.index] - self._schedule[stage.index - 1]
        if num_new == 0:
            return None
        noise, share = self.grow_noise or 0.0, self.grow_renew_share or 0.0
        return Growth(num_new, self.grow_method, self.grow_select or "loss", seed, noise=noise, renew_share=share)

    @property
    def _schedule(self) -> tuple[int, ...]:
        assert self.grow_schedule is not None  # `check` has seen it
        return self.grow_schedule

    @property
    def _shown(self) -> str:
        return ",".join(map(str, self._schedule))


LEAST_GAIN = 0.01
"""``--grow-when auto``: a size is outgrown where a stage more is predicted to lower the loss by a smaller share."""


def grows_by_slope(seen: Sequence[tuple[float, float]]) -> tuple[bool, str]:
    """Decide whether a model has outgrown its size, by the slope of the loss over the logarithm of the FLOPs.

    The line through the last two arrivals is followed to the end of the coming stage, which takes as many FLOPs as the
    last one. What a larger model would do is not known; that this one has little left to gain is.

    Args:
        seen: cumulative training FLOPs and the loss on valid, bits, after each stage of this size.

    Returns:
        Whether, and why.
    """
    if len(seen) < 2:
        return False, "stays: one arrival of this size has no slope"
    (before, first), (now, last) = seen[-2:]
    gain = (first - last) * math.log(2 - before / now) / math.log(now / before) / last
    grows = gain < LEAST_GAIN
    what = f"loss on valid {first:.4f}, then {last:.4f} bits after {before:.3g} and {now:.3g} FLOPs"
    promise = f"another stage promises {100 * gain:.2f} %, {'less' if grows else 'not less'} than {LEAST_GAIN:.0%}"
    return grows, f"{'grows' if grows else 'stays'}: {what}; {promise}"


SIZES = {
    "layers": "--decoder-layers",
    "embed-dim": "--decoder-embed-dim",
    "ffn-dim": "--decoder-ffn-embed-dim",
    "experts": "--num-experts",
}
"""What may stand in a schedule, as alma-grow's options are called -> what fairseq-train calls it."""


IMAGE_SIZES = {name: f"--{name}" for name in ("width", "hidden-layers", "channels")}
"""The same of networks for images, by the options of their architectures."""


def read_sizes(word: str, known: Mapping[str, str] = SIZES) -> str:
    """Check a schedule ``experts=4,8,12 layers=2,4,4``, spell it in one way. Raises ValueError with what is wrong."""
    usual, *others = (f"{name}=" for name in known)
    sizes: dict[str, tuple[int, ...]] = {}
    for part in word.split():
        name, _, numbers = part.partition("=")
        if name not in known or name in sizes:
            raise ValueError(
                f"{part}: {usual}1,6,6,6 is needed, or {', '.join(others[:-1])} or {others[-1]}, or several in one "
                "pair of quotes"
            )
        try:
            sizes[name] = read_schedule(numbers)
        except ValueError as error:
            raise ValueError(str(error).replace(" experts ", f" {name} ")) from error
    if not sizes or len({*map(len, sizes.values())}) > 1:
        raise ValueError(f"as many numbers of each are needed, one for each stage, such as {usual}1,6,6,6")
    for before, now in itertools.pairwise(sizes.get("embed-dim", ())):
        if now % before:
            raise ValueError(f"embed-dim: from {before} to {now}, but it grows to whole multiples; give {2 * before}")
    return " ".join(f"{name}={','.join(map(str, sizes[name]))}" for name in known if name in sizes)


@dataclass(frozen=True)
class ScheduledSizes(GrowingModel):
    """What gets other sizes by a schedule."""

    label: ClassVar[Optional[str]] = "Grow"
    flags: ClassVar[Mapping[str, str]] = SIZES

    grow_schedule: Optional[str] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "owned", self._owned)  # what the schedule has, nothing else

    @property
    def _owned(self) -> dict[str, str]:
        instead = "give --grow-schedule {}=... before the --"
        return {each: instead.format(name) for name, each in self.flags.items() if name in self._sizes}

    def check(self) -> None:
        """A schedule is needed."""
        super().check()
        if self.grow_schedule is None:
            name = next(iter(self.flags))
            raise ValueError(f"--learner grow needs --grow-schedule, such as {name}=1,6,6,6: the {name} of each stage")

    def check_stages(self, planned: Sequence[Stage]) -> None:
        """Refuse a schedule for another number of stages."""
        for name, numbers in self._sizes.items():
            require_stages(str(self.grow_schedule), name, numbers, planned)

    def plan(self, stage: Stage) -> StagePlan:
        """Grow to the schedule's sizes, and train all of it."""
        planned = super().plan(stage)
        place, _ = self._place(stage.index)
        # experts are what a training has beside its sizes
        sizes = {self.flags[name]: numbers[place] for name, numbers in self._sizes.items() if name != "experts"}
        return replace(planned, trainings=tuple(replace(each, sizes=sizes) for each in planned.trainings))

    def growth_before(self, stage: Stage, seed: int) -> Optional[Growth]:
        """Grow to the schedule's sizes."""
        grown = {name: now for name, (before, now) in self._steps(stage).items() if now != before}
        return Growth(0, "sizes", "loss", seed, sizes=grown) if grown else None

    def _steps(self, stage: Stage) -> dict[str, tuple[int, int]]:
        """Return the sizes of the stage before and of this one."""
        (was, _), (place, _) = self._place(stage.index - 1), self._place(stage.index)
        return {name: (numbers[was], numbers[place]) for name, numbers in self._sizes.items()}

    def _place(self, stage: int) -> tuple[int, Optional[str]]:
        """Return the place in the schedule at a stage, and why."""
        return stage, None

    @property
    def _sizes(self) -> dict[str, tuple[int, ...]]:
        parts = (part.partition("=") for part in (self.grow_schedule or "").split())
        return {name: read_schedule(numbers) for name, _, numbers in parts}


@register_learner("grow", "images")
@dataclass(frozen=True)
class ScheduledNetwork(ScheduledSizes):
    """One network that gets wider layers, more of them, or both, between the stages."""

    flags: ClassVar[Mapping[str, str]] = IMAGE_SIZES

    grow_schedule: Optional[str] = opt(
        None,
        "neurons of each hidden layer (width), hidden layers, or both in quotes, or feature maps of a VGG network "
        "(channels), during stage 0, 1, ...: width=16,64,64",
        parse=partial(read_sizes, known=IMAGE_SIZES),
        metavar="S0,S1,...",
    )


@register_learner("grow", "text")
@dataclass(frozen=True)
class ScheduledGrowth(ScheduledSizes):
    """One Switch model that gets more layers, wider ones, more experts, or several of these, between the stages."""

    grow_schedule: Optional[str] = opt(
        None,
        "layers, model dimension (embed-dim), hidden dimension (ffn-dim), experts in each Switch layer, or several in "
        "quotes, during stage 0, 1, ...: layers=1,6,6,6",
        parse=read_sizes,
        metavar="E0,E1,...",
    )
    grow_method: Optional[str] = opt(
        None,
        "as alma-grow --method: of experts, if any are added (default: split), else of layers (default: zero)",
        choices=(*EXPERT_METHODS, *LAYER_METHODS),
    )
    grow_when: Optional[str] = opt(
        None,
        "given: a size for each stage (default); auto: --grow-schedule has the sizes in order, and the next one is "
        "taken once, by the slope of the loss on valid over FLOPs, another stage would gain less than one percent",
        choices=("given", "auto"),
    )

    @property
    def _owned(self) -> dict[str, str]:
        more = {"--gate-trees": "alma-grow decides the gates; give --grow-method before the --"}
        if "embed-dim" in self._sizes:
            more["--decoder-sinusoidal-pos"] = "a model that becomes wider has learned positions; leave it out"
        return super()._owned | more

    def check(self) -> None:
        """Refuse methods that do not go with what grows, and experts of which there are too few to split."""
        super().check()
        methods = EXPERT_METHODS if "experts" in self._sizes else LAYER_METHODS if "layers" in self._sizes else ()
        if self.grow_method not in (None, *methods):
            ways = f"what grows is added by {', '.join(methods)}" if methods else "there is one way to become wider"
            raise ValueError(f"--grow-method {self.grow_method}: {ways}")
        if self.grow_method != "scratch":
            require_parents(str(self.grow_schedule), self._sizes.get("experts", ()))

    def check_stages(self, planned: Sequence[Stage]) -> None:
        """Refuse a schedule for another number of stages."""
        for name, numbers in self._sizes.items():
            if self.looks_back and len(numbers) <= len(planned):
                continue
            require_stages(str(self.grow_schedule), name, numbers, planned)

    def check_model(self, last: Last) -> None:
        """Refuse to add experts where none are, and layers that are no whole groups where whole groups are added."""
        every, sizes, shown = moe_frequency(last), self._sizes, str(self.grow_schedule)
        layers = sizes.get("layers", ())
        for number, (before, now) in enumerate(itertools.pairwise(sizes.get("experts", ())), 1):
            if now != before:
                require_switch_layer(shown, every, layers[number] if layers else None)
        if self.grow_method != "interpolated":
            return
        for each in (size for step in itertools.pairwise(layers) if len({*step}) > 1 for size in step):
            if each % max(every, 1):
                raise ValueError(
                    f"--grow-method interpolated: every {every}. layer has experts (--moe-freq {every}), so that "
                    f"whole groups of {every} layers are added to whole ones, and --grow-schedule {shown} has {each}; "
                    f"give multiples of {every}, or --grow-method zero"
                )

    @property
    def first_num_experts(self) -> Optional[int]:
        """Experts of the first stage's model."""
        return self._sizes["experts"][0] if "experts" in self._sizes else None

    @property
    def looks_back(self) -> bool:
        """Whether the time of growth is measured."""
        return self.grow_when == "auto"

    def plan(self, stage: Stage) -> StagePlan:
        """Grow to the schedule's sizes, and train all of it."""
        planned = super().plan(stage)
        place, reason = self._place(stage.index)
        widths = self._sizes.get("embed-dim")
        times = widths[place] // widths[0] if widths else 1
        trainings = tuple(replace(each, times_heads=times) for each in planned.trainings)
        return replace(planned, trainings=trainings, reason=reason)

    def growth_before(self, stage: Stage, seed: int) -> Optional[Growth]:
        """Grow to the schedule's sizes."""
        steps = self._steps(stage)
        grown = {name: now for name, (before, now) in steps.items() if now != before}
        if not grown:
            return None
        before, now = steps.get("experts", (0, 0))
        grown.pop("experts", None)
        method = self.grow_method or "split"
        if now == before and method not in LAYER_METHODS:
            method = LAYER_METHODS[0]  # of a schedule of both, of which the layers grow alone here
        return Growth(now - before, method, "loss", seed, sizes=grown)

    def _place(self, stage: int) -> tuple[int, Optional[str]]:
        """Return the place in the schedule at a stage, and why; stages that have not been seen change nothing."""
        if not self.looks_back:
            return stage, None
        last = len(next(iter(self._sizes.values()))) - 1
        place, since, reason = 0, 0, "begins"
        for number in range(1, min(stage, len(self.seen)) + 1):
            grows, reason = grows_by_slope(self.seen[since:number])
            if place == last:
                grows, reason = False, "stays: it is the last size of --grow-schedule"
            place, since = (place + 1, number) if grows else (place, since)
        return place, reason


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
    """A VGG network that gets neurons, layers, or both, a fixed share of the first size each time."""

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
    grow_in: str = opt(
        "width",
        "what a growth step adds: neurons in the layers there are, new layers that begin as the identity, or both, "
        "chosen by the same scores",
        choices=("width", "depth", "both"),
        quiet=True,
    )

    def growth_before(self, stage: Stage, seed: int) -> Optional[Growth]:
        """Add neurons, layers, or both."""
        if not is_growth_due(stage, self.wait, self.grow_every):
            return None
        return Growth(1, "firefly", "loss", seed, self.grow_share, self.grow_share_of, self.grow_in)
