"""Read the records of runs, and group runs that differ only in seeds.

An update is the training of a stage. The current model at an arrival is the model of the last update so far, or the
untrained model before the first update. Section 3.1 of the paper defines CER, Mem and Comp (equations 1 and 2).
"""

import itertools
import json
import math
import statistics
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Sequence

from pandas import DataFrame, Index, concat

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import LEARNERS, canonical
from fairseq_alma.options import flag
from fairseq_alma.runs.run_folder import RUN_RECORD, RunFolder, find_run, runs_of_seeds
from fairseq_alma.runs.study import BATCH_OPTIONS, FREE_OPTIONS, NEW_FIRST, OPTION_OF, ROUNDING_OPTIONS, planned_stages

REMEDY = "remove this run from the command, or repeat the training"
RESULT = {"text": "ppl", "images": "error"}
TEST_FLOPS = {"text": "test_flops_per_token", "images": "test_flops_per_image"}
COUNTS = ("num_params", "num_experts", "num_members", "num_updates", "train_flops", "wall_seconds")
COLUMNS = (
    "stage", "value", "loss", "bits_per_byte", "valid", "before_growth", "after_growth", *COUNTS, "test_flops",
    "evaluation", "holdouts",
)  # fmt: skip
SIZES = {
    "--decoder-layers": "{} layers", "--decoder-embed-dim": "width {}", "--width": "width {}",
    "--channels": "{} channels", "--hidden-layers": "{} hidden layers",
}  # fmt: skip
SIZE_WORDS = ("tiny", "mini", "small", "base", "large", "mlp", "vgg")
# Colours of learners in figures, mostly from Okabe and Ito (2008). Tables list the learners in this order.
LEARNER_COLOURS = {
    "sm": "#0072B2", "moe": "#56B4E9", "ens": "#D55E00", "bagging": "#882255", "umix": "#009E73", "gens": "#E69F00",
    "gmoe": "#CC79A7", "firefly": "#333333",
}  # fmt: skip
# Options that an experiment name omits, because the label or the number of experts shows the value.
IMPLIED = ("--num-experts", "--grow-schedule", "--num-members", "--wait", "--replay", "--iid", "--drop-rest")
# 97.5 % quantiles of Student's t distribution with 0, 1, 2, ... degrees of freedom.
T_POINTS = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


