"""What a good run on text needs and the user does not say: all of it is decided here, by one table.

The optimizer carried through the stages and an average of the weights tested are the best means at every arrival of
``recipes/anytime``; one learning rate serves all sizes by maximal-update parametrization (``--mup``). What was measured
for the rest stands in ``docs/reference/defaults.md``. What stands behind ``--`` wins. An ``--arch`` there makes the
model the user's: then only that is filled in for which fairseq has no default, or one that trains no language model
(``--lr`` 0.25, a criterion without the balance loss).

Neither torch nor fairseq: a dry run imports neither.
"""

import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence

from fairseq_alma.checkpoints.model_options import SWITCH_SIZES
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.token_file import NUM_FAIRSEQ_SYMBOLS
from fairseq_alma.learners.schedule import Stage
from fairseq_alma.metrics.flops import SwitchLMShape
from fairseq_alma.options import group_words
from fairseq_alma.terminal import spell_duration
from fairseq_alma.text.train_options import BALANCING
from fairseq_alma.training.planned_run import ENDLESS

NUM_EXPERTS, MOE_FREQ, HEAD_WIDTH, LENGTH = 4, 2, 32, 128
"""LENGTH: tokens of a sequence."""
RATE, RATE_WIDTH = 0.005, 128
"""Peak learning rate of Adam with --mup; without it, at this width."""
HALF_LIFE = "1/16"
TOKENS_PER_PARAMETER = 20
"""``--size auto``: tokens that are read for each parameter that a token uses (Hoffmann et al. 2022)."""
WIDTHS = (*range(32, 512, 32), *range(512, 1024, 64), *range(1024, 4097, 256))
MANY_PASSES, MOST_PASSES = 4, 10
"""From more passes on than the first, dropout and weight decay are needed; --hours plans no more than the second."""
LEAST_UPDATES = 100
AT_ONCE = 32
"""Sequences that are computed together; more than these make an update in several steps (``--update-freq``)."""
STAGE_SECONDS = 15.0
"""What the processes of a stage take to start, on two cores."""
BYTES_PER_PARAMETER = 24
"""In fp32: weight, gradient, two moments, average, and a copy on its way to a file."""

Measure = Callable[[Sequence["Shape"], int], Sequence[float]]
"""Shapes, and tokens of an update -> seconds that a token's training takes with each."""


class Shape(NamedTuple):
    """Sizes of a Switch language model; heads are 32 wide, inner layers four times the width."""

    width: int
    layers: int
    vocab_size: int
    num_experts: int = NUM_EXPERTS

    def counted(self, num_experts: int) -> SwitchLMShape:
        """Return what counts its parameters and operations, with so many experts."""
        switched = self.layers // MOE_FREQ
        sizes = (self.width, 4 * self.width, self.layers, self.vocab_size, LENGTH)
        return SwitchLMShape(*sizes, (num_experts,) * switched, (num_experts,) * switched, LENGTH + 2)

    @property
    def num_params(self) -> int:
        """Parameters."""
        return self.counted(self.num_experts).num_params

    @property
    def num_active(self) -> int:
        """Parameters that a token uses."""
        return self.counted(1).num_params

    @property
    def flops(self) -> int:
        """Operations of a token's training."""
        return self.counted(self.num_experts).train_flops_per_token


def shapes(vocab_size: int, num_experts: int = NUM_EXPERTS) -> list[Shape]:
    """Return the models to choose from, small ones first: the wider, the deeper."""
    return [Shape(width, max(2, round(width / 128) * 2), vocab_size, num_experts) for width in WIDTHS]


def expected_loss(shape: Shape, num_tokens: float, passes: float) -> float:
    """Return the loss to expect, in nats per token; only differences between shapes count.

    The form of Hoffmann et al. 2022, equation 10, for text that is read once; a further pass is worth less than the one
    before, as in Muennighoff et al. 2023, equation 5. The constants: ``docs/reference/defaults.md``.

    Args:
        shape: of the model.
        num_tokens: that it reads in all.
        passes: through the text.
    """
    once = num_tokens / max(1.0, passes)
    worth = once * (1 + 15 * (1 - math.exp(-(max(1.0, passes) - 1) / 15)))
    return 26 / shape.num_active**0.34 + 73 / worth**0.34


