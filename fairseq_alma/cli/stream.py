"""``alma-stream``: run a whole stream of mega-batches, resume it, or run one stage of it.

Before ``--`` stand its own options and those that the learners declare.
"""

import argparse
import contextlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Sequence

from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.data.stream import Stream, file_sha256
from fairseq_alma.errors import AlmaError, refuse_no_folder
from fairseq_alma.exchange.exportable import refuse_unexportable
from fairseq_alma.images.image_job import ImageJob
from fairseq_alma.learners.learner import LEARNERS, Learner, Stage, StagePlan
from fairseq_alma.learners.presets import PAPER
from fairseq_alma.options import KINDS, TRAINING, Option, Options, flag, options_of
from fairseq_alma.runs.evaluation import StageEvaluation
from fairseq_alma.runs.loop import Run, run_stages, train_members
from fairseq_alma.runs.run_folder import RUN_RECORD, RunFolder
from fairseq_alma.runs.study import (
    FEATURES_FROM,
    LEARNERS_FROM,
    Job,
    PartOptions,
    ProcessOptions,
    RunRequest,
    StudyOptions,
    describe_run,
    require_same_run,
)
from fairseq_alma.runs.workers import MemberJobs, devices_of_jobs
from fairseq_alma.terminal import print_line
from fairseq_alma.text.defaults import Context, Preferences, Recipe, complete, tokens_of
from fairseq_alma.text.text_job import TextJob
from fairseq_alma.training.feature import FEATURES, Features
from fairseq_alma.training.given_code import import_from
from fairseq_alma.training.planned_run import PlannedRun
from fairseq_alma.watch.arrivals import ArrivalCurves
from fairseq_alma.watch.run_display import RunDisplay

_CAPACITY = "--eval-capacity-factor"
OWN: tuple[type[Options], ...] = (StudyOptions, PartOptions, ProcessOptions)

EPILOG = """\
Options after -- are passed to fairseq-train (text) or to the training of image models, and take precedence over what is
chosen here. No options are required there: alma-stream --stream STREAM --run RUN

Learners: {learners}
A killed run resumes with the same command and ends with the same figures. Logs are in RUN/stage-NNN/*.log.
"""


class OneLine(argparse.RawDescriptionHelpFormatter):
    """One line for each option: its first clause, and its default."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=120)

    def _split_lines(self, text: str, width: int) -> list[str]:
        default = re.search(r" \(default: [^()]*\)$", text)
        end = "" if default is None else default[0]
        first = re.split(r"; | \(default:|: [a-z]+, ", text.removesuffix(end))[0]
        room = width - len(end)
        return [(first if len(first) <= room else first[: room - 1] + "…") + end]


def read_arguments(
    argv: Optional[Sequence[str]],
) -> tuple[argparse.ArgumentParser, argparse.Namespace, list[str], list[str]]:
    """Read the command line; what is wrong ends the program as a usage error.

    Returns:
        The parser, for further errors; what stands before ``--``; its words; the words after it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    _import_further(words[:cut])
    parser = build_parser()
    arguments = parser.parse_args(words[:cut])
    return parser, arguments, words[:cut], words[cut + 1 :]