class RecordedRun:
    """The records of a complete or incomplete run.

    Attributes:
        path: run folder.
        record: content of run.json.
        stream: value of ``stream`` in run.json.
        options: value of ``options`` in run.json.
        recipe: value of ``recipe`` in run.json; without this entry, a recipe that chooses no options.
        arrivals: one row for each arrival (index 0 to B-1), with these columns:

            - ``planned``: whether an update is planned for the arrival.
            - ``done``: whether the update of the arrival is complete.
            - ``value``: test perplexity for text, test error (0 to 1) for images; NaN without an update.
            - ``loss``: test loss; NaN without an update.
            - ``valid``, ``before_growth``, ``after_growth``: validation perplexity (text) or error (0 to 1, images).
            - ``curve``: ``value`` of the current model (error in percent); NaN from the first missing update on.
            - ``average``: mean of ``curve`` up to this arrival; NaN where ``curve`` is NaN.
            - ``params``: number of parameters, summed over all models that predict.
            - ``experts``: number of experts per layer, summed over all models that predict.
            - ``tflops``: training compute up to this arrival, in TFLOPs.
            - the other `COLUMNS`: values of stage.json.
        done: rows of ``arrivals`` with a complete update.
        seeds: pair (seed of the run, seed of the stream).
        is_text: whether the stream contains text.
        is_complete: whether all planned updates are complete.
        final: test perplexity or error (percent) after the newest update; NaN if any update so far is missing.
        over_stream: mean of ``curve``, or for images the sum (CER); NaN for an incomplete run or an i.i.d. control.
        memory: Mem, the number of parameters summed over all arrivals; NaN for an incomplete run.
        bits_per_byte: test loss after the newest update, in bits per byte; NaN for images.
    """

    def __init__(self, path: Path, record: Mapping[str, Any], arrivals: DataFrame) -> None:
        self.path, self.record, self.arrivals = path, record, arrivals
        self.stream: Mapping[str, Any] = record["stream"]
        self.options: Mapping[str, Any] = record["options"]
        self.recipe: Mapping[str, Any] = record.get("recipe") or {"chosen": {}, "features": {}}
        self.seeds = record["seed"], self.stream.get("seed")
        self.is_text = self.stream["kind"] == "text"
        self.done = arrivals[arrivals.done]
        self.is_complete = bool((arrivals.done | ~arrivals.planned).all())
        self.final = self.bits_per_byte = math.nan
        if len(self.done):
            self.final, self.bits_per_byte = map(float, self.done[["curve", "bits_per_byte"]].iloc[-1])
        over_stream = arrivals.curve.mean() if self.is_text else arrivals.curve.sum()
        self.over_stream = float(over_stream) if self.is_complete and not self.options.get("iid") else math.nan
        # Arrivals before the first update count the parameters of the model after this update.
        self.memory = float(arrivals.params.bfill().sum()) if self.is_complete else math.nan

    @property
    def learner(self) -> str:
        """Return the name of the learner in the paper, or the value of ``--learner`` if no such name exists."""
        known = LEARNERS[self.stream["kind"]].get(self.record["learner"])
        return (known.label if known else "") or self.record["learner"]

    @property
    def label(self) -> str:
        """Return learner and waiting time as in Table 2 of the paper, for example ``SM_w3`` or ``SM_w3 replay``.

        For an i.i.d. control (one training run on the first k mega-batches), return ``SM iid k3``.
        """
        if self.options.get("iid"):
            return f"{self.learner} iid k{self.options['iid']}"
        return f"{self.learner}_w{self.options['wait']}" + (" replay" if self.options["replay"] else "")

    @property
    def size(self) -> str:
        """Return the size of the backbone, such as ``mlp, width 64``; empty if no option sets the size."""
        options = self.record["train_options"]
        words = [word for word in str(options.get("--arch", "")).split("_") if word in SIZE_WORDS]
        return ", ".join([*words, *(text.format(options[name]) for name, text in SIZES.items() if options.get(name))])

    @property
    def experts(self) -> str:
        """Return the numbers of experts per layer and of models after the updates, as text in the notation of Table 2.

        Examples: ``4``; ``4, 6, 8`` for a growing model; ``4@2`` for two models with 4 experts; ``5 models``.
        """
        pairs = list(zip(self.done.num_experts.astype(int), self.done.num_members.astype(int), strict=True))
        several = any(members > 1 for _, members in pairs)
        are_models = several and all(experts == 1 for experts, _ in pairs)
        show = "{1}" if are_models else "{0}@{1}" if several else "{0}"
        sizes = [size for size, _ in itertools.groupby(show.format(*pair) for pair in pairs)]
        sequence = ", ".join(sizes) if len(sizes) <= 5 else f"{sizes[0]} to {sizes[-1]}"
        return (f"{sequence} models" if are_models else sequence) or "–"

    @property
    def length(self) -> tuple[str, float]:
        """Return (unit, length of a stage): passes if alma-stream chose the updates of each stage, else updates."""
        if "--max-update" in self.recipe["chosen"]:
            return "passes", float(self.recipe["passes"])
        word = str(self.record["train_options"].get("--max-update", ""))
        return ("updates", float(word)) if word.isdecimal() and int(word) else ("", 1.0)

    @cached_property
    def stream_key(self) -> str:
        """Return a key that is equal for streams of the same text, or of the same images and number of mega-batches."""
        if not self.is_text and self.stream.get("source"):
            return json.dumps([self.stream["source"], self.stream.get("dataset"), self.stream["num_megabatches"]])
        return str(self.stream["fingerprint"])

    @cached_property
    def settings(self) -> dict[str, str]:
        """Return the options that are equal in all runs of one experiment (flag -> value)."""
        ignored = {*FREE_OPTIONS, *ROUNDING_OPTIONS, "--num-workers", "--cpu"} - {*BATCH_OPTIONS, NEW_FIRST}
        options = {name: value for name, value in self.options.items() if value not in (None, False)}
        preset = (self.record.get("preset") or {}).get("name", "")
        found = {
            **({"--preset": preset} if preset not in ("", "paper") else {}),
            **{OPTION_OF.get(name, flag(name)): value for name, value in options.items() if name not in ignored},
            **{name: value for name, value in self.record["train_options"].items() if name not in ignored},
            **({"--augment": True} if self.stream.get("augment") else {}),
            **({"--passes": self.recipe["passes"]} if "--max-update" in self.recipe["chosen"] else {}),
        }
        size, frequency = str(found.get("--batch-size", "")), str(found.get("--update-freq", 1))
        if size.isdecimal() and frequency.isdecimal():  # compare the sequences of an update, not those of a batch
            found["--batch-size"] = int(size) * int(frequency)
            found.pop("--update-freq", None)
        return {name: "" if value is True else _shown(value) for name, value in found.items()}


