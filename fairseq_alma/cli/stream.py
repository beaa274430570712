"""``alma-stream``: run a whole stream of mega-batches, resume it, or run one stage of it."""

import argparse
import contextlib
import sys
from dataclasses import replace
from typing import Optional, Sequence

from fairseq_alma.cli.entry import command
from fairseq_alma.cli.stream_parser import learner_options, read_arguments
from fairseq_alma.data.manifest import file_sha256
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError, refuse_no_folder
from fairseq_alma.images.image_job import ImageJob
from fairseq_alma.learners.learner import Learner
from fairseq_alma.learners.plan import Stage, StagePlan
from fairseq_alma.learners.presets import PAPER
from fairseq_alma.options import options_of
from fairseq_alma.runs.evaluation import StageEvaluation
from fairseq_alma.runs.loop import Run, SeenPlans, nothing_to_await, nothing_to_evaluate, run_stages, train_members
from fairseq_alma.runs.request import Job, RunRequest
from fairseq_alma.runs.run_folder import RUN_RECORD, RunFolder
from fairseq_alma.runs.slurm_jobs import SlurmChain, complete_stages, plan_jobs, require_nodes, require_slurm
from fairseq_alma.runs.study import describe_run, require_same_run
from fairseq_alma.runs.workers import MemberWorkers, devices_of_jobs
from fairseq_alma.terminal import tell
from fairseq_alma.text.model_size import LENGTH, Wish
from fairseq_alma.text.recipe import Asked, Recipe, complete
from fairseq_alma.text.speed import measure
from fairseq_alma.text.text_job import TextJob
from fairseq_alma.training.feature import FEATURES, Features
from fairseq_alma.training.planned_run import PlannedRun
from fairseq_alma.watch.arrival_curves import ArrivalCurves
from fairseq_alma.watch.run_display import MemberDisplay, RunDisplay
from fairseq_alma.watch.sinks import CurveOptions


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
        curves = CurveOptions.from_options(job.train_options())
        num_megabatches = arguments.megabatches if stream is None else stream.num_megabatches
        if stream is not None and learners[request.seeds[0]].looks_back and not stream.split("valid").num_words:
            raise ValueError(
                f"--grow-when auto: {stream.root} has no validation set, by whose loss it decides; give times"
            )
        plans = {seed: request.plan(each, kind, num_megabatches) for seed, each in learners.items()}
        request.features.check(PlannedRun(kind, plans[request.seeds[0]], request.replay, job.last, request.features))
        evaluation = StageEvaluation.of(request.then_evaluate, request.stream, job.predictor)
        if evaluation is not None:
            evaluation.check(plans[request.seeds[0]])
    except ValueError as error:
        parser.error(str(error))
    request.require_beginning()
    if request.slurm is not None:
        require_slurm(arguments.dry_run)
    for line in () if recipe is None else recipe.lines:
        print(f"# {line}" if arguments.dry_run else line)
    if arguments.dry_run and request.slurm is not None:
        _chain(request, plans, (own_words, words)).print()
        return 0
    if arguments.dry_run:
        for seed, planned in plans.items():
            job.print_plan(planned, request.folder(seed))
        return 0
    assert stream is not None
    refuse_no_folder(request.run, "--run")
    _run(request, job, learners, plans, stream, curves, evaluation, (own_words, words))
    return 0