@dataclass(frozen=True)
class Wish:
    """What the user said before ``--``.

    Attributes:
        size: parameters; None: auto.
        passes: through the text; None: not said.
        hours: that all of it may take; None: any.
        is_paper: the paper's way (``--preset paper``).
    """

    size: Optional[int] = None
    passes: Optional[float] = None
    hours: Optional[float] = None
    is_paper: bool = False

    def record(self) -> dict[str, Any]:
        """Return it for run.json."""
        preset = "paper" if self.is_paper else None
        return {"size": self.size or "auto", "passes": self.passes, "hours": self.hours, "preset": preset}


@dataclass(frozen=True)
class Plan:
    """What was decided.

    Attributes:
        shape: of the model.
        passes: through the text.
        tokens: of each stage.
        why: how the size came about.
        forecast: seconds that all of it takes; None: not asked for.
    """

    shape: Shape
    passes: float
    tokens: Sequence[int]
    why: str
    forecast: Optional[float] = None

    @property
    def num_tokens(self) -> float:
        """Tokens of the whole training."""
        return self.passes * sum(self.tokens)


def num_updates(passes: float, tokens: int, tokens_per_update: int) -> int:
    """Return the updates of a stage."""
    return max(1, round(passes * tokens / tokens_per_update))


def tokens_of(stream: Stream, stage: Stage) -> int:
    """Return the tokens that a stage trains on once."""
    return sum(stream.megabatch(t).num_tokens for t in stage.megabatches)


def batch_of(num_tokens: float) -> int:
    """Return the sequences of an update: 8 for a million tokens in all, otherwise by their root, at least 4."""
    return int(8 * 2 ** max(-1, round(math.log2(max(1.0, num_tokens) / 1e6) / 2)))


def decide(stream: Stream, planned: Sequence[Stage], wish: Wish, experts: int, measure: Measure) -> Plan:
    """Choose size and passes.

    Args:
        stream: what is learned from.
        planned: the stages.
        wish: of the user.
        experts: of each Switch layer.
        measure: how fast shapes are trained here; called for ``--hours`` alone.

    Raises:
        ValueError: it cannot be; the message begins with the option.
    """
    assert stream.tokenizer is not None
    tokens = [tokens_of(stream, stage) for stage in planned]
    possible = shapes(stream.tokenizer.vocab_size + NUM_FAIRSEQ_SYMBOLS, experts)
    if wish.hours is not None:
        return _by_time(possible, tokens, stream, wish, measure)
    passes = 1.0 if wish.passes is None else wish.passes
    if wish.size is None:
        wanted = passes * sum(tokens) / TOKENS_PER_PARAMETER
        fitting = [each for each in possible if bytes_needed(each, AT_ONCE * LENGTH) <= memory()] or possible[:1]
        shape = _nearest(fitting, wanted, lambda each: each.num_active)
        why = f"one for every {passes * sum(tokens) / shape.num_active:.0f} tokens read"
    else:
        shape, why = _sized(possible, wish.size), f"--size {wish.size:,}"
    return Plan(shape, passes, tokens, why)


def _sized(possible: Sequence[Shape], size: int) -> Shape:
    least, most = possible[0].num_params, possible[-1].num_params
    if not 0.5 * least <= size <= 2 * most:
        raise ValueError(f"--size {size:,}: from {least:,} to {most:,} parameters are possible with this vocabulary")
    return _nearest(possible, size, lambda each: each.num_params)


def _nearest(possible: Sequence[Shape], wanted: float, count: Callable[[Shape], int]) -> Shape:
    return min(possible, key=lambda each: abs(math.log(count(each) / max(1.0, wanted))))