def _shown(value: Any) -> str:
    number = canonical(value)
    return str(int(number)) if isinstance(number, float) and number.is_integer() else str(number)


def load_run(path: Path, on_fault: Optional[Callable[[AlmaError], None]] = None) -> RecordedRun:
    """Read run.json and the stage.json files of a run.

    Args:
        path: run folder.
        on_fault: function that receives the error of each damaged stage.json; the stage then counts as incomplete.
            If None, raise the error.

    Raises:
        AlmaError: the folder is not a run folder, or a record is damaged.
    """
    path = find_run(path) or path
    folder = RunFolder(path)
    record = folder.read_run(REMEDY)
    if record is None:
        if runs := runs_of_seeds(path):
            raise AlmaError(f"{path}: expected a run, found a folder of runs; give its runs, such as {runs[0]}")
        found = f"a folder without {RUN_RECORD}" if path.is_dir() else "a file" if path.exists() else "nothing"
        raise AlmaError(f"{path}: expected a run folder, found {found}; give the --run folder of alma-stream")
    kind = record["stream"]["kind"]
    if kind not in RESULT:
        raise AlmaError(f"{path / RUN_RECORD}: expected a run on {' or '.join(RESULT)}, found {kind!r}; {REMEDY}")
    stages = []
    for number in folder.stages():
        try:
            stages.append(folder.read_stage(number))
        except AlmaError as error:
            if on_fault is None:
                raise
            on_fault(error)
    try:
        return RecordedRun(path, record, _arrivals(record, [stage for stage in stages if stage is not None]))
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise AlmaError(f"{path / RUN_RECORD}: this record or a stage.json is damaged ({reason}); {REMEDY}") from error


