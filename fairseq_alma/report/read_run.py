"""Read the records of a run into a DataFrame with one row for each arrival.

An update is the training of a stage. At an arrival without an update, the model of the last update is current;
before the first update, the untrained model. Section 3.1 of the paper defines CER, Mem and Comp (equations 1 and 2).
"""

import itertools
import json
import math
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Mapping, Optional

from pandas import DataFrame, Index

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import LEARNERS
from fairseq_alma.learners.presets import canonical
from fairseq_alma.options import flag
from fairseq_alma.runs.run_folder import RUN_RECORD, RunFolder
from fairseq_alma.runs.study import FREE_OPTIONS, ROUNDING_OPTIONS, planned_stages

REMEDY = "remove this run from the command, or repeat the training"
RESULT = {"text": "ppl", "images": "error"}
TEST_FLOPS = {"text": "test_flops_per_token", "images": "test_flops_per_image"}
COUNTS = ("num_params", "num_experts", "num_members", "num_updates", "train_flops", "wall_seconds")
COLUMNS = (
    "stage", "value", "loss", "bits_per_byte", "valid", "before_growth", "after_growth", *COUNTS, "test_flops",
    "evaluation", "holdouts",
)  # fmt: skip
NEUTRAL_TRAIN_OPTIONS = ("--num-workers", "--cpu")
"""Training options that do not change the result."""
SIZES = {
    "--decoder-layers": "{} layers", "--decoder-embed-dim": "width {}", "--width": "width {}",
    "--channels": "{} channels", "--hidden-layers": "{} hidden layers",
}  # fmt: skip
SIZE_WORDS = ("tiny", "small", "base", "large", "mlp", "vgg")


class RecordedRun:
    """The records of a complete or incomplete run.

    Attributes:
        path: run folder.
        record: content of run.json.
        stream: value of ``stream`` in run.json.
        options: value of ``options`` in run.json.
        arrivals: one row for each arrival (index 0 to B-1), with these columns:

            - ``planned``: whether an update is planned for the arrival.
            - ``done``: whether the update of the arrival is complete.
            - ``value``: test perplexity for text, test error (0 to 1) for images; NaN without an update.
            - ``loss``: test loss; NaN without an update.
            - ``valid``, ``before_growth``, ``after_growth``: validation metrics, in the unit of ``value``.
            - ``curve``: ``value`` of the current model (error in percent); NaN from the first incomplete update on.
            - ``average``: mean of ``curve`` up to this arrival; NaN from the first incomplete update on.
            - ``params``: number of parameters, summed over all models that predict.
            - ``experts``: number of experts per layer, summed over all models that predict.
            - ``tflops``: training compute up to this arrival, in TFLOPs.
            - `COLUMNS`: values of stage.json.
        done: rows of ``arrivals`` with a complete update.
        seeds: (seed of the run, seed of the stream).
        is_text: whether the stream contains text.
        is_complete: whether all planned updates are complete.
        final: test perplexity, or test error in percent, after the newest update; NaN for a run without updates.
        over_stream: average perplexity, or CER in percentage points; NaN for an incomplete run or an i.i.d. control.
        memory: Mem, the number of parameters summed over all arrivals; NaN for an incomplete run.
        bits_per_byte: test loss after the newest update, in bits per byte; NaN for images.
    """

    def __init__(self, path: Path, record: Mapping[str, Any], arrivals: DataFrame) -> None:
        self.path, self.record, self.arrivals = path, record, arrivals
        self.stream: Mapping[str, Any] = record["stream"]
        self.options: Mapping[str, Any] = record["options"]
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
        """Return learner and waiting time as in Table 2 of the paper, for example ``SM_w3``.

        For an i.i.d. control (one training on the first k mega-batches), return ``SM iid k3``.
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
        """Describe the numbers of experts per layer and of models after each update, as in Table 2 of the paper.

        Examples: ``4``; ``4, 6, 8`` for a growing model; ``4@2`` for two models with 4 experts; ``5 models``.
        """
        pairs = list(zip(self.done.num_experts.astype(int), self.done.num_members.astype(int), strict=True))
        several = any(members > 1 for _, members in pairs)
        are_models = several and all(experts == 1 for experts, _ in pairs)
        show = "{1}" if are_models else "{0}@{1}" if several else "{0}"
        sizes = [size for size, _ in itertools.groupby(show.format(*pair) for pair in pairs)]
        sequence = ", ".join(sizes) if len(sizes) <= 5 else f"{sizes[0]} to {sizes[-1]}"
        return (f"{sequence} models" if are_models else sequence) or "–"

    @cached_property
    def stream_key(self) -> str:
        """Return a key that is equal for streams with the same text, or with the same images in any order."""
        stream = self.stream
        if not self.is_text and stream.get("source"):
            return json.dumps([stream["source"], stream.get("dataset"), stream["num_megabatches"]])
        return str(stream["fingerprint"])

    @cached_property
    def settings(self) -> dict[str, str]:
        """Return the options that change the result (flag -> value)."""
        ignored = {*FREE_OPTIONS, *ROUNDING_OPTIONS, *NEUTRAL_TRAIN_OPTIONS}
        options = {name: value for name, value in self.options.items() if value not in (None, False)}
        preset = (self.record.get("preset") or {}).get("name", "")
        found = {"--preset": preset} if preset not in ("", "paper") else {}
        found |= {flag(name): value for name, value in options.items() if name not in ignored}
        found |= {name: value for name, value in self.record["train_options"].items() if name not in ignored}
        return {name: str(canonical(value)) for name, value in found.items()}


def load_run(path: Path, on_fault: Optional[Callable[[AlmaError], None]] = None) -> RecordedRun:
    """Read the records of a run.

    Args:
        path: run folder.
        on_fault: function that receives the error of each damaged stage.json; the stage then counts as incomplete.
            None: the error is raised.

    Raises:
        AlmaError: the folder is not a run folder, or a record is damaged.
    """
    folder = RunFolder(path)
    record = folder.read_run(REMEDY) if path.is_dir() else None
    if record is None:
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


def read_run(path: Path) -> DataFrame:
    """Return `RecordedRun.arrivals` of a run. Raises AlmaError as `load_run` does."""
    return load_run(path).arrivals


def _arrivals(record: Mapping[str, Any], stages: list[dict[str, Any]]) -> DataFrame:
    stream, kind = record["stream"], record["stream"]["kind"]
    result, rows = RESULT[kind], {}
    for stage in stages:
        rows[max(stage["megabatches"])] = row = {name: stage[name] for name in ("stage", *COUNTS)}
        row |= {"value": stage["test"][result], "loss": stage["test"]["loss"], "valid": stage["valid"][result]}
        row |= {"test_flops": stage[TEST_FLOPS[kind]], "evaluation": (stage.get("evaluation") or {}).get("figures")}
        row |= {"bits_per_byte": stage["test"].get("bits_per_byte"), "holdouts": stage.get("holdouts") or None}
        grown = [name for name in ("before_growth", "after_growth") if stage.get(name)]
        row |= {name: stage[name]["valid"][result] for name in grown}
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