def _by_time(possible: Sequence[Shape], tokens: Sequence[int], stream: Stream, wish: Wish, measure: Measure) -> Plan:
    """Choose the size, or the passes, or both, that make the best of some hours."""
    assert wish.hours is not None
    if wish.size is not None and wish.passes is not None:
        raise ValueError("--hours decides what of --size and --passes is not given; leave one of them out")
    total = sum(tokens)
    seconds = wish.hours * 3600 - STAGE_SECONDS * len(tokens)
    tested = len(tokens) / 3 * sum(stream.split(name).num_tokens for name in ("valid", "test"))
    at_hand = [_sized(possible, wish.size)] if wish.size is not None else possible
    guess = batch_of(wish.passes * total if wish.passes is not None else total)
    costs = _costs(at_hand, guess * LENGTH, measure)
    found: list[Plan] = []
    for shape, cost in zip(at_hand, costs, strict=True):
        can_read = seconds / cost - tested
        passes = min(can_read / total, MOST_PASSES) if wish.passes is None else wish.passes
        if passes * total > can_read * 1.001 or can_read < LEAST_UPDATES * guess * LENGTH:
            continue
        forecast = (passes * total + tested) * cost + STAGE_SECONDS * len(tokens)
        why = f"the best of {wish.hours:g} hours by the speed measured here, {1 / cost:,.0f} tokens per second"
        found.append(Plan(shape, passes, tokens, why, forecast))
    if not found:
        needed = costs[0] * (tested + max(LEAST_UPDATES * guess * LENGTH, (wish.passes or 0) * total))
        hours = (needed + STAGE_SECONDS * len(tokens)) / 3600
        what = "that size" if len(at_hand) == 1 else "the smallest model"
        raise ValueError(f"--hours {wish.hours:g}: too short for {what}, which takes {hours:.2g} here; give more")
    return min(found, key=lambda each: expected_loss(each.shape, each.num_tokens, each.passes))


def _costs(at_hand: Sequence[Shape], tokens_per_update: int, measure: Measure) -> list[float]:
    """Return seconds per token of all shapes: a few are measured, the rest is interpolated by operations."""
    if len(at_hand) == 1:
        return list(measure(at_hand, tokens_per_update))
    probes = [at_hand[0], at_hand[2], at_hand[4]]
    seconds = measure(probes, tokens_per_update)
    points = [(shape.flops, cost) for shape, cost in zip(probes, seconds, strict=True)]
    return [_interpolated(points, shape.flops) for shape in at_hand]


def _interpolated(points: Sequence[tuple[float, float]], flops: float) -> float:
    """Return the cost on the line through the nearest two points; never less than that of the first."""
    pairs = list(itertools.pairwise(points))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if flops <= pair[1][0]), pairs[-1])
    return max(points[0][1], y0 + (flops - x0) * max(y1 - y0, 0.1 * y0) / (x1 - x0))


class Row(NamedTuple):
    """An option that is filled in.

    Attributes:
        flag: of fairseq-train.
        value: as a word; empty: a flag.
        with_: with the user's own ``--arch`` it is filled in where this option is missing too; None: never.
    """

    flag: str
    value: object
    with_: Optional[str] = None


def paper_rows(given: Mapping[str, str]) -> list[Row]:
    """Return the paper's options: ``recipes/lm/common.sh`` says where they are from."""
    return [
        Row("--arch", "alma_switch_lm_base"),
        Row("--num-experts", NUM_EXPERTS),
        Row("--dropout", 0.1),
        Row("--tokens-per-sample", 512),
        Row("--criterion", BALANCING, "--criterion"),
        Row("--optimizer", "adam", "--optimizer"),
        Row("--adam-betas", "(0.9, 0.98)", "--optimizer"),
        Row("--adam-eps", "1e-8", "--optimizer"),
        Row("--lr", 0.001, "--lr"),
        Row("--lr-scheduler", "polynomial_decay", "--lr"),
        Row("--batch-size", 8, "--batch-size"),
        Row("--update-freq", 24, "--batch-size"),
    ]


