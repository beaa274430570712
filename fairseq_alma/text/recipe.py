"""What a good run on text needs and the user does not say: all of it is decided here, by one table.

The optimizer carried through the stages and an average of the weights tested are the best means at every arrival of
``recipes/anytime``. What was measured
for the rest stands in ``docs/reference/defaults.md``. What stands behind ``--`` wins. An ``--arch`` there makes the
model the user's: then only that is filled in for which fairseq has no default, or one that trains no language model
(``--lr`` 0.25, a criterion without the balance loss).

Neither torch nor fairseq: a dry run imports neither.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Optional, Sequence

from fairseq_alma.checkpoints.model_options import SWITCH_SIZES
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import NUM_FAIRSEQ_SYMBOLS
from fairseq_alma.learners.learner import Stage
from fairseq_alma.options import group_words
from fairseq_alma.terminal import spell_duration
from fairseq_alma.text.model_size import (
    AT_ONCE,
    HEAD_WIDTH,
    LENGTH,
    NUM_EXPERTS,
    Measure,
    Plan,
    Shape,
    Wish,
    batch_of,
    by_time,
    decide,
    num_updates,
    require_memory,
    tokens_of,
)
from fairseq_alma.text.train_options import BALANCING
from fairseq_alma.training.feature import ENDLESS

RATE, RATE_WIDTH = 0.007, 128
"""Peak learning rate of Adam, at this width; it falls with the width."""
BETA2, LARGE_BETA2, SMALL_UPDATE = 0.99, 0.95, 16_384
"""The squares of gradients are averaged over more updates where these have few tokens; up to SMALL_UPDATE of them."""
MANY_PASSES = 4
"""From more passes on dropout and weight decay are needed."""


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


def paper_rows() -> list[Row]:
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
        Row("--adam-betas", f"(0.9, {BETA2 if batch * LENGTH <= SMALL_UPDATE else LARGE_BETA2})", "--optimizer"),
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
    """Return the learning rate, which falls with the width."""
    arch = given.get("--arch", "alma_switch_lm")
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
        is_tested_otherwise: whether an option says what of a stage is tested.
        has_beginning: whether the run begins with a checkpoint.
        num_procs: processes that share an update.
        num_done: stages that are complete.
    """

    wish: Wish
    owned: Mapping[str, str]
    experts: Optional[int]
    goes_on: bool
    features: Mapping[str, Any]
    is_tested_otherwise: bool = False
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
    _refuse_contradictions(wish, given)
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
    return _again(words, given, _decided(plan, given, asked), asked)


def _refuse_contradictions(wish: Wish, given: Mapping[str, str]) -> None:
    if "--arch" in given and (wish.size is not None or wish.hours is not None):
        flag = "--hours" if wish.size is None else "--size"
        raise ValueError(f"{flag} chooses a model, and --arch after the -- says which; leave one of them out")
    if wish.passes is not None and any(end in given for end in ENDS):
        raise ValueError("--passes: --max-update or --max-epoch after the -- says how long a stage is; leave one out")


def _decided(plan: Plan, given: Mapping[str, str], asked: Asked) -> dict[str, Any]:
    """Return what run.json says of what is filled in by a plan."""
    wish, is_own_model = asked.wish, "--arch" in given
    rows = paper_rows() if wish.is_paper else good_rows(plan, given, asked.num_procs)
    filled = {**{row.flag: str(row.value) for row in missing(rows, given, asked.owned)}, **given}
    updates = num_updates(plan.passes, plan.tokens[0], tokens_per_update(filled))
    rows += length_rows(_whole(given.get("--max-update"), updates), filled)
    chosen = {row.flag: str(row.value) for row in missing(rows, given, asked.owned)}
    filled = {**chosen, **given}
    is_on_cpu = "--cpu" in filled or not any(Path("/dev").glob("nvidia[0-9]*"))
    if wish.size is not None and is_on_cpu:  # of a GPU nothing is known here
        require_memory(plan.shape, tokens_per_update(filled) // _whole(filled.get("--update-freq"), 1), wish.size)
    features = {} if is_own_model or wish.is_paper else _features(asked, filled)
    lines = _describe(plan, filled, given, features)
    return {"wish": wish.record(), "passes": plan.passes, "chosen": chosen, "features": features, "lines": lines}


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
        passes = by_time([shape], tokens, stream, asked.wish, measure).passes
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
    features: dict[str, Any] = {} if asked.is_tested_otherwise else {"ema_half_life": "1/16"}
    is_endless = filled.get("--lr-scheduler") in ENDLESS and not {"--max-epoch", "--force-anneal"} & filled.keys()
    if asked.goes_on and is_endless and "carry_optimizer" not in given:
        features["carry_optimizer"] = True
    return features


def _describe(
    plan: Plan, filled: Mapping[str, str], given: Mapping[str, str], features: Mapping[str, Any]
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
    rate = f"{filled.get('--optimizer')}, rate {filled.get('--lr')}"
    rate += f"; {filled.get('--warmup-updates', 'no')} updates of warm-up, then {filled.get('--lr-scheduler', 'fixed')}"
    tested = "the last weights of each stage, which begins with a new optimizer"
    if half_life := features.get("ema_half_life"):
        carried = ", the optimizer carried from stage to stage" if "carry_optimizer" in features else ""
        tested = f"a moving average of the weights, half-life {half_life} of the updates so far{carried}"
    return [
        f"model: {model}",
        f"length: {length}",
        f"learning: {rate}",
        f"tested: {tested}",
        f"given after the --: {' '.join(given) or 'nothing'}; chosen: {num_chosen} options, see --dry-run or run.json",
    ]
