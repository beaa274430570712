"""What a page says of the runs themselves: streams, learners, seeds, versions, and the commands that make them."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

from fairseq_alma.metrics.table import show_count, show_power
from fairseq_alma.report.experiment import Experiment
from fairseq_alma.report.measure import MEASURES
from fairseq_alma.report.run_figures import RunFigures, experiment_of
from fairseq_alma.runs.run_record import FREE_OPTIONS


@dataclass(frozen=True)
class Fact:
    """One line of the page's head: what it is about, and what there is to say."""

    name: str
    texts: list[str]


@dataclass(frozen=True)
class RunFact:
    """One run of the page's list.

    Attributes:
        name: learner with its variant.
        path: of the run.
        state: ``complete``, or how far it has got.
        seed: of the run.
        hours: time that its updates took.
        command: what runs it, or goes on with it.
    """

    name: str
    path: str
    state: str
    seed: str
    hours: str
    command: str


def page_facts(runs: Sequence[RunFigures], groups: Sequence[Experiment]) -> list[Fact]:
    """Return the lines of the page's head.

    Args:
        runs: all of them.
        groups: the experiments that they belong to.
    """
    complete = sum(run.is_complete for run in runs)
    stages = f"{sum(len(run.value) for run in runs):,} of {sum(len(run.planned) for run in runs):,} stages"
    hours = sum(sum(run.wall_seconds.values()) for run in runs) / 3600
    cost = f"{show_power(sum(run.computation for run in runs))} training FLOPs, {hours:,.1f} hours"
    versions = [", ".join(f"{name} {version}" for name, version in run.versions.items()) for run in runs]
    facts = [
        Fact("Stream", _distinct(_describe_stream(run) for run in runs)),
        Fact("Learners", [", ".join(learner_names(groups))]),
        Fact("Waiting times", [", ".join(str(wait) for wait in sorted({run.wait for run in runs}))]),
        Fact("Backbones", ["; ".join(_distinct(group.first.size for group in groups))]),
        Fact("Seeds", [", ".join(str(seed) for seed in sorted({run.seed for run in runs}))]),
        Fact("Runs", [f"{complete} of {len(runs)} complete, {stages}"]),
        Fact("Cost", [cost]),
        Fact("Versions", _distinct(versions)),
    ]
    return [fact for fact in facts if any(fact.texts)]


def learner_names(groups: Sequence[Experiment]) -> list[str]:
    """Return the learners of the report, each once."""
    return _distinct(group.first.name for group in groups)


def run_facts(runs: Sequence[RunFigures], labels: Mapping[str, str]) -> list[RunFact]:
    """Return a line for each run.

    Args:
        runs: all of them.
        labels: name of each experiment, by the settings of its runs.
    """
    return [
        RunFact(
            name=labels[run.settings],
            path=str(run.path),
            state="complete" if run.is_complete else f"{len(run.value)} of {len(run.planned)} stages",
            seed=str(run.seed),
            hours=f"{sum(run.wall_seconds.values()) / 3600:.2f}",
            command=command_of(run),
        )
        for run in runs
    ]


def command_of(run: RunFigures) -> str:
    """Spell the alma-stream command that a run.json records."""
    words = ["alma-stream", "--stream", str(run.stream["path"]), "--learner", run.learner, "--run", str(run.path)]
    words += ["--seed", str(run.seed)]
    for name, value in run.options.items():
        if name not in FREE_OPTIONS:
            words += _option(f"--{name.replace('_', '-')}", value)
    words.append("--")
    for name, value in run.train_options.items():
        words += [name] if value == "" else [name, str(value)]
    return shlex.join(words)


def stream_name(run: RunFigures) -> str:
    """Name the stream in a word or two: its data set, or its folder, with the one above where that says nothing."""
    path = Path(run.stream["path"])
    folder = "/".join(path.parts[-2:]) if path.name == "stream" else path.name
    return str(run.stream.get("dataset") or folder)


def _option(name: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    return [name] if value is True else [name, str(value)]


def _describe_stream(run: RunFigures) -> str:
    stream, measure = run.stream, MEASURES[run.kind]
    units = f"{stream['vocab_size']:,} units" if run.is_text else f"{stream['num_classes']} classes"
    test = (stream.get("test") or {}).get("num_tokens" if run.is_text else "num_images") or 0
    digest = str(experiment_of(stream)[0])[:12]
    sizes = f"{run.num_arrivals} mega-batches, {units}, {show_count(test)} {measure.plural} in the test set"
    return f"{stream_name(run)}: {sizes} ({digest})"


def _distinct(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]