def good_rows(plan: Plan, given: Mapping[str, str], num_procs: int = 1) -> list[Row]:
    """Return the options of a good run, whose stages' lengths come after them.

    Args:
        plan: what was decided.
        given: options after ``--`` with their values.
        num_procs: processes that share an update.
    """
    shape, many = plan.shape, plan.passes > MANY_PASSES
    arch, batch = given.get("--arch", "alma_switch_lm"), batch_of(plan.num_tokens)
    steps = num_procs * math.ceil(batch / (AT_ONCE * num_procs))  # of all processes, which share them
    return [
        Row("--arch", arch),
        Row("--mup", ""),
        Row("--decoder-layers", shape.layers),
        Row("--decoder-embed-dim", shape.width),
        Row("--decoder-ffn-embed-dim", 4 * shape.width),
        Row("--decoder-attention-heads", max(1, shape.width // HEAD_WIDTH)),
        Row("--num-experts", shape.num_experts),
        Row("--dropout", 0.1 if many else 0),
        Row("--tokens-per-sample", LENGTH),
        Row("--num-workers", 0),
        Row("--criterion", BALANCING if arch.startswith("alma_") else "cross_entropy", "--criterion"),
        Row("--optimizer", "fused_adam", "--optimizer"),
        Row("--adam-betas", "(0.9, 0.95)", "--optimizer"),
        Row("--adam-eps", "1e-8", "--optimizer"),
        Row("--weight-decay", 0.1 if many else 0, "--optimizer"),
        Row("--clip-norm", 1, "--optimizer"),
        Row("--lr", _rate(given), "--lr"),
        Row("--lr-scheduler", "fixed", "--lr"),
        Row("--batch-size", max(1, batch // steps), "--batch-size"),
        *([Row("--update-freq", steps, "--batch-size")] if steps > 1 else []),
    ]


def length_rows(updates: int, filled: Mapping[str, str]) -> list[Row]:
    """Return the options that depend on how many updates the first stage makes.

    Args:
        updates: of the first stage.
        filled: all other options.
    """
    warmup = max(1, min(2000, max(50, updates // 50), updates // 4))
    rows = [Row("--warmup-updates", warmup, "--lr"), Row("--max-update", updates, "--max-update")]
    if filled.get("--lr-scheduler") == "polynomial_decay":
        rows.append(Row("--total-num-update", updates, "--lr"))
    return rows


def _rate(given: Mapping[str, str]) -> str:
    """Return the learning rate: without --mup it falls with the width."""
    arch = given.get("--arch")
    if arch is None or "--mup" in given:
        return f"{RATE:g}"
    width = given.get("--decoder-embed-dim", str(SWITCH_SIZES.get(arch, {}).get("embed_dim", 512)))
    return f"{RATE * RATE_WIDTH / (int(width) if width.isdecimal() else 512):.3g}"


ENDS = ("--max-update", "--max-epoch")
SAME = {"--batch-size": ("--batch-size", "--max-tokens"), "--max-update": ENDS}
"""Options that stand for one another."""


def missing(rows: Sequence[Row], given: Mapping[str, str], owned: Mapping[str, str]) -> list[Row]:
    """Return what of some rows is to be filled in.

    Args:
        rows: of the table.
        given: options after ``--`` with their values.
        owned: options that the learner decides.
    """

    def is_missing(flag: str) -> bool:
        return not any(each in given for each in SAME.get(flag, (flag,)))

    is_own_model = "--arch" in given
    wanted = [row for row in rows if not is_own_model or (row.with_ is not None and is_missing(row.with_))]
    return [row for row in wanted if is_missing(row.flag) and row.flag not in owned]


@dataclass(frozen=True)
class Recipe:
    """The options after ``--``, complete.

    Attributes:
        words: the user's, behind what was filled in.
        chosen: what was filled in: option -> value.
        features: options before ``--`` that are filled in: name -> value.
        passes: through each stage's text, where the user gives no ``--max-update``; None: he does.
        record: for run.json; None: nothing was filled in.
        lines: what was chosen and why, to be printed.
    """

    words: list[str]
    chosen: Mapping[str, str]
    features: Mapping[str, Any]
    passes: Optional[float] = None
    record: Optional[Mapping[str, Any]] = None
    lines: Sequence[str] = ()

    def lengths(self, tokens: Sequence[int]) -> Optional[list[int]]:
        """Return the updates of each stage; None: ``--max-update`` or ``--max-epoch`` is the user's.

        Args:
            tokens: of each stage.
        """
        if self.passes is None:
            return None
        filled = {name: " ".join(values) for name, values in group_words(self.words)}
        later = (self.record or {}).get("later") or {}
        passes = [later.get(str(stage), self.passes) for stage in range(len(tokens))]
        per_update = tokens_per_update(filled)
        return [num_updates(each, count, per_update) for each, count in zip(passes, tokens, strict=True)]


class Asked(NamedTuple):
    """What the recipe needs to know of a command.

    Attributes:
        wish: of the user.
        owned: options after ``--`` that the learner decides.
        experts: of the first stage, where the learner says.
        goes_on: whether a stage begins with the weights of the one before.
        features: options of features, by their names, None where they are not given.
        has_beginning: whether the run begins with a checkpoint (``--finetune-from-model``).
        num_procs: processes that share an update.
        num_done: stages that are complete.
    """

    wish: Wish
    owned: Mapping[str, str]
    experts: Optional[int]
    goes_on: bool
    features: Mapping[str, Any]
    has_beginning: bool = False
    num_procs: int = 1
    num_done: int = 0


def complete(
    words: Sequence[str],
    asked: Asked,
    stream: Optional[Stream],
    planned: Sequence[Stage],
    before: Optional[Mapping[str, Any]],
    measure: Measure,
) -> Recipe:
    """Fill in what is missing after ``--``.

    Args:
        words: of the user.
        asked: for what.
        stream: what is learned from; None: there is none yet.
        planned: the stages.
        before: ``recipe`` of the run.json that is there: what was chosen stays chosen.
        measure: how fast models are trained here.

    Raises:
        ValueError: it cannot be; the message begins with an option.
    """
    given = {name: " ".join(values) for name, values in group_words(words)}
    wish, is_own_model = asked.wish, "--arch" in given
    if is_own_model and (wish.size is not None or wish.hours is not None):
        flag = "--hours" if wish.size is None else "--size"
        raise ValueError(f"{flag} chooses a model, and --arch after the -- says which; leave one of them out")
    if wish.passes is not None and any(end in given for end in ENDS):
        raise ValueError("--passes: --max-update or --max-epoch after the -- says how long a stage is; leave one out")
    if is_own_model and not missing(good_rows(_NO_PLAN, given) + length_rows(1, {}), given, asked.owned):
        return Recipe([*words], {}, {})
    if not is_own_model and asked.has_beginning:
        return Recipe([*words], {}, {})  # whose model it is, TrainOptions asks for
    if before is not None and ("--arch" in before["chosen"]) == is_own_model:
        before = None  # of a model of another kind
    if before is not None and (wish == Wish() or before["wish"] == wish.record()):
        return _again(words, given, before, asked)
    if before is not None and stream is not None and _is_of_later_stage(before, asked):
        return _again(words, given, _for_later_stage(before, given, asked, stream, planned, measure), asked)
    if stream is None and not (is_own_model and any(end in given for end in ENDS)):
        raise ValueError(
            "--dry-run without a stream: what is not given after the -- is chosen by the stream; give --arch and "
            "--max-update there, or a --stream"
        )
    plan = _plan_for(stream, planned, asked, given, measure)
    rows = paper_rows(given) if wish.is_paper else good_rows(plan, given, asked.num_procs)
    chosen = {row.flag: str(row.value) for row in missing(rows, given, asked.owned)}
    filled = {**chosen, **given}
    updates = num_updates(plan.passes, plan.tokens[0], tokens_per_update(filled))
    updates = _whole(given.get("--max-update"), updates)
    rows += length_rows(updates, filled)
    chosen = {row.flag: str(row.value) for row in missing(rows, given, asked.owned)}
    filled = {**chosen, **given}
    if wish.size is not None:
        _require_memory(plan, filled, wish.size)
    features = {} if is_own_model or wish.is_paper else _features(asked, filled)
    lines = _describe(plan, filled, given, features, asked)
    record = {"wish": wish.record(), "passes": plan.passes, "chosen": chosen, "features": features, "lines": lines}
    return _again(words, given, record, asked)


_NO_PLAN = Plan(Shape(RATE_WIDTH, 4, 1), 1.0, [1], "")


def _again(words: Sequence[str], given: Mapping[str, str], record: Mapping[str, Any], asked: Asked) -> Recipe:
    """Return the recipe of a record: what was chosen then, where the user does not say otherwise now."""
    chosen = {name: value for name, value in record["chosen"].items() if name not in given}
    front = [word for name, value in chosen.items() for word in ([name, value] if value else [name])]
    passes = record["passes"] if "--max-update" in chosen else None
    features = {name: value for name, value in record["features"].items() if asked.features.get(name) is None}
    later = [f"stage {stage}: {count:.3g} passes" for stage, count in (record.get("later") or {}).items()]
    return Recipe([*front, *words], chosen, features, passes, record, [*record["lines"], *later])


def _is_of_later_stage(before: Mapping[str, Any], asked: Asked) -> bool:
    """Tell whether what is said differs from what was said of the run by its length alone, once stages are complete."""
    same_size = asked.wish.size is None and not asked.wish.is_paper and before["wish"].get("preset") is None
    return asked.num_done > 0 and same_size and "--max-update" in before["chosen"]


def _for_later_stage(
    before: Mapping[str, Any],
    given: Mapping[str, str],
    asked: Asked,
    stream: Stream,
    planned: Sequence[Stage],
    measure: Measure,
) -> Mapping[str, Any]:
    """Return the record with the passes of the next stage, which stay what they are once they stand there."""
    later: dict[str, float] = dict(before.get("later") or {})
    stage, passes = asked.num_done, asked.wish.passes
    if stage >= len(planned) or str(stage) in later:
        return before
    if asked.wish.hours is not None:
        assert stream.tokenizer is not None
        filled = {**before["chosen"], **given}
        sizes = (int(filled["--decoder-embed-dim"]), int(filled["--decoder-layers"]))
        shape = Shape(*sizes, stream.tokenizer.vocab_size + NUM_FAIRSEQ_SYMBOLS)
        tokens = [tokens_of(stream, planned[stage])]
        passes = _by_time([shape], tokens, stream, asked.wish, measure).passes
    assert passes is not None  # else nothing is said
    return {**before, "later": {**later, str(stage): passes}}


def _plan_for(
    stream: Optional[Stream], planned: Sequence[Stage], asked: Asked, given: Mapping[str, str], measure: Measure
) -> Plan:
    if stream is None:
        return _NO_PLAN
    if asked.wish.is_paper or "--arch" in given:
        tokens = [tokens_of(stream, stage) for stage in planned]
        return Plan(_NO_PLAN.shape, asked.wish.passes or 1.0, tokens, "")
    experts = asked.experts or _whole(given.get("--num-experts"), NUM_EXPERTS)
    return decide(stream, planned, asked.wish, experts, measure)


def tokens_per_update(filled: Mapping[str, str]) -> int:
    """Return the tokens of an update."""
    batches = _whole(filled.get("--update-freq"), 1)
    if "--batch-size" not in filled and "--max-tokens" in filled:
        return batches * _whole(filled["--max-tokens"], 1)
    return batches * _whole(filled.get("--batch-size"), 1) * _whole(filled.get("--tokens-per-sample"), 1024)


def _whole(word: Optional[str], default: int) -> int:
    """Return a number of at least 1; what is none TrainOptions refuses."""
    return max(1, int(word)) if word is not None and word.isdecimal() else default


def _features(asked: Asked, filled: Mapping[str, str]) -> dict[str, Any]:
    """Return the options before ``--`` that are switched on."""
    given = {name for name, value in asked.features.items() if value is not None}
    features: dict[str, Any] = {}
    if not given & {"ema_half_life", "branch_decay", "best_checkpoint"}:
        features["ema_half_life"] = HALF_LIFE
    is_endless = filled.get("--lr-scheduler") in ENDLESS and not {"--max-epoch", "--force-anneal"} & filled.keys()
    if asked.goes_on and is_endless and not given & {"carry_optimizer", "rewarm"}:
        features["carry_optimizer"] = True
    return features


def bytes_needed(shape: Shape, tokens: int) -> int:
    """Estimate the memory of training.

    Args:
        shape: of the model.
        tokens: that are computed together.
    """
    return BYTES_PER_PARAMETER * shape.num_params + 4 * tokens * (
        40 * shape.width * shape.layers + 3 * shape.vocab_size
    )


def _require_memory(plan: Plan, filled: Mapping[str, str], size: int) -> None:
    """Refuse a size that the memory of this machine cannot hold in training; of a GPU nothing is known here."""
    if "--cpu" not in filled and any(Path("/dev").glob("nvidia[0-9]*")):
        return
    at_once = tokens_per_update(filled) // _whole(filled.get("--update-freq"), 1)
    needed, there = bytes_needed(plan.shape, at_once), memory()
    if needed > there:
        raise ValueError(
            f"--size {size:,}: training takes about {needed / 2**30:,.1f} GiB of memory, this machine has "
            f"{there / 2**30:,.1f}; give a smaller --size"
        )


def memory() -> int:
    """Return the bytes of memory that this process may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    words = limit.read_text().strip() if limit.is_file() else ""
    return min(total, int(words)) if words.isdecimal() else total


def _describe(
    plan: Plan, filled: Mapping[str, str], given: Mapping[str, str], features: Mapping[str, Any], asked: Asked
) -> list[str]:
    """Say in five lines what was chosen and why."""
    per_update = tokens_per_update(filled)
    updates = [num_updates(plan.passes, tokens, per_update) for tokens in plan.tokens]
    num_chosen = len(filled) - len(given)
    model = f"{filled['--arch']}, {filled.get('--num-experts', 'its own')} experts"
    if plan.why:
        shape = plan.shape
        model = (
            f"{shape.num_params:,} parameters, {shape.num_active:,} for each token ({plan.why}): width {shape.width}, "
            f"{shape.layers} layers, {shape.num_experts} experts in every second"
        )
    passes = "1 pass" if plan.passes == 1 else f"{plan.passes:.3g} passes"
    length = (
        f"{passes} through {sum(plan.tokens):,} tokens, {sum(updates):,} updates of {per_update:,} in "
        f"{len(updates)} stage{'s' if len(updates) > 1 else ''}"
    )
    if "--max-update" in given or "--max-epoch" in given:
        length = "as given after the --"
    elif plan.forecast is not None:
        length += f"; forecast {spell_duration(plan.forecast)}"
    rate = f"{filled.get('--optimizer')}, rate {filled.get('--lr')}" + (
        ", the same for all sizes (--mup)" if "--mup" in filled else ""
    )
    rate += f"; {filled.get('--warmup-updates', 'no')} updates of warm-up, then {filled.get('--lr-scheduler', 'fixed')}"
    tested = "the last weights of each stage, which begins with a new optimizer"
    if "ema_half_life" in features:
        carried = ", the optimizer carried from stage to stage" if "carry_optimizer" in features else ""
        tested = f"a moving average of the weights, half-life {HALF_LIFE} of the updates so far{carried}"
    return [
        f"model: {model}",
        f"length: {length}",
        f"learning: {rate}",
        f"tested: {tested}",
        f"given after the --: {' '.join(given) or 'nothing'}; chosen: {num_chosen} options, see --dry-run or run.json",
    ]