def learner_options(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, kind: str
) -> tuple[type[Learner], dict[str, Any]]:
    """Return the learner, and what the user gave of its options; refuse what means nothing to it on this kind of data.

    Args:
        parser: for errors.
        arguments: what stands before ``--``.
        kind: ``text`` or ``images``.
    """
    learners = LEARNERS[kind]
    if arguments.learner not in learners:
        parser.error(f"--learner {arguments.learner}: not for streams of {kind}; choose from {', '.join(learners)}")
    learner = learners[arguments.learner]
    own = {name: option for each in (*OWN, *FEATURES) for name, option in options_of(each).items()}
    own = {name: option for name, option in own.items() if option.side != TRAINING}
    for name in {**_declared(), **own}:
        meant = sorted(each for each in learners if _means(learners[each], name, own.get(name), kind))
        if vars(arguments)[name] is not None and learner.name not in meant:
            use = f"goes with --learner {', '.join(meant)}, not with {learner.name}" if meant else "has no meaning"
            parser.error(f"{flag(name)} {use} on streams of {kind}")
    words = {name: vars(arguments)[name] for name in options_of(learner) if vars(arguments)[name] is not None}
    given = {name: _read_value(parser, learner, kind, name, word) for name, word in words.items()}
    return learner, given


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of what stands before ``--``."""
    parser = Parser(
        prog="alma-stream",
        description="Train on one mega-batch after the other and test after each update (Algorithm 1 of the paper).",
        epilog=EPILOG.format(learners=", ".join(sorted({name for each in LEARNERS.values() for name in each}))),
        formatter_class=OneLine,
        usage="alma-stream --stream STREAM --run RUN [options] [-- fairseq-train options]",
        allow_abbrev=False,
    )
    _add_own(parser, StudyOptions)
    group = parser.add_argument_group("learner")
    names = sorted({name for learners in LEARNERS.values() for name in learners})
    how: dict[str, Any] = {"choices": names, "default": "sm", "metavar": "NAME"}
    group.add_argument("--learner", help="how the model learns, see below (default: sm)", **how)
    for name, declared in _declared().items():
        _add_declared(group, name, declared)
    _add_own(parser.add_argument_group("a part of the run"), PartOptions)
    _add_own(parser.add_argument_group("several processes"), ProcessOptions)
    offered = [option for each in FEATURES for option in options_of(each).values() if option.side != TRAINING]
    for kinds in (KINDS, *((kind,) for kind in KINDS)):
        group = parser.add_argument_group(f"anytime training ({', '.join(kinds)})")
        for option in offered:
            if option.kinds == kinds:
                option.add_to(group, kinds[0])
    return parser


def _add_own(group: Any, declaring: type[Options]) -> None:
    """Add options of alma-stream, and name the learners to whom some of them mean something alone."""
    for option in options_of(declaring).values():
        if option.trait is not None:
            names = ", ".join(name for name, each in LEARNERS["images"].items() if getattr(each, option.trait))
            option = replace(option, help=option.help.replace("{learners}", names))
        option.add_to(group)


def _add_declared(group: Any, name: str, declared: Mapping[tuple[str, str], type[Learner]]) -> None:
    """Add an option that learners declare, as words: what they may be is for the learner to say that is chosen.

    Args:
        group: of the parser.
        name: of the field.
        declared: kind and name -> the learner.
    """
    options = [options_of(learner)[name] for learner in declared.values()]
    words: dict[str, Any] = {"dest": name, "help": "; ".join(_help(name, declared)), "default": None}
    if options[0].type is bool:
        group.add_argument(options[0].flag, action="store_true", **words)
        return
    choices = [*dict.fromkeys(word for option in options for word in option.choices)]
    words.update({"choices": choices} if choices else {"metavar": options[0].metavar or "N"})
    group.add_argument(options[0].flag, **words)


def _help(name: str, declared: Mapping[tuple[str, str], type[Learner]]) -> Iterable[str]:
    """Say what an option means to whom: learners with the same words share them."""
    shared: dict[str, list[tuple[str, str]]] = {}
    for (kind, learner), each in declared.items():
        option = options_of(each)[name]
        shared.setdefault(option.help + option.shown_default(kind), []).append((kind, learner))
    for text, users in shared.items():
        kinds = {kind for kind, _ in users}
        of_one_kind = f"{users[0][0]}, " if len(kinds) == 1 else ""
        yield f"{of_one_kind}{', '.join(dict.fromkeys(learner for _, learner in users))}: {text}".replace("%", "%%")


def _read_value(parser: argparse.ArgumentParser, learner: type[Learner], kind: str, name: str, word: Any) -> Any:
    """Return the value of a learner's option; refuse a choice that other learners have, and a number out of range."""
    option = options_of(learner)[name]
    others = [
        each
        for each, other in LEARNERS[kind].items()
        if name in options_of(other) and word in options_of(other)[name].choices
    ]
    if option.choices and word not in option.choices and others:
        parser.error(
            f"{option.flag} {word} goes with --learner {', '.join(others)}; for {learner.name} choose from "
            f"{', '.join(option.choices)}"
        )
    try:
        return option.value(word)
    except ValueError as error:
        parser.error(str(error))


def _declared() -> dict[str, dict[tuple[str, str], type[Learner]]]:
    """Return the options that learners declare: name -> kind of data and learner's name -> learner."""
    found: dict[str, dict[tuple[str, str], type[Learner]]] = {}
    for kind, learners in LEARNERS.items():
        for each, learner in learners.items():
            for name, option in options_of(learner).items():
                if kind in option.kinds:
                    found.setdefault(name, {})[kind, each] = learner
    return found


