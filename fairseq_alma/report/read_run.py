"""Reads the records of runs into one table: a row for each run and arrival, beside it a row of facts for each run.

Everything a report says comes from these two frames. Quick: a run of images may have hundreds of stages.
Source of the sums over a stream: section 3.1 of the paper.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Optional

from pandas import DataFrame, Series

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.schedule import stages
from fairseq_alma.metrics import anytime
from fairseq_alma.report.spelling import (
    IMAGES,
    MAX_UPDATE,
    NAMES,
    TEXT,
    backbone_of,
    experiment_key,
    label_of,
    printable,
    show_experts,
    show_params,
)  # fmt: skip
from fairseq_alma.runs.run_folder import RUN_RECORD, STAGE_RECORD, RunFolder
from fairseq_alma.runs.run_record import FREE_OPTIONS

TERA = 1e12
RESULT = {TEXT: ("loss", "ppl"), IMAGES: ("loss", "error")}
SCALE = {TEXT: 1, IMAGES: 100}  # what people are shown values in units of: errors in percent
TEST_FLOPS = {TEXT: "test_flops_per_token", IMAGES: "test_flops_per_image"}
COUNTS = ("num_params", "num_experts", "num_members", "num_updates", "train_flops")
EXTRAS = ("expert_usage", "gate_trees")  # what only some runs have
FIGURES = (
    "stage", "curve", "value", "loss", "valid", "before_growth", "after_growth", "growth_jump", *COUNTS, "test_flops",
    "wall_seconds",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class RunTable:
    """Runs, text or images, finished or still going.

    Attributes:
        facts: a row for each run, of what it is and what it comes to (see `_facts`).
        arrivals: a row for each run and arrival (0 to B-1). ``planned``: an update belongs there; ``done``: it was made;
            then the figures of its stage.json, NaN where it has none: ``value`` is the test perplexity, or error from
            0 to 1, ``valid``, ``before_growth`` and ``after_growth`` the same on the validation set, ``growth_jump``
            the change of the validation loss by growth in nats. As people read them, as far as they are known:
            ``curve``, the value in force; ``average``, its mean over the arrivals so far (equation 1); ``tflops``
            spent so far; ``params`` and ``experts`` (per layer, over all models) of what predicts.
    """

    facts: DataFrame
    arrivals: DataFrame

    @classmethod
    def of(cls, runs: Iterable[tuple[dict[str, Any], list[dict[str, Any]]]]) -> "RunTable":
        """Join what `read_run` returns."""
        found = list(runs)
        rows = [{"run": index, **row} for index, (_, rows) in enumerate(found) for row in rows]
        arrivals = DataFrame(rows, columns=["run", "arrival", "planned", "done", *FIGURES, *EXTRAS])
        arrivals = arrivals.astype(dict.fromkeys(FIGURES, float))
        runs_of = arrivals.groupby("run")
        arrivals["average"] = runs_of.curve.cumsum() / (arrivals.arrival + 1)
        arrivals["tflops"] = (arrivals.train_flops.fillna(0.0) / TERA).groupby(arrivals.run).cumsum()
        arrivals["params"] = runs_of.num_params.ffill()
        arrivals["experts"] = (arrivals.num_experts * arrivals.num_members).groupby(arrivals.run).ffill()
        return cls(DataFrame([facts for facts, _ in found]), arrivals)

    def where(self, chosen: Series) -> "RunTable":
        """Return some of the runs."""
        facts = self.facts[chosen]
        return RunTable(facts, self.arrivals[self.arrivals.run.isin(facts.index)])

    def by(self, column: str) -> list["RunTable"]:
        """Return the runs apart that differ in a fact, in the order in which they come."""
        return [self.where(self.facts[column] == value) for value in self.facts[column].unique()]


def read_run(
    path: Path, complain: Optional[Callable[[AlmaError], None]] = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read a run's records, all of them before anything is made of them, into its facts and its rows of arrivals.

    Args:
        path: its folder.
        complain: is given the fault of each damaged stage.json, which then counts as not there; None: raise it.

    Raises:
        AlmaError: the folder is no run, or one of its records is damaged; names the file.
    """
    run, records = _read_records(path, complain)
    try:
        return rows_of(path, run, records)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        if isinstance(error, AlmaError):
            raise
        what = f"{error} missing" if isinstance(error, KeyError) else str(error)
        raise AlmaError(f"{path / RUN_RECORD}: damaged, {what}; leave this folder out, or run it anew") from error


