"""Reads RUN/ into the figures that a report shows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.run_folder import RUN_RECORD, STAGE_RECORD, RunFolder
from fairseq_alma.learners.schedule import stages

LABELS = {"sm": "SM"}


@dataclass(frozen=True)
class RunFigures:
    """One run, as far as it has got. Dictionaries map the arrival (mega-batch number) of an update to its figure.

    Attributes:
        path: the run's folder.
        label: the learner as the paper names it, for instance ``SM_w1``.
        stream: what run.json says of the stream.
        num_arrivals: B.
        planned: arrivals at which an update belongs.
        ppl: test perplexity.
        loss: test loss in bits per token.
        num_params: parameters of what predicts.
        num_experts: experts in each Switch layer of what predicts.
        num_members: models that predict together.
        train_flops: operations spent on the update.
    """

    path: Path
    label: str
    stream: Mapping[str, Any]
    num_arrivals: int
    planned: tuple[int, ...]
    ppl: Mapping[int, float]
    loss: Mapping[int, float]
    num_params: Mapping[int, int]
    num_experts: Mapping[int, int]
    num_members: Mapping[int, int]
    train_flops: Mapping[int, float]

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
        return RunFigures(
            path=path,
            label=_label(run),
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
    test = record.get("test")
    wrong = [name for name in numbers if not isinstance(record.get(name), (int, float))]
    if not isinstance(test, dict) or not all(isinstance(test.get(name), (int, float)) for name in ("loss", "ppl")):
        wrong.append("test")
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
    tests = {name: {max(record["megabatches"]): record["test"][name] for record in records} for name in ("ppl", "loss")}
    return {**figures, **tests}


def _label(run: Mapping[str, Any]) -> str:
    """Name learner and variant as the paper's tables do."""
    options = run["options"]
    label = f"{LABELS.get(run['learner'], run['learner'])}_w{options['wait']}"
    if options["replay"]:
        label += " replay"
    return label + (" scratch" if options["init"] == "scratch" else "")
