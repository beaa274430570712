"""The figures of one run, text or images, finished or still going: what every table, figure and finding starts from.

`fairseq_alma.report.read_run` fills it from the run's files. Source of the sums: section 3.1 of the paper.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Optional

from fairseq_alma.metrics import anytime

TEXT = "text"
IMAGES = "images"
MAX_SIZES = 5  # of a model that grows, to be listed
NAMES = {
    "sm": "SM",
    "moe": "MoE",
    "ens": "Ens",
    "bagging": "Bagging",
    "umix": "UMix",
    "gens": "gEns",
    "gmoe": "gMoE",
    "firefly": "FF",
}


@dataclass(frozen=True)
class RunFigures:
    """One run, as far as it has got. Dictionaries map the arrival (mega-batch number) of an update to its figure.

    Attributes:
        path: the run's folder.
        learner: its name as a command takes it: ``sm``, ``ens``, …
        label: the learner and its variant as the paper names them, for instance ``SM_w1``.
        size: of the backbone, for instance ``mlp, width 64``; empty where the run does not say.
        seed: of the run; see `seeds` for what tells runs of one experiment apart.
        settings: what tells runs apart that do not differ by their seeds alone.
        kind: ``text`` or ``images``.
        stream: what run.json says of the stream.
        versions: of Python, torch, fairseq and this package.
        num_arrivals: B.
        planned: arrivals at which an update belongs.
        wait: w.
        replay: whether an update trains on all mega-batches so far.
        iid: k of the i.i.d. control that trains on k mega-batches at once (Table 1), else None.
        options: of alma-stream.
        train_options: of fairseq-train, or of the image learners' training: option, with its dashes, and value.
        value: test perplexity; of images the test error, 0 to 1.
        loss: test loss in bits per token; of images in nats.
        num_params: parameters of what predicts.
        num_experts: experts in each Switch (or mixture) layer of what predicts.
        num_members: models that predict together.
        num_updates: of each model that the stage trained.
        train_flops: operations spent on the update.
        test_flops: operations that predicting one token or one image takes.
        valid: ``value`` on the validation set.
        before_growth: the same right before growth, where the model grew.
        grown: the same right after growth, before training.
        growth_jumps: by how much growth itself changed the loss on the validation set, in nats.
        wall_seconds: time that the stage took.
        extras: what only some runs have (``expert_usage``, ``gate_trees``): name -> arrival -> what stage.json says.
    """

    path: Path
    learner: str
    label: str
    size: str
    seed: int
    settings: str
    kind: str
    stream: Mapping[str, Any]
    versions: Mapping[str, Any]
    num_arrivals: int
    planned: tuple[int, ...]
    wait: int
    replay: bool
    iid: Optional[int]
    options: Mapping[str, Any]
    train_options: Mapping[str, str]
    value: Mapping[int, float]
    loss: Mapping[int, float]
    num_params: Mapping[int, int]
    num_experts: Mapping[int, int]
    num_members: Mapping[int, int]
    num_updates: Mapping[int, int]
    train_flops: Mapping[int, float]
    test_flops: Mapping[int, float]
    valid: Mapping[int, float]
    before_growth: Mapping[int, float]
    grown: Mapping[int, float]
    growth_jumps: Mapping[int, float]
    wall_seconds: Mapping[int, float]
    extras: Mapping[str, Mapping[int, Any]]

    @property
    def name(self) -> str:
        """The learner as the paper names it: ``SM``, ``gEns``."""
        return NAMES.get(self.learner, self.learner)

    @property
    def seeds(self) -> tuple[int, Any]:
        """Seed of the run and of the stream's order: what differs between runs of one experiment."""
        return self.seed, self.stream.get("seed")

    @property
    def is_text(self) -> bool:
        """Whether ``value`` is a perplexity; else it is an error."""
        return self.kind == TEXT

    @property
    def is_complete(self) -> bool:
        """Whether every update that belongs to the run was made."""
        return set(self.planned) <= set(self.value)

    @property
    def untrained(self) -> float:
        """``value`` of a model that was not trained yet: it finds every unit, or every class, equally likely."""
        if self.is_text:
            return float(self.stream["vocab_size"])
        return 1 - 1 / self.stream["num_classes"]

    @property
    def anytime(self) -> Optional[float]:
        """Average test perplexity over arrivals, or CER in percent points; None for a run that is not complete.

        The i.i.d. control has none either: it does not learn from a stream.
        """
        if not self.is_complete or self.iid is not None:
            return None
        if self.is_text:
            return anytime.average_perplexity(self.value, self.num_arrivals, self.stream["vocab_size"])
        return anytime.cumulative_error_rate(self.value, self.num_arrivals, self.stream["num_classes"])

    @property
    def final(self) -> Optional[float]:
        """``value`` after the last update so far, or None before the first."""
        return anytime.final(self.value)

    @property
    def memory(self) -> Optional[float]:
        """Mem, equation 2: parameters summed over all arrivals; None where `anytime` is."""
        if not self.is_complete or self.iid is not None:
            return None
        return anytime.cumulative_memory(self.num_params, self.num_arrivals)

    @property
    def computation(self) -> float:
        """Comp, equation 2: training FLOPs of all updates so far."""
        return anytime.cumulative_computation(self.train_flops)

    @property
    def curve(self) -> list[float]:
        """``value`` in force after each arrival, as far as it is known: B values for a complete run.

        While a learner waits, the model of its last update counts, before the first an untrained one.
        """
        missing = [arrival for arrival in self.planned if arrival not in self.value]
        return anytime.in_force(self.value, min(missing, default=self.num_arrivals), self.untrained)

    @property
    def bits_per_byte(self) -> float:
        """Test loss per byte of text after the last update; NaN where there is none."""
        loss, test = anytime.final(self.loss), self.stream.get("test") or {}
        if loss is None or not self.is_text:
            return math.nan
        bits = anytime.bits_per_byte(loss, test.get("num_tokens", 0), test.get("num_bytes", 0))
        return math.nan if bits is None else bits

    @property
    def experts(self) -> str:
        """Experts as the paper spells them: ``4``, or two models with 4 each ``4@2``; all sizes in turn.

        Of many sizes the first and the last; of models without experts only their number: ``5 models``.
        """
        several = any(members > 1 for members in self.num_members.values())
        only_models = several and all(experts == 1 for experts in self.num_experts.values())
        sizes: list[str] = []
        for arrival, experts in sorted(self.num_experts.items()):
            size = f"{experts}@{self.num_members[arrival]}" if several else f"{experts}"
            size = size.removeprefix("1@") if only_models else size
            sizes += [size] if size not in sizes[-1:] else []
        text = ", ".join(sizes) if len(sizes) <= MAX_SIZES else f"{sizes[0]} to {sizes[-1]}"
        return f"{text} models" if only_models else text or "–"


def experiment_of(stream: Mapping[str, Any]) -> list[Any]:
    """Return what two streams share whose results compare.

    Streams of images that differ by their own seed alone (the same images in another order) belong to one experiment;
    of text, only a stream and itself do.
    """
    if stream["kind"] == IMAGES and stream.get("source") is not None:
        return [stream["source"], stream.get("dataset"), stream["num_megabatches"]]
    return [stream["fingerprint"]]