def _run(
    request: RunRequest,
    job: Job,
    learners: dict[int, Learner],
    plans: dict[int, list[StagePlan]],
    stream: Stream,
    curves: CurveOptions,
    evaluation: Optional[StageEvaluation],
    words: tuple[list[str], list[str]],
) -> None:
    """Run the plans of every seed, in step."""
    first = plans[request.seeds[0]]
    if request.slurm is not None:
        job.prepare(first)
        _begin(request, request.folder(request.seeds[0]), learners[request.seeds[0]], request.seeds[0], job, stream)
        _chain(request, plans, words).submit()
        return
    require_nodes(request.nodes)
    on_cpu = request.jobs is None or "--cpu" in words[1]
    devices = devices_of_jobs(request.jobs or 1, request.num_procs // request.nodes, on_cpu)
    build_backend = job.prepare(first)
    folders = {seed: request.folder(seed) for seed in learners}
    for seed, learner in learners.items():
        _begin(request, folders[seed], learner, seed, job, stream)
    if request.preset is not None and (given := [*request.overridden, *job.overridden]):
        tell(f"note: --preset {request.preset.name}: {', '.join(given)} as given here, not as it has them", sys.stderr)
    with contextlib.ExitStack() as displays:
        runs = []
        for seed, planned in plans.items():
            shown = ArrivalCurves(folders[seed], planned, curves.sinks(folders[seed]))
            name = f"seed {seed}, " if len(plans) > 1 else ""
            how = (planned, job.unit, job.work(), request.stage, request.member)
            display = RunDisplay(*how, shown, name)
            if request.progress_to is not None:
                display = MemberDisplay(request.progress_to, *how)
            evaluate = nothing_to_evaluate if evaluation is None else evaluation.run
            seen = SeenPlans(learners[seed], [plan.stage for plan in planned], folders[seed])
            own = seen if learners[seed].looks_back else planned
            runs.append(Run(folders[seed], own, displays.enter_context(display), evaluate))
        backend = build_backend(runs)
        if request.member is not None:
            others = request.progress_to is not None
            train_members(runs[0], request.member, backend, request.stage, others, request.group_size)
            return
        workers = displays.enter_context(MemberWorkers(words, request.chosen(first), devices, request.group_size))
        awaited = workers.await_models if len(devices) > 1 else nothing_to_await
        num_run = run_stages(runs, backend, request.stage, request.keep_checkpoints, awaited, request.keep or ())
    what = "the run" if request.stage is None else "the stage"
    for run, number in zip(runs, num_run, strict=True):
        if not number:
            tell(f"{run.folder.root}: nothing to do, {what} is complete", sys.stdout)


def complete_options(
    request: RunRequest, arguments: argparse.Namespace, words: Sequence[str], stream: Optional[Stream]
) -> Recipe:
    """Fill in what is missing after ``--`` of a run on text, and the options of features among ``arguments``."""
    if request.preset is not None and request.preset != PAPER:
        raise ValueError(f"--preset {request.preset.name}: of images; on text give --preset paper, or none")
    folder, learner = request.folder(request.seeds[0]), request.build_learner("text", request.seeds[0])
    plan = learner.plan(Stage(0, (0,), (0,)))
    own = {name: vars(arguments).get(name) for kind in FEATURES for name in options_of(kind)}
    asked = Asked(
        Wish(request.size, request.passes, request.hours, request.preset is not None),
        learner.owned,
        plan.trainings[0].num_experts,
        learner.init == "previous" and request.iid is None,
        own,
        bool(request.features.ways),
        request.beginning is not None,
        request.num_procs,
        sum(folder.read_stage(stage) is not None for stage in folder.stages()),
    )
    planned = [] if stream is None else request.stages(stream.num_megabatches)
    before = folder.read_run()
    on_cpu = "--cpu" in words
    recipe = complete(
        words,
        asked,
        stream,
        planned,
        None if before is None else before.get("recipe"),
        lambda shapes, tokens: measure(shapes, tokens, LENGTH, on_cpu),
    )
    vars(arguments).update(recipe.features)
    return recipe


def _chain(request: RunRequest, plans: dict[int, list[StagePlan]], words: tuple[list[str], list[str]]) -> SlurmChain:
    """Return the jobs of what is not complete yet."""
    (seed,) = request.seeds
    folder, chosen = request.folder(seed), request.chosen(plans[seed])
    assert request.slurm is not None
    jobs = plan_jobs(chosen, complete_stages(folder, chosen))
    places = (request.nodes, request.learner.trains_members_alone, request.num_procs // request.nodes)
    return SlurmChain(folder, words, jobs, request.slurm, *places)


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
                tell(note, sys.stderr)
            if record.get("recipe") != before.get("recipe"):  # the next stage is longer or shorter than those before
                folder.replace_run({**before, "recipe": record["recipe"]})