def _read_records(
    path: Path, complain: Optional[Callable[[AlmaError], None]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read run.json and the stage.json of all complete stages: the one place where a report meets a run's files."""
    folder = RunFolder(path)
    run = folder.read_run() if path.is_dir() else None
    if run is None:
        found = f"no {RUN_RECORD} in it" if path.is_dir() else "a file" if path.exists() else "no such folder"
        raise AlmaError(f"{path}: {found}, so this is no run; give a folder that alma-stream wrote (--run)")
    stream = run.get("stream")
    kind: Any = stream.get("kind") if isinstance(stream, dict) else None
    if isinstance(kind, str) and kind not in RESULT:
        raise AlmaError(f"{path / RUN_RECORD}: a run on {kind!r}; this version reports on {' and '.join(RESULT)}")
    records = []
    names = [re.fullmatch(r"stage-(\d{3,})", each.parent.name) for each in path.glob(f"stage-*/{STAGE_RECORD}")]
    for number in sorted(int(name[1]) for name in names if name and isinstance(kind, str)):
        try:
            record = folder.read_stage(number)
            if record is not None:
                _check_record(folder.stage_folder(number) / STAGE_RECORD, record, kind)
                records.append(record)
        except AlmaError as error:
            if complain is None:
                raise
            complain(error)
    return printable(run), records


def _check_record(path: Path, record: Mapping[str, Any], kind: str) -> None:
    """Raise AlmaError unless a stage.json has all that a report needs."""
    results = {"test": record.get("test"), "valid": record.get("valid")}
    for name in ("before_growth", "after_growth"):
        if name in record:
            results[name] = record[name].get("valid") if isinstance(record[name], dict) else None
    numbers = (*COUNTS, TEST_FLOPS[kind], "stage", *(["wall_seconds"] if "wall_seconds" in record else []))
    wrong = [name for name in numbers if not isinstance(record.get(name), (int, float))]
    for split, result in results.items():
        if not isinstance(result, dict) or not all(isinstance(result.get(name), (int, float)) for name in RESULT[kind]):
            wrong.append(split)
    megabatches = record.get("megabatches")
    if not isinstance(megabatches, list) or not megabatches or not all(isinstance(each, int) for each in megabatches):
        wrong.append("megabatches")
    if wrong:
        raise AlmaError(
            f"{path}: damaged, {', '.join(wrong)} missing or of another type; remove the file, and the same "
            "alma-stream command runs the stage again"
        )


def rows_of(
    path: Path, run: Mapping[str, Any], records: list[dict[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a run's facts and its rows of arrivals.

    Args:
        path: of the run.
        run: what run.json says.
        records: what each stage.json says, in order.
    """
    stream, options = run["stream"], run["options"]
    by_arrival = {max(record["megabatches"]): record for record in records}
    num_arrivals = max(stream["num_megabatches"], *(arrival + 1 for arrival in by_arrival), 1)
    iid = options.get("iid")  # runs from before there was the option lack it
    planned = stages(num_arrivals, options["wait"], options["replay"], options["drop_rest"])
    if iid is not None:
        planned = stages(num_arrivals, iid)[:1]
    ends = tuple(stage.last_arrival for stage in planned)
    facts = _facts(run, by_arrival, num_arrivals, ends)
    curve = anytime.in_force(_figures(by_arrival, "value", stream["kind"]), facts["num_known"], facts["untrained"])
    rows: list[dict[str, Any]] = [
        {"arrival": arrival, "planned": arrival in ends, "done": arrival in by_arrival}
        for arrival in range(num_arrivals)
    ]
    for row, value in zip(rows, curve, strict=False):
        row["curve"] = value * SCALE[stream["kind"]]
    by_stage = {record["stage"]: record for record in records}
    for arrival, record in by_arrival.items():
        rows[arrival].update(_row(stream["kind"], record, by_stage.get(record["stage"] - 1)))
    jumps = [abs(row["growth_jump"]) for row in rows if "growth_jump" in row]
    return {**facts, "path": path, "shown_path": printable(str(path)), "max_jump": max(jumps, default=math.nan)}, rows


def _row(kind: str, record: Mapping[str, Any], earlier: Optional[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of an update: what stage.json says, with what growth did."""
    loss, value = RESULT[kind]
    row = {name: record[name] for name in ("stage", *COUNTS, *EXTRAS) if name in record}
    row.update(test_flops=record[TEST_FLOPS[kind]], wall_seconds=record.get("wall_seconds", 0.0))
    row.update(value=record["test"][value], loss=record["test"][loss], valid=record["valid"][value])
    if "after_growth" in record:
        after = record["after_growth"]["valid"]
        row["after_growth"] = after[value]
        # Text has one validation set, so what the stage before ended with is what this one began with.
        before = record.get("before_growth", earlier)
        if before is not None:
            row["before_growth"] = before["valid"][value]
            row["growth_jump"] = _nats(kind, after) - _nats(kind, before["valid"])
    return row


def _nats(kind: str, result: Mapping[str, float]) -> float:
    """Return a loss in nats; that of text is logged with few digits, so it is taken from the perplexity."""
    return math.log(result["ppl"]) if kind == TEXT else result["loss"]


def _figures(by_arrival: Mapping[int, Mapping[str, Any]], name: str, kind: str) -> dict[int, Any]:
    if name == "value":
        return {arrival: record["test"][RESULT[kind][1]] for arrival, record in by_arrival.items()}
    return {arrival: record.get(name, 0.0) for arrival, record in by_arrival.items()}


def _facts(
    run: Mapping[str, Any], by_arrival: Mapping[int, Mapping[str, Any]], num_arrivals: int, planned: tuple[int, ...]
) -> dict[str, Any]:
    """Return what a run is, and what it comes to so far; NaN for what it does not come to.

    ``anytime`` is average perplexity or CER, ``memory`` and ``computation`` are Mem and Comp: the first two of complete
    runs that learn from a stream, which the i.i.d. controls (``iid`` k, else 0) do not. ``final``, ``test_flops`` and
    ``num_params`` are those after the last update. ``seeds``, of the run and of the order of its stream, are what
    differs between runs of one experiment, ``settings`` what does not. ``num_known``: length of the curve.
    """
    options, train_options, stream, kind = run["options"], run["train_options"], run["stream"], run["stream"]["kind"]
    value, params = _figures(by_arrival, "value", kind), _figures(by_arrival, "num_params", kind)
    experts, members = (_figures(by_arrival, name, kind) for name in ("num_experts", "num_members"))
    is_complete, is_text = set(planned) <= set(value), kind == TEXT
    total = average = math.nan
    if is_complete and options.get("iid") is None:
        total = anytime.cumulative_memory(params, num_arrivals)
        if is_text:
            average = anytime.average_perplexity(value, num_arrivals, stream["vocab_size"])
        else:
            average = anytime.cumulative_error_rate(value, num_arrivals, stream["num_classes"])
    flops = _figures(by_arrival, TEST_FLOPS[kind], kind)
    steps = str(train_options.get(MAX_UPDATE, ""))
    stream_key = experiment_key(stream)
    settings = {name: each for name, each in options.items() if name not in FREE_OPTIONS and each is not None}
    return {
        "learner": run["learner"], "name": NAMES.get(run["learner"], run["learner"]), "label": label_of(run),
        "backbone": backbone_of(train_options), "seed": int(run["seed"]),
        "seeds": (int(run["seed"]), stream.get("seed")),
        "settings": json.dumps([run["learner"], settings, train_options, stream_key], sort_keys=True),
        "kind": kind, "is_text": is_text, "stream": stream, "stream_key": json.dumps([kind, stream_key]),
        "versions": run.get("versions") or {}, "options": options, "train_options": train_options,
        "num_arrivals": num_arrivals, "wait": options["wait"], "replay": bool(options["replay"]),
        "iid": options.get("iid") or 0, "planned": planned, "first_planned": planned[0] if planned else num_arrivals,
        "num_planned": len(planned), "num_done": len(value), "first_done": min(value, default=num_arrivals),
        "num_known": min((each for each in planned if each not in value), default=num_arrivals),
        "is_complete": is_complete, "max_update": int(steps) if steps.isdecimal() and int(steps) > 0 else math.nan,
        "untrained": float(stream["vocab_size"]) if is_text else 1 - 1 / stream["num_classes"],
        "anytime": average, "final": _last(value), "memory": total,
        "computation": anytime.cumulative_computation(_figures(by_arrival, "train_flops", kind)),
        "bits_per_byte": _bits_per_byte(stream, _last({a: r["test"]["loss"] for a, r in by_arrival.items()})),
        "hours": sum(_figures(by_arrival, "wall_seconds", kind).values()) / 3600,
        "test_flops": _last(flops), "test_memory": anytime.cumulative_memory(flops, num_arrivals),
        "num_params": _last(params), "min_params": min(params.values(), default=math.nan),
        "max_params": max(params.values(), default=math.nan), "shown_params": show_params(params),
        "experts": show_experts(experts, members), "min_experts": min(experts.values(), default=0),
        "max_experts": max(experts.values(), default=0), "max_members": max(members.values(), default=0),
    }  # fmt: skip


def _bits_per_byte(stream: Mapping[str, Any], loss: float) -> float:
    test = stream.get("test") or {}
    bits = anytime.bits_per_byte(loss, test.get("num_tokens", 0), test.get("num_bytes", 0))
    return math.nan if bits is None or stream["kind"] != TEXT else bits


def _last(values: Mapping[int, float]) -> float:
    found = anytime.final(values)
    return math.nan if found is None else found