def _means(learner: type[Learner], name: str, own: Optional[Option], kind: str) -> bool:
    """Tell whether an option, alma-stream's own or a learner's, has a meaning for a learner on a kind of data."""
    option = own or options_of(learner).get(name)
    return option is not None and kind in option.kinds and (option.trait is None or getattr(learner, option.trait))


def _import_further(words: Sequence[str]) -> None:
    """Import what ``--learners-from`` and ``--features-from`` name, before the options of these are needed."""
    reader = Parser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in (LEARNERS_FROM, FEATURES_FROM):
        reader.add_argument(name, default=None)
    try:
        given = vars(reader.parse_known_args(words)[0])
    except argparse.ArgumentError:
        return  # which the whole parser tells
    for name, found in given.items():
        if found is None:
            continue
        if not Path(found).exists():
            reader.error(f"{flag(name)} {found}: no such folder or file of Python")
        import_from(Path(found))


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    parser, arguments, own_words, words = read_arguments(argv)
    stream = _open_stream(arguments)
    kind = "text" if stream is None else stream.kind
    learner, given = learner_options(parser, arguments, kind)
    request = RunRequest.of(arguments, learner, given)
    try:
        request.check(kind)
        recipe = None
        if kind == "text":
            recipe = complete_options(request, arguments, words, stream)
            request = replace(request, features=Features.read(arguments))
        learners = {seed: request.build_learner(kind, seed) for seed in request.seeds}
        if kind == "images":
            job: Job = ImageJob(request, own_words, words, stream)
        else:
            job = TextJob(request, words, stream, recipe)
        num_megabatches = arguments.megabatches if stream is None else stream.num_megabatches
        plans = {seed: request.plan(each, kind, num_megabatches) for seed, each in learners.items()}
        learners[request.seeds[0]].check_model(job.last)
        request.features.check(PlannedRun(kind, plans[request.seeds[0]], request.replay, job.last, request.features))
        evaluation = StageEvaluation.of(request.then_evaluate, request.stream, job.predictor)
        if evaluation is not None:
            evaluation.check(plans[request.seeds[0]])
            if evaluation.exports:
                _refuse_unexportable(plans[request.seeds[0]], job, stream)
    except ValueError as error:
        parser.error(str(error))
    request.require_beginning()
    for line in () if recipe is None else recipe.lines:
        print(f"# {line}" if arguments.dry_run else line)
    if arguments.dry_run:
        for seed, planned in plans.items():
            job.print_plan(planned, request.folder(seed))
        return 0
    assert stream is not None
    refuse_no_folder(request.run, "--run")
    _run(request, job, learners, plans, stream, evaluation, (own_words, words))
    return 0


def _refuse_unexportable(plans: Sequence[StagePlan], job: Job, stream: Optional[Stream]) -> None:
    """Raise AlmaError now if alma-export would refuse what a stage ends with."""
    growths = [training.growth for plan in plans for training in plan.trainings if training.growth is not None]
    options = {
        name: (job.last(name) or (default,))[-1] for name, default in (("--arch", "the model"), (_CAPACITY, "0"))
    }
    refuse_unexportable(
        None if stream is None else stream.root,
        options["--arch"],
        is_ensemble=any(len(plan.predictors) > 1 for plan in plans),
        is_split=any(growth.method == "split" for growth in growths),
        eval_capacity_factor=float(options[_CAPACITY]),
    )