def _arrivals(record: Mapping[str, Any], stages: list[dict[str, Any]]) -> DataFrame:
    stream, kind = record["stream"], record["stream"]["kind"]
    result = RESULT[kind]
    rows = {
        max(stage["megabatches"]): {
            **{name: stage[name] for name in ("stage", *COUNTS)},
            "value": stage["test"][result],
            "loss": stage["test"]["loss"],
            "bits_per_byte": stage["test"].get("bits_per_byte"),
            "valid": stage["valid"][result],
            "before_growth": stage["before_growth"]["valid"][result] if stage.get("before_growth") else None,
            "after_growth": stage["after_growth"]["valid"][result] if stage.get("after_growth") else None,
            "test_flops": stage[TEST_FLOPS[kind]],
            "evaluation": (stage.get("evaluation") or {}).get("figures"),
            "holdouts": stage.get("holdouts") or None,
        }
        for stage in stages
    }
    num_arrivals = max(stream["num_megabatches"], *(arrival + 1 for arrival in rows), 1)
    planned = {stage.arrivals[-1] for stage in planned_stages(record, num_arrivals)}
    frame = DataFrame.from_dict(rows, orient="index", columns=list(COLUMNS)).astype(
        {name: float for name in COLUMNS if name not in ("evaluation", "holdouts")}
    )
    frame = frame.reindex(Index(range(num_arrivals), name="arrival"))
    frame.insert(0, "planned", [arrival in planned for arrival in frame.index])
    frame.insert(1, "done", [arrival in rows for arrival in frame.index])
    # Text has one validation set, so the value before growth is the final value of the previous stage.
    is_unknown = frame.after_growth.notna() & frame.before_growth.isna()
    frame.loc[is_unknown, "before_growth"] = frame.valid.ffill().shift()[is_unknown]
    known = min((arrival for arrival in planned if arrival not in rows), default=num_arrivals)
    untrained = float(stream["vocab_size"]) if kind == "text" else 1 - 1 / stream["num_classes"]
    # The metric of a diverged model counts as infinite until the next update.
    value = frame.value.where(~(frame.done & frame.value.isna()), math.inf)
    frame["curve"] = value.ffill().fillna(untrained).where(frame.index < known) * (1 if kind == "text" else 100)
    frame["average"] = frame.curve.cumsum() / (frame.index + 1)
    frame["params"] = frame.num_params.ffill()
    frame["experts"] = (frame.num_experts * frame.num_members).ffill()
    frame["tflops"] = frame.train_flops.fillna(0).cumsum() / 1e12
    return frame


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of a metric over seeds. For one seed, the deviation is NaN."""

    mean: float
    deviation: float
    by_seed: Mapping[Any, float] = field(repr=False)

    @staticmethod
    def of(by_seed: Mapping[Any, float]) -> Optional["Spread"]:
        """Return the `Spread` over the seeds whose value is not NaN; None if no seed has such a value."""
        found = {seed: value for seed, value in by_seed.items() if not math.isnan(value)}
        values = list(found.values())
        deviation = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan
        return Spread(statistics.fmean(values), deviation, found) if found else None

    def half_interval(self) -> float:
        """Return half the width of the 95 % confidence interval of the mean (Student's t); NaN for one seed."""
        freedom = len(self.by_seed) - 1  # without freedom, the deviation is NaN
        point = T_POINTS[freedom] if freedom < len(T_POINTS) else 1.96 + 2.4 / freedom
        return point * self.deviation / math.sqrt(freedom + 1)

    def minus(self, other: "Spread") -> Optional["Spread"]:
        """Return the `Spread` of the difference ``self - other`` over the common seeds; None if no seed is common."""
        return Spread.of(
            {seed: value - other.by_seed[seed] for seed, value in self.by_seed.items() if seed in other.by_seed}
        )

    def show(self, digits: int) -> str:
        """Return mean and standard deviation as ``24.35 ± 0.12``, or only the mean for one seed."""
        return f"{self.mean:,.{digits}f}" + ("" if math.isnan(self.deviation) else f" ± {self.deviation:,.{digits}f}")


@dataclass(eq=False)
class Experiment:
    """One learner with one set of options, over any number of seeds.

    Attributes:
        runs: runs with distinct seeds, in descending order of the number of complete stages.
        times: ``--max-update``, divided by the smallest ``--max-update`` of runs with the same backbone size.
        name: name of the experiment in the report.
    """

    runs: Sequence[RecordedRun]
    times: float = 1.0
    name: str = ""

    @property
    def first(self) -> RecordedRun:
        return self.runs[0]

    @property
    def label(self) -> str:
        """Return learner, waiting time and ``times`` as in Table 2 of the paper, for example ``SM_w3 (3x steps)``."""
        times = round(self.times) if abs(self.times - round(self.times)) < 0.1 else self.times
        return self.first.label + ("" if times == 1 else f" ({times:.3g}x steps)")

    @property
    def is_complete(self) -> bool:
        """Return whether the experiment has a complete run and is not an i.i.d. control."""
        return not self.first.options.get("iid") and any(run.is_complete for run in self.runs)

    def spread(self, figure: Callable[[RecordedRun], float]) -> Optional[Spread]:
        """Return the `Spread` of a metric over the seeds of complete runs; None if no complete run has the metric."""
        return Spread.of({run.seeds: figure(run) for run in self.runs if run.is_complete})

    def at(self, arrival: int, column: str = "curve", scale: float = 1.0) -> Optional[Spread]:
        """Return the `Spread` of a scaled column over seeds with an update at ``arrival``; None if no seed has one."""
        runs = [run for run in self.runs if arrival in run.done.index]
        return Spread.of({run.seeds: scale * float(run.arrivals.at[arrival, column]) for run in runs})

    @cached_property
    def course(self) -> DataFrame:
        """Return mean metrics, compute and sizes by arrival, over the runs with the largest number of complete stages.

        Column ``deviation`` contains the sample standard deviation of ``curve`` over these runs, or 0 for one run.
        """
        longest = (run.arrivals for run in self.runs if len(run.done) == len(self.first.done))
        rows = concat(longest).groupby(level=0)
        course = rows[["curve", "average", "tflops", "params", "experts"]].mean()
        course["deviation"] = rows.curve.std().fillna(0.0)
        return course.assign(done=self.first.arrivals.done)


def experiments(runs: Sequence[RecordedRun]) -> list[Experiment]:
    """Group runs into experiments, sorted by backbone size, learner and waiting time.

    If several runs have the same options and seeds, keep only the run with the largest number of complete stages.
    """
    groups: dict[str, dict[Any, RecordedRun]] = {}
    shortest: dict[Any, float] = {}  # (backbone size, unit) -> smallest length of a stage
    smallest: dict[str, float] = {}  # backbone size -> smallest number of parameters
    for run in sorted(runs, key=lambda run: -len(run.done)):
        stream = run.stream_key, run.stream["valid"], len(run.arrivals)
        key = json.dumps([run.record["learner"], run.settings, *stream], sort_keys=True)
        groups.setdefault(key, {}).setdefault(run.seeds, run)
        unit, length = run.length
        shortest[run.size, unit] = min(length, shortest.get((run.size, unit), length))
        params = min(run.done.num_params, default=0.0)
        smallest[run.size] = min(params, smallest.get(run.size, params))

    def order(each: Experiment) -> tuple[Any, ...]:
        run = each.first
        rank = [*LEARNER_COLOURS, run.record["learner"]].index(run.record["learner"])
        most = (max(run.done[name], default=0) for name in ("num_members", "num_experts"))
        options = run.options["replay"], run.options.get("iid") or 0, run.options["wait"]
        return smallest[run.size], run.size, rank, *options, each.times, *most

    found = []
    for group in groups.values():
        members = [*group.values()]
        unit, length = members[0].length
        found.append(Experiment(members, length / shortest[members[0].size, unit]))
    found.sort(key=order)
    _name(found)
    return found


def iid_pairs(groups: Sequence[Experiment]) -> list[tuple[Experiment, Experiment, int]]:
    """Return (i.i.d. control, sequential experiment, number of mega-batches k) for each pair to compare.

    The sequential experiment has ``--wait 1``. The other options of both are equal, except --iid and --drop-rest.
    """

    def key(each: Experiment) -> tuple[Any, ...]:
        run = each.first
        # Options that alma-stream chose depend on the amount of text.
        ignored = {"--iid", "--wait", "--drop-rest", *run.recipe["chosen"], *map(flag, run.recipe["features"])}
        settings = sorted(item for item in run.settings.items() if item[0] not in ignored)
        return run.record["learner"], *settings

    eager = {key(e): e for e in groups if not e.first.options.get("iid") and e.first.options["wait"] == 1}
    return [
        (each, eager[key(each)], each.first.options["iid"])
        for each in groups
        if each.first.options.get("iid") and key(each) in eager
    ]


def _name(groups: Sequence[Experiment]) -> None:
    """Give each experiment a distinct name: label and, if necessary, number of experts, size and differing options."""
    candidates = []
    for each in groups:
        experts, size = each.first.experts, each.first.size
        experts = "dense" if experts == "1" else experts + ("" if experts.endswith("models") else " experts")
        candidates.append(
            [", ".join(filter(None, (each.label, *added))) for added in ((), (experts,), (size,), (experts, size))]
        )
    for each, names in zip(groups, candidates, strict=True):
        unique = [name for rank, name in enumerate(names) if [other[rank] for other in candidates].count(name) == 1]
        if unique:
            each.name = unique[0]
            continue
        same_name = [group for group, other in zip(groups, candidates, strict=True) if other[-1] == names[-1]]
        flags = dict.fromkeys(flag for other in (each, *same_name) for flag in other.first.settings)
        differing = [flag for flag in flags if len({other.first.settings.get(flag) for other in same_name}) > 1]
        visible = [flag for flag in differing if flag not in IMPLIED]
        is_enough = len({(*_shown_options(other, visible),) for other in same_name}) == len(same_name)
        shown = _shown_options(each, visible if is_enough else differing)
        if [_shown_options(other, differing) for other in same_name].count(_shown_options(each, differing)) > 1:
            shown += [f"{len(each.first.arrivals)} arrivals", each.first.stream["fingerprint"][:8]]
        each.name = ", ".join([names[1], *shown])


def _shown_options(each: Experiment, flags: Sequence[str]) -> list[str]:
    own = each.first.settings
    return [f"{flag} {own[flag]}".strip() if flag in own else f"no {flag}" for flag in flags]
