"""Reads RUN/ into the figures that a report shows."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.run_folder import RUN_RECORD, STAGE_RECORD, RunFolder
from fairseq_alma.learners.run_record import FREE_OPTIONS
from fairseq_alma.learners.schedule import stages

LABELS = {"sm": "SM", "ens": "Ens", "gens": "gEns", "gmoe": "gMoE", "umix": "UMix"}
RESULT = ("loss", "ppl")


@dataclass(frozen=True)
class RunFigures:
    """One run, as far as it has got. Dictionaries map the arrival (mega-batch number) of an update to its figure.

    Attributes:
        path: the run's folder.
        label: the learner as the paper names it, for instance ``SM_w1``.
        seed: of the run.
        settings: what tells runs apart that do not differ by their seeds alone.
        stream: what run.json says of the stream.
        num_arrivals: B.
        planned: arrivals at which an update belongs.
        ppl: test perplexity.
        loss: test loss in bits per token.
        num_params: parameters of what predicts.
        num_experts: experts in each Switch layer of what predicts.
        num_members: models that predict together.
        train_flops: operations spent on the update.
        valid_ppl: perplexity on the validation set.
        grown_ppl: the same right after growth, before training; only where the model grew.
    """

    path: Path
    label: str
    seed: int
    settings: str
    stream: Mapping[str, Any]
    num_arrivals: int
    planned: tuple[int, ...]
    ppl: Mapping[int, float]
    loss: Mapping[int, float]
    num_params: Mapping[int, int]
    num_experts: Mapping[int, int]
    num_members: Mapping[int, int]
    train_flops: Mapping[int, float]
    valid_ppl: Mapping[int, float]
    grown_ppl: Mapping[int, float]

    @property
    def is_complete(self) -> bool:
        """Whether every update that belongs to the run was made."""
        return set(self.planned) <= set(self.ppl)


def read_figures(path: Path) -> RunFigures:
    """Read a run.

    Raises:
        AlmaError: the folder is no run, or one of its records is damaged; names the file.
    """
    folder = RunFolder(path)
    run = folder.read_run()
    if run is None:
        raise AlmaError(
            f"{path}: no {RUN_RECORD} in it, so this is no run; give a folder that alma-stream wrote (--run)"
        )
    try:
        options, stream = run["options"], run["stream"]
        if stream["kind"] != "text":
            raise AlmaError(f"{path / RUN_RECORD}: a run on {stream['kind']}; this version reports on streams of text")
        records = _read_records(folder)
        num_arrivals = max(stream["num_megabatches"], *(max(record["megabatches"]) + 1 for record in records), 1)
        planned = stages(num_arrivals, options["wait"], options["replay"], options["drop_rest"])
        if options.get("iid") is not None:  # runs from before there was the option lack it
            planned = stages(num_arrivals, options["iid"])[:1]
        return RunFigures(
            path=path,
            label=_label(run),
            seed=run["seed"],
            settings=_settings(run),
            stream=stream,
            num_arrivals=num_arrivals,
            planned=tuple(stage.last_arrival for stage in planned),
            **_by_arrival(records),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, AlmaError):
            raise
        raise AlmaError(f"{path / RUN_RECORD}: damaged ({error!r}); give another folder") from error


def _read_records(folder: RunFolder) -> list[Mapping[str, Any]]:
    """Read the records of all complete stages, in order."""
    records: list[Mapping[str, Any]] = []
    for path in sorted(folder.root.glob(f"stage-*/{STAGE_RECORD}")):
        record = folder.read_stage(int(path.parent.name.removeprefix("stage-")))
        assert record is not None
        _check_record(path, record)
        records.append(record)
    return records


def _check_record(path: Path, record: Mapping[str, Any]) -> None:
    """Raise AlmaError unless a record has all that a report needs."""
    numbers = ("num_params", "num_experts", "num_members", "train_flops")
    results = {"test": record.get("test"), "valid": record.get("valid")}
    if "after_growth" in record:
        grown = record["after_growth"]
        results["after_growth"] = grown.get("valid") if isinstance(grown, dict) else None
    wrong = [name for name in numbers if not isinstance(record.get(name), (int, float))]
    for split, result in results.items():
        if not isinstance(result, dict) or not all(isinstance(result.get(name), (int, float)) for name in RESULT):
            wrong.append(split)
    if not isinstance(record.get("megabatches"), list) or not record["megabatches"]:
        wrong.append("megabatches")
    if wrong:
        raise AlmaError(
            f"{path}: damaged, {', '.join(wrong)} missing or of another type; remove the file, and the same "
            "alma-stream command runs the stage again"
        )


def _by_arrival(records: list[Mapping[str, Any]]) -> dict[str, Any]:
    names = ("num_params", "num_experts", "num_members", "train_flops")
    figures = {name: {max(record["megabatches"]): record[name] for record in records} for name in names}
    tests = {name: {max(record["megabatches"]): record["test"][name] for record in records} for name in RESULT}
    valid = {max(record["megabatches"]): record["valid"]["ppl"] for record in records}
    grown = {max(each["megabatches"]): each["after_growth"]["valid"]["ppl"] for each in records if _grew(each)}
    return {**figures, **tests, "valid_ppl": valid, "grown_ppl": grown}


def _grew(record: Mapping[str, Any]) -> bool:
    return "after_growth" in record


def _label(run: Mapping[str, Any]) -> str:
    """Name learner and variant as the paper's tables do: what is not the default there is added."""
    options, learner = run["options"], run["learner"]
    label = LABELS.get(learner, learner)
    # Runs from before there were the options lack them.
    if options.get("iid") is not None:
        return f"{label} iid k{options['iid']}"
    label += f"_w{options['wait']}"
    if options["replay"]:
        label += " replay"
    if options.get("grow_method") not in (None, "copy"):
        label += f" {options['grow_method']}"
    if options.get("grow_select") not in (None, "loss"):
        label += f" {options['grow_select']}"
    usual = "scratch" if learner == "gens" else "previous"
    return label if options["init"] == usual else f"{label} {options['init']}"


def _settings(run: Mapping[str, Any]) -> str:
    """Spell all that a run's figures depend on but the seed."""
    options = {name: value for name, value in run["options"].items() if name not in FREE_OPTIONS and value is not None}
    return json.dumps([run["learner"], options, run["train_options"], run["stream"]["fingerprint"]], sort_keys=True)
