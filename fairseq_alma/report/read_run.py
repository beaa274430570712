"""Reads RUN/ into the figures that a report shows. Quick: a run of images may have hundreds of stages."""

import json
import math
from pathlib import Path
from typing import Any, Callable, Mapping, Optional

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.schedule import stages
from fairseq_alma.report.run_figures import IMAGES, NAMES, TEXT, RunFigures, experiment_of
from fairseq_alma.runs.run_folder import RUN_RECORD, STAGE_RECORD, RunFolder
from fairseq_alma.runs.run_record import FREE_OPTIONS

RESULT = {TEXT: ("loss", "ppl"), IMAGES: ("loss", "error")}
TEST_FLOPS = {TEXT: "test_flops_per_token", IMAGES: "test_flops_per_image"}
COUNTS = ("num_params", "num_experts", "num_members", "num_updates", "train_flops")
EXTRAS = ("expert_usage", "gate_trees")
# Options of fairseq-train that say how large a model is, and how `RunFigures.size` spells them.
SIZES = {
    "--decoder-layers": "{} layers",
    "--decoder-embed-dim": "width {}",
    "--width": "width {}",
    "--channels": "{} channels",
}
# Words of an architecture's name that say something about its size, whichever learner it is for.
SIZE_WORDS = ("tiny", "base", "large", "mlp", "vgg")

Complain = Callable[[AlmaError], None]


def read_figures(path: Path, complain: Optional[Complain] = None) -> RunFigures:
    """Read a run.

    Args:
        path: its folder.
        complain: is given the fault of each damaged stage.json, which then counts as not there; None: raise it.

    Raises:
        AlmaError: the folder is no run, or one of its records is damaged; names the file.
    """
    folder = RunFolder(path)
    run = folder.read_run("leave this folder out, or run it anew") if path.is_dir() else None
    if run is None:
        found = f"no {RUN_RECORD} in it" if path.is_dir() else "a file" if path.exists() else "no such folder"
        raise AlmaError(f"{path}: {found}, so this is no run; give a folder that alma-stream wrote (--run)")
    try:
        kind = run["stream"]["kind"]
        if kind not in RESULT:
            raise AlmaError(f"{path / RUN_RECORD}: a run on {kind!r}; this version reports on {' and '.join(RESULT)}")
        return _figures(path, run, _read_records(folder, kind, complain))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        if isinstance(error, AlmaError):
            raise
        what = f"{error} missing" if isinstance(error, KeyError) else str(error)
        raise AlmaError(f"{path / RUN_RECORD}: damaged, {what}; leave this folder out, or run it anew") from error


def _figures(path: Path, run: Mapping[str, Any], records: list[Mapping[str, Any]]) -> RunFigures:
    options, stream = run["options"], run["stream"]
    num_arrivals = max(stream["num_megabatches"], *(max(record["megabatches"]) + 1 for record in records), 1)
    iid = options.get("iid")  # runs from before there was the option lack it
    planned = stages(num_arrivals, options["wait"], options["replay"], options["drop_rest"])
    if iid is not None:
        planned = stages(num_arrivals, iid)[:1]
    figures = RunFigures(
        path=path,
        learner=run["learner"],
        label=_label(run),
        size=_size(run["train_options"]),
        seed=int(run["seed"]),
        settings=_settings(run),
        kind=stream["kind"],
        stream=stream,
        versions=run.get("versions") or {},
        num_arrivals=num_arrivals,
        planned=tuple(stage.last_arrival for stage in planned),
        wait=options["wait"],
        replay=options["replay"],
        iid=iid,
        options=options,
        train_options=run["train_options"],
        **_by_arrival(stream["kind"], records),
    )
    float(figures.untrained)  # of a damaged record, rather in here than in a table
    return figures


def _read_records(folder: RunFolder, kind: str, complain: Optional[Complain]) -> list[Mapping[str, Any]]:
    """Read the records of all complete stages, in order."""
    records: list[Mapping[str, Any]] = []
    for number in folder.stages():
        try:
            record = folder.read_stage(number)
            if record is not None:
                _check_record(folder.stage_folder(number) / STAGE_RECORD, record, kind)
                records.append(record)
        except AlmaError as error:
            if complain is None:
                raise
            complain(error)
    return records


