"""Reads the records of runs into one table: a row for each run and arrival, beside it a row of facts for each run.

Everything a report says comes from these two frames. Quick: a run of images may have hundreds of stages.
Source of the sums over a stream: section 3.1 of the paper.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence

from pandas import DataFrame, Series

from fairseq_alma import metrics
from fairseq_alma.errors import AlmaError, printable
from fairseq_alma.learners.presets import canonical
from fairseq_alma.report.spelling import (
    IMAGES,
    MAX_UPDATE,
    PLACE_AND_PACE,
    TEXT,
    backbone_of,
    experiment_key,
    label_of,
    name_of,
    printable_record,
    setting_of,
    show_experts,
    show_params,
    variant_of,
)  # fmt: skip
from fairseq_alma.runs.run_folder import RUN_RECORD, STAGE_RECORD, STAGE_REMEDY, RunFolder
from fairseq_alma.runs.study import FREE_OPTIONS, ROUNDING_OPTIONS, planned_stages

TERA = 1e12
REMEDY = "leave this folder out, or run it anew"
RESULT = {TEXT: ("loss", "ppl"), IMAGES: ("loss", "error")}
SCALE = {TEXT: 1, IMAGES: 100}  # what people are shown values in units of: errors in percent
TEST_FLOPS = {TEXT: "test_flops_per_token", IMAGES: "test_flops_per_image"}
COUNTS = ("num_params", "num_experts", "num_members", "num_updates", "train_flops")
EXTRAS = ("expert_usage", "gate_trees", "evaluation", "matrix")  # what only some runs have
FIGURES = (
    "stage", "curve", "value", "loss", "valid", "before_growth", "after_growth", "growth_jump", *COUNTS, "test_flops",
    "wall_seconds",
)  # fmt: skip


RunRows = tuple[dict[str, Any], list[dict[str, Any]]]  # facts, and a row for each arrival


@dataclass(frozen=True, eq=False)
class RunTable:
    """Runs, text or images, finished or still going.

    Attributes:
        facts: a row for each run, of what it is and what it comes to (see `_facts`).
        arrivals: a row for each run and arrival (0 to B-1). ``planned``: an update belongs there; ``done``: it is made.
            Then the figures of its stage.json, NaN where there are none: ``value`` is the test perplexity, or error
            from 0 to 1; ``valid``, ``before_growth``, ``after_growth`` the same on the validation set; ``growth_jump``
            in nats. As people read them, as far as is known: ``curve``, the value in force; ``average``, its mean so
            far (equation 1); ``tflops`` so far; ``params`` and ``experts`` (per layer, over all models) that predict.
    """

    facts: DataFrame
    arrivals: DataFrame

    @classmethod
    def of(cls, runs: Iterable[RunRows]) -> "RunTable":
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


def read_run(path: Path, complain: Optional[Callable[[AlmaError], None]] = None) -> RunRows:
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
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        what = f"{error} missing" if isinstance(error, KeyError) else str(error)
        raise AlmaError(f"{path / RUN_RECORD}: damaged, {what}; {REMEDY}") from error


def _read_records(
    path: Path, complain: Optional[Callable[[AlmaError], None]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read run.json and the stage.json of all complete stages: the one place where a report meets a run's files."""
    folder = RunFolder(path)
    run = folder.read_run(REMEDY) if path.is_dir() else None
    if run is None:
        found = f"no {RUN_RECORD} in it" if path.is_dir() else "a file" if path.exists() else "no such folder"
        raise AlmaError(f"{path}: {found}, so this is no run; give a folder that alma-stream wrote (--run)")
    kind = run["stream"]["kind"]
    if kind not in RESULT:
        raise AlmaError(f"{path / RUN_RECORD}: a run on {kind!r}; this version reports on {' and '.join(RESULT)}")
    records = []
    for number in folder.stages():
        try:
            record = folder.read_stage(number)
            if record is not None and TEST_FLOPS[kind] not in record:
                damaged = folder.stage_folder(number) / STAGE_RECORD
                raise AlmaError(f"{damaged}: damaged, no {TEST_FLOPS[kind]} in it; {STAGE_REMEDY}")
            records += [record] if record is not None else []
        except AlmaError as error:
            if complain is None:
                raise
            complain(error)
    return printable_record(run), records