def _run(
    request: RunRequest,
    job: Job,
    learners: dict[int, Learner],
    plans: dict[int, list[StagePlan]],
    stream: Stream,
    evaluation: Optional[StageEvaluation],
    words: tuple[list[str], list[str]],
) -> None:
    """Run the plans of every seed, in step."""
    first = plans[request.seeds[0]]
    on_cpu = request.jobs is None or "--cpu" in words[1]
    devices = devices_of_jobs(request.jobs or 1, request.num_procs, on_cpu)
    build_backend = job.prepare(first)
    folders = {seed: request.folder(seed) for seed in learners}
    for seed, learner in learners.items():
        _begin(request, folders[seed], learner, seed, job, stream)
    if request.preset is not None and (given := [*request.overridden, *job.overridden]):
        print_line(
            f"note: --preset {request.preset.name}: {', '.join(given)} as given here, not as it has them", sys.stderr
        )
    with contextlib.ExitStack() as displays:
        runs = []
        for seed, planned in plans.items():
            shown = ArrivalCurves(folders[seed], planned, job.train_options())
            name = f"seed {seed}, " if len(plans) > 1 else ""
            display = RunDisplay(planned, job.unit, job.work(), request.stage, request.member, shown, name)
            more = () if evaluation is None else (evaluation.run,)
            runs.append(Run(folders[seed], planned, displays.enter_context(display), *more))
        backend = build_backend(runs)
        if request.member is not None:
            train_members(runs[0], request.member, backend, request.stage)
            return
        workers = displays.enter_context(MemberJobs(words, runs[0].folder, request.chosen(first), devices))
        awaited = {"await_models": workers.await_models} if len(devices) > 1 else {}
        num_run = run_stages(runs, backend, request.stage, request.keep_checkpoints, keep=request.keep or (), **awaited)
    what = "the run" if request.stage is None else "the stage"
    for run, number in zip(runs, num_run, strict=True):
        if not number:
            print_line(f"{run.folder.root}: nothing to do, {what} is complete", sys.stdout)


def complete_options(
    request: RunRequest, arguments: argparse.Namespace, words: Sequence[str], stream: Optional[Stream]
) -> Recipe:
    """Fill in what is missing after ``--`` of a run on text, and the options of features among ``arguments``."""
    if request.preset is not None and request.preset != PAPER:
        raise ValueError(f"--preset {request.preset.name}: of images; on text give --preset paper, or none")
    folder, learner = request.folder(request.seeds[0]), request.build_learner("text", request.seeds[0])
    plan = learner.plan(Stage(0, (0,), (0,)))
    own = {name: vars(arguments).get(name) for kind in FEATURES for name in options_of(kind)}
    context = Context(
        owned=learner.owned,
        num_experts=plan.trainings[0].num_experts,
        continues=learner.init == "previous" and request.iid is None,
        features=own,
        tests_otherwise=request.features.predicts_with != "last",
        has_beginning=request.beginning is not None,
        num_procs=request.num_procs,
    )
    before = folder.read_run()
    tokens, vocab_size = None, 0
    if stream is not None and stream.tokenizer is not None:
        tokens = [tokens_of(stream, each) for each in request.stages_of_length(stream.num_megabatches)]
        vocab_size = stream.tokenizer.vocab_size
    recipe = complete(
        words,
        Preferences(request.size, request.passes, request.preset is not None),
        context,
        tokens,
        vocab_size,
        None if before is None else before.get("recipe"),
    )
    vars(arguments).update(recipe.features)
    return recipe


def _open_stream(arguments: argparse.Namespace) -> Optional[Stream]:
    """Open the stream; None for a dry run of text before there is one."""
    if arguments.dry_run and arguments.megabatches is not None and not arguments.stream.exists():
        return None
    stream = Stream.open(arguments.stream)
    if arguments.megabatches is not None and stream.num_megabatches < arguments.megabatches:
        raise AlmaError(
            f"--stream {stream.root}: {stream.num_megabatches} mega-batches, --megabatches asks for "
            f"{arguments.megabatches}; prepare more data, or give a smaller number"
        )
    return stream


def _begin(request: RunRequest, folder: RunFolder, learner: Learner, seed: int, job: Job, stream: Stream) -> None:
    """Write run.json, or make sure that the one that is there describes the same run."""
    options = request.record(stream.kind) | learner.record(stream.kind)
    record = describe_run(learner.name, seed, options, job.train_options(), stream)
    if request.beginning is not None:
        record["start"] = {"sha256": file_sha256(request.beginning)}
    if isinstance(job, TextJob) and job.recipe is not None and job.recipe.record is not None:
        record["recipe"] = dict(job.recipe.record)
    if request.preset is not None:
        record["preset"] = {"name": request.preset.name, "overridden": [*request.overridden, *job.overridden]}
    with folder.lock_run():
        before = folder.read_run()
        if before is None:
            folder.write_run(record)
        elif before != record and not folder.has_begun():
            # A mistyped option must not bind the run to it.
            folder.replace_run(record)
        elif before != record:
            for note in require_same_run(str(folder.root / RUN_RECORD), before, record, stream):
                print_line(note, sys.stderr)
            if record.get("recipe") != before.get("recipe"):  # the next stage is longer or shorter than those before
                folder.replace_run({**before, "recipe": record["recipe"]})