def _check_record(path: Path, record: Mapping[str, Any], kind: str) -> None:
    """Raise AlmaError unless a record has all that a report needs."""
    results = {"test": record.get("test"), "valid": record.get("valid")}
    for name in ("before_growth", "after_growth"):
        if name in record:
            grown = record[name]
            results[name] = grown.get("valid") if isinstance(grown, dict) else None
    wrong = [name for name in (*COUNTS, TEST_FLOPS[kind], "stage") if not isinstance(record.get(name), (int, float))]
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


def _by_arrival(kind: str, records: list[Mapping[str, Any]]) -> dict[str, Any]:
    by_arrival = {max(record["megabatches"]): record for record in records}
    loss, value = RESULT[kind]

    def numbers(name: str) -> dict[int, Any]:
        return {arrival: record[name] for arrival, record in by_arrival.items()}

    figures = {name: numbers(name) for name in COUNTS}
    figures["test_flops"] = numbers(TEST_FLOPS[kind])
    figures["wall_seconds"] = {arrival: record.get("wall_seconds", 0.0) for arrival, record in by_arrival.items()}
    figures["value"] = {arrival: record["test"][value] for arrival, record in by_arrival.items()}
    figures["loss"] = {arrival: record["test"][loss] for arrival, record in by_arrival.items()}
    figures["valid"] = {arrival: record["valid"][value] for arrival, record in by_arrival.items()}
    grown = {arrival: record for arrival, record in by_arrival.items() if "after_growth" in record}
    figures["grown"] = {arrival: record["after_growth"]["valid"][value] for arrival, record in grown.items()}
    by_stage = {record["stage"]: record for record in records}
    figures["before_growth"], figures["growth_jumps"] = {}, {}
    for arrival, record in grown.items():
        # Text has one validation set, so what the stage before ended with is what this one began with.
        before = record["before_growth"] if "before_growth" in record else by_stage.get(record["stage"] - 1)
        if before is not None:
            figures["before_growth"][arrival] = before["valid"][value]
            nats = _nats(kind, record["after_growth"]["valid"]) - _nats(kind, before["valid"])
            figures["growth_jumps"][arrival] = nats
    extras = {name: {a: record[name] for a, record in by_arrival.items() if name in record} for name in EXTRAS}
    return {**figures, "extras": {name: found for name, found in extras.items() if found}}


def _nats(kind: str, result: Mapping[str, float]) -> float:
    """Return a loss in nats; that of text is logged with few digits, so it is taken from the perplexity."""
    return math.log(result["ppl"]) if kind == TEXT else result["loss"]


def _label(run: Mapping[str, Any]) -> str:
    """Name learner and variant as the paper's tables do: what is not the default there is added."""
    options, learner = run["options"], run["learner"]
    label = NAMES.get(learner, learner)
    # Runs from before there were the options lack them.
    if options.get("iid") is not None:
        return f"{label} iid k{options['iid']}"
    label += f"_w{options['wait']}"
    if options["replay"]:
        label += " replay"
    if run["stream"]["kind"] == TEXT and options.get("grow_method") not in (None, "copy"):
        label += f" {options['grow_method']}"
    if options.get("grow_select") not in (None, "loss"):
        label += f" {options['grow_select']}"
    if options.get("combine") not in (None, "probabilities"):
        label += f" {options['combine']}"
    usual = "scratch" if learner == "gens" else "previous"
    return label if options["init"] == usual else f"{label} {options['init']}"


def _size(train_options: Mapping[str, Any]) -> str:
    """Spell the size of the backbone, the same for all learners over it: ``mlp, width 64``."""
    words = [word for word in str(train_options.get("--arch", "")).split("_") if word in SIZE_WORDS]
    words += [spelling.format(train_options[name]) for name, spelling in SIZES.items() if train_options.get(name)]
    return ", ".join(words)


def _settings(run: Mapping[str, Any]) -> str:
    """Spell all that a run's figures depend on but the seeds."""
    options = {name: value for name, value in run["options"].items() if name not in FREE_OPTIONS and value is not None}
    return json.dumps([run["learner"], options, run["train_options"], experiment_of(run["stream"])], sort_keys=True)