def rows_of(path: Path, run: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> RunRows:
    """Return a run's facts and its rows of arrivals from what its run.json and its stage.json, in order, say."""
    stream = run["stream"]
    kind, by_stage = stream["kind"], {record["stage"]: record for record in records}
    by_arrival = {max(record["megabatches"]): record for record in records}
    num_arrivals = max(stream["num_megabatches"], *(arrival + 1 for arrival in by_arrival), 1)
    ends = tuple(stage.last_arrival for stage in planned_stages(run, num_arrivals))
    rows: list[dict[str, Any]] = [
        {"arrival": arrival, "planned": arrival in ends, "done": arrival in by_arrival}
        for arrival in range(num_arrivals)
    ]
    for arrival, record in by_arrival.items():
        rows[arrival].update(_row(kind, record, by_stage.get(record["stage"] - 1)))
    facts = {"path": path, "shown_path": printable(str(path)), **_facts(run, rows, ends)}
    curve = metrics.in_force(_figure(rows, "value"), facts["num_known"], facts["untrained"])
    for row, value in zip(rows, curve, strict=False):
        row["curve"] = float(value * SCALE[kind])
    return facts, rows


def _row(kind: str, record: Mapping[str, Any], earlier: Optional[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of an update: what stage.json says, with what growth did."""
    loss, value = RESULT[kind]
    row = {name: record[name] for name in ("stage", *COUNTS, *EXTRAS) if name in record}
    row.update(test_flops=record[TEST_FLOPS[kind]], wall_seconds=record.get("wall_seconds", 0.0))
    row.update(value=record["test"][value], loss=record["test"][loss], valid=record["valid"][value])
    if "after_growth" in record:
        row["after_growth"] = record["after_growth"]["valid"][value]
        # Text has one validation set, so what the stage before ended with is what this one began with.
        before = record.get("before_growth", earlier)
        if before is not None:
            row["before_growth"] = before["valid"][value]
            row["growth_jump"] = _nats(kind, record["after_growth"]["valid"]) - _nats(kind, before["valid"])
    return row


def _nats(kind: str, result: Mapping[str, float]) -> float:
    """Return a loss in nats; that of text is logged with few digits, so it is taken from the perplexity."""
    return math.log(result["ppl"]) if kind == TEXT else result["loss"]


def _figure(rows: Sequence[Mapping[str, Any]], name: str) -> dict[int, Any]:
    """Return a figure of the updates, by their arrivals."""
    return {row["arrival"]: row[name] for row in rows if name in row}


def _facts(run: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], planned: tuple[int, ...]) -> dict[str, Any]:
    """Return what a run is, and what it comes to so far; NaN for what it does not come to.

    ``anytime`` is average perplexity or CER, ``memory`` and ``computation`` are Mem and Comp: the first two of complete
    runs that learn from a stream, which the i.i.d. controls (``iid`` k, else 0) do not. ``settled``: the perplexity
    after the last update over that after the first, how far from converged that was. ``final``, ``test_flops`` and
    ``num_params`` are those after the last update. ``seeds``, of the run and of the order of its stream, are what
    differs between runs of one experiment, ``settings`` what does not. ``num_known``: length of the curve.
    """
    options, train_options, stream = run["options"], run["train_options"], run["stream"]
    value, loss, params, experts, members, flops = (
        _figure(rows, name) for name in ("value", "loss", "num_params", "num_experts", "num_members", "test_flops")
    )
    seed, num_arrivals = int(run["seed"]), len(rows)
    is_text, is_complete = stream["kind"] == TEXT, set(planned) <= set(value)
    memory = average = math.nan
    if is_complete and options.get("iid") is None:
        memory = metrics.cumulative_memory(params, num_arrivals)
        if is_text:
            average = metrics.average_perplexity(value, num_arrivals, stream["vocab_size"])
        else:
            average = metrics.cumulative_error_rate(value, num_arrivals, stream["num_classes"])
    test, steps, key = stream.get("test") or {}, str(train_options.get(MAX_UPDATE, "")), experiment_key(stream)
    left_out = {*FREE_OPTIONS, *ROUNDING_OPTIONS}
    settings = {name: each for name, each in options.items() if name not in left_out and each is not None}
    training = {name: canonical(each) for name, each in train_options.items() if name not in PLACE_AND_PACE}
    counts = (test.get("num_tokens", 0), test.get("num_bytes", 0))
    bits = metrics.bits_per_byte(_last(loss), *counts) if is_text else None
    costs = _figure(rows, "train_flops")
    curve = {arrival: metrics.bits_per_byte(each, *counts) for arrival, each in loss.items()} if bits else {}
    area = metrics.mean_over_cost({arrival: each for arrival, each in curve.items() if each is not None}, costs)
    return {
        "setting": setting_of(run), "learner": run["learner"],
        "name": name_of(run["learner"], stream["kind"]), "label": label_of(run),
        "variant": variant_of(run),
        "backbone": backbone_of(train_options), "seed": seed, "seeds": (seed, stream.get("seed")),
        "settings": json.dumps([run["learner"], settings, training, key, num_arrivals], sort_keys=True),
        "kind": stream["kind"], "is_text": is_text, "stream": stream, "stream_key": json.dumps([stream["kind"], key]),
        "versions": run.get("versions") or {}, "options": options, "train_options": train_options,
        "num_arrivals": num_arrivals, "wait": options["wait"], "replay": bool(options["replay"]),
        "shown_wait": f"wait {options['wait']}" if options.get("iid") is None else "i.i.d.",
        "iid": options.get("iid") or 0, "first_planned": min(planned, default=num_arrivals),
        "num_planned": len(planned), "num_done": len(value), "first_done": min(value, default=num_arrivals),
        "num_known": min((each for each in planned if each not in value), default=num_arrivals),
        "is_complete": is_complete, "max_update": int(steps) if steps.isdecimal() and int(steps) > 0 else math.nan,
        "untrained": float(stream["vocab_size"]) if is_text else 1 - 1 / stream["num_classes"],
        "anytime": average, "final": _last(value), "memory": memory,
        "computation": metrics.cumulative_computation(costs),
        "settled": value[max(value)] / value[min(value)] if is_text and len(value) > 1 else math.nan,
        "bits_per_byte": math.nan if bits is None else bits, "area": math.nan if area is None else area,
        "hours": sum(_figure(rows, "wall_seconds").values()) / 3600,
        "test_flops": _last(flops), "test_memory": metrics.cumulative_memory(flops, num_arrivals),
        "num_params": _last(params), "min_params": min(params.values(), default=math.nan),
        "max_params": max(params.values(), default=math.nan), "shown_params": show_params(params),
        "experts": show_experts(experts, members), "min_experts": min(experts.values(), default=0),
        "max_experts": max(experts.values(), default=0), "max_members": max(members.values(), default=0),
        "max_jump": max(map(abs, _figure(rows, "growth_jump").values()), default=math.nan),
    }  # fmt: skip


def _last(values: Mapping[int, float]) -> float:
    return values[max(values)] if values else math.nan
