"""``alma-stream``: train on a stream of mega-batches, resume a run, or run one stage."""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Sequence, Union

from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.data.stream import Stream, file_sha256
from fairseq_alma.errors import AlmaError, refuse_colon, refuse_no_file, refuse_no_folder
from fairseq_alma.images.image_job import ImageJob
from fairseq_alma.learners.learner import LEARNERS, PAPER, Learner, ModelId, Stage, StagePlan
from fairseq_alma.options import KINDS, Option, flag, options_of, without
from fairseq_alma.runs.curves import ArrivalCurves
from fairseq_alma.runs.evaluation import evaluate
from fairseq_alma.runs.loop import Backend, Run, RunDisplay, run_stages, train_members
from fairseq_alma.runs.run_folder import RUN_RECORD
from fairseq_alma.runs.study import (
    PartOptions,
    ProcessOptions,
    RunRequest,
    StudyOptions,
    describe_run,
    require_same_run,
)
from fairseq_alma.terminal import Parser, command, end_processes, last_line, print_line, split_words, start_process
from fairseq_alma.text.text_job import TextJob
from fairseq_alma.text.train_options import Context, Recipe, complete
from fairseq_alma.training.feature import FEATURES, PlannedRun, import_from
from fairseq_alma.training.features import NewFirst

Job = Union[TextJob, ImageJob]
ALMA_STREAM = (sys.executable, "-c", "import sys; from fairseq_alma import alma_stream; sys.exit(alma_stream())")
DESCRIPTION = "Train on mega-batches in their order of arrival, and test after each stage (Algorithm 1 of the paper)."
EPILOG = """\
Options after -- are passed to fairseq-train (text) or to the training of image models, and take precedence over the
defaults. No options after -- are required: alma-stream --stream STREAM --run RUN

COMMAND (--then-evaluate) may contain the placeholders {{checkpoint}}, {{stage}}, {{arrival}}, {{run}} and {{stream}}.
Learners: {learners}
A killed run resumes with the same command and gives the same results. On text, logs are in RUN/stage-NNN/*.log.
"""


def read_arguments(
    argv: Optional[Sequence[str]],
) -> tuple[argparse.ArgumentParser, argparse.Namespace, list[str], list[str]]:
    """Parse the command line.

    Returns:
        (parser for later usage errors, parsed options, arguments before ``--``, arguments after ``--``).
    """
    own_words, words = split_words(argv)
    # User code may declare options, so import it before building the parser.
    reader = Parser(add_help=False, exit_on_error=False)
    for name in ("learners_from", "features_from"):
        reader.add_argument(flag(name), type=Path, default=argparse.SUPPRESS)
    with contextlib.suppress(argparse.ArgumentError):  # The complete parser reports the error.
        for name, found in vars(reader.parse_known_args(own_words)[0]).items():
            if not found.exists():
                reader.error(f"{flag(name)} {found}: no such file or folder; give a Python file or folder")
            import_from(found)
    parser = build_parser()
    return parser, parser.parse_args(own_words), own_words, words


def build_parser() -> Parser:
    """Return the parser of the options before ``--``."""
    learners = sorted({name for each in LEARNERS.values() for name in each})
    parser = Parser(
        prog="alma-stream",
        usage="alma-stream --stream STREAM --run RUN [options] [-- fairseq-train options]",
        description=DESCRIPTION,
        epilog=EPILOG.format(learners=", ".join(learners)),
    )
    group = parser.add_argument_group("learner")
    about = "training strategy (default: sm; see Learners below)"
    group.add_argument("--learner", choices=learners, default="sm", metavar="NAME", help=about)
    declared: dict[str, dict[tuple[str, str], Option]] = {}
    for kind in LEARNERS:
        for name, learner in LEARNERS[kind].items():
            for field, option in options_of(learner).items():
                if kind in option.kinds:
                    declared.setdefault(field, {})[kind, name] = option
    for found in declared.values():
        options, names = [*found.values()], dict.fromkeys(name for _, name in found)
        about = "" if len(names) == len(learners) else f"{', '.join(names)}: "
        replace(
            options[0],
            help=about + options[0].help,
            kinds=KINDS,
            choices=tuple(dict.fromkeys(word for option in options for word in option.choices)),
            # The chosen learner parses the word, because type and range may depend on the learner.
            type=bool if options[0].type is bool else str,
            range=None,
            parse=None,
        ).add_to(group)
    part, processes = map(parser.add_argument_group, ("part of the run", "processes"))
    for place, declaring in ((parser, StudyOptions), (part, PartOptions), (processes, ProcessOptions)):
        for option in options_of(declaring).values():
            users = [name for name, each in LEARNERS["images"].items() if option.trait and getattr(each, option.trait)]
            replace(option, help=option.help.replace("{learners}", ", ".join(users))).add_to(place)
    group = parser.add_argument_group("anytime training")
    for feature in FEATURES:
        feature.add_to(group)
    return parser


def learner_options(arguments: argparse.Namespace, kind: str) -> tuple[type[Learner], dict[str, Any]]:
    """Return (learner class, given options of the learner). Raises ValueError if an option is invalid."""
    learners = LEARNERS[kind]
    if arguments.learner not in learners:
        raise ValueError(f"--learner {arguments.learner}: not available on {kind}; choose from {', '.join(learners)}")
    learner = learners[arguments.learner]
    common = {name: option for each in (RunRequest, *FEATURES) for name, option in options_of(each).items()}
    given = {name: word for name, word in vars(arguments).items() if word is not None and name != "learner"}
    for name in given:
        users = []
        for each, other in learners.items():
            option = common.get(name) or options_of(other).get(name)
            if option and kind in option.kinds and (option.trait is None or getattr(other, option.trait)):
                users.append(each)
        if not users:
            raise ValueError(f"{flag(name)} has no effect on {kind}; remove the option")
        if learner.name not in users:
            raise ValueError(f"{flag(name)} requires --learner {' or '.join(users)}, found {learner.name}")
    own = options_of(learner)
    return learner, {name: own[name].value(word) for name, word in given.items() if name in own}


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run ``alma-stream``."""
    parser, arguments, own_words, words = read_arguments(argv)
    stream, kind = None, "text"
    if not arguments.dry_run or arguments.megabatches is None or arguments.stream.exists():
        stream = Stream.open(arguments.stream)
        kind = stream.kind
        if stream.num_megabatches < (arguments.megabatches or 1):
            raise AlmaError(
                f"--stream {stream.root}: expected at least {arguments.megabatches} mega-batches (--megabatches), "
                f"found {stream.num_megabatches}; prepare more data, or give a smaller --megabatches"
            )
    else:
        print_line(f"note: --stream {arguments.stream}: no such stream; the plan is for text", sys.stderr)
    if kind == "text":
        refuse_colon(arguments.stream, "--stream ")
    images = ImageStream.open(stream.root) if stream is not None and kind == "images" else None
    try:
        request = RunRequest.of(arguments, *learner_options(arguments, kind))
        request.check(kind)
        learners = {seed: request.build_learner(kind, seed) for seed in request.seeds}
        num_megabatches = arguments.megabatches if stream is None else stream.num_megabatches
        plans = {seed: request.plan(each, num_megabatches) for seed, each in learners.items()}
        learner, first = learners[request.seeds[0]], plans[request.seeds[0]]
        job: Job
        if images is not None:
            job = ImageJob(request, own_words, words, images)
        else:
            recipe = complete_options(request, learner, first, words, stream)
            request = replace(request, features=request.features.with_options(recipe.features))
            job = TextJob(request, stream, recipe)
        learner.check_model(job.last)
        request.features.check(PlannedRun(kind, first, request.replay, job.last))
        if isinstance(job, ImageJob):  # fairseq's own parser checks the options, and the network must fit the images
            build_trainer = job.prepare(first)
    except ValueError as error:
        parser.error(str(error))
    if (start := request.finetune_from_model) is not None:
        refuse_no_file(start, "--finetune-from-model", "give a checkpoint written by alma-import or fairseq-train")
    for line in job.recipe.lines if isinstance(job, TextJob) else ():
        print_line(f"# {line}" if arguments.dry_run else line, sys.stdout)
    if arguments.dry_run:
        groups = [[seed] for seed in request.seeds] if kind == "text" else [request.seeds]  # seeds of each process
        for seeds in groups:
            name = f"seed {' '.join(map(str, seeds))}, " if len(plans) > 1 else ""
            job.print_plan(plans[seeds[0]], request.folder(seeds[0]), name)
        return
    assert stream is not None
    refuse_no_folder(request.run, "--run")
    if len(plans) > 1 and (request.run / RUN_RECORD).exists():
        raise AlmaError(f"--run {request.run}: expected a folder for several seeds, found a run; give another --run")
    devices = devices_of_jobs(request.jobs or 1, request.num_procs, request.jobs is None or "--cpu" in words)
    if isinstance(job, TextJob):
        job.check_start()
    written = shlex.join(["alma-stream", *own_words, *(["--", *words] if words else [])])
    for learner in learners.values():
        _write_run(request, learner, job, stream, written)
    with contextlib.ExitStack() as contexts:
        runs = []
        for seed, planned in plans.items():
            folder, name = request.folder(seed), f"seed {seed}, " if len(plans) > 1 else ""
            curves = ArrivalCurves(folder, planned, job.train_options())
            # A process that trains members writes no curves.
            display = RunDisplay(planned, job.unit, curves if request.member is None else None, name)
            evaluates = partial(evaluate, request, job.predictors)
            runs.append(Run(folder, planned, contexts.enter_context(display), evaluates))
        backend: Backend = job if isinstance(job, TextJob) else build_trainer(runs)
        if request.member is not None:
            train_members(runs[0], request.member, backend, request.stage)
            return
        is_trained = partial(runs[0].is_member_trained, backend=backend)
        jobs = contexts.enter_context(MemberJobs((own_words, words), is_trained, request.chosen(first), devices))
        await_models = jobs.await_models if len(devices) > 1 else lambda plan: None
        num_run = run_stages(runs, backend, request.stage, request.keep_checkpoints, await_models, request.keep or ())
    what = "the run" if request.stage is None else "the stage"
    for run, number in zip(runs, num_run, strict=True):
        if not number:
            print_line(f"{run.folder.root}: {what} is complete; nothing to do", sys.stdout)


def complete_options(
    request: RunRequest, learner: Learner, plans: Sequence[StagePlan], words: Sequence[str], stream: Optional[Stream]
) -> Recipe:
    """Return the options of a run on text, with defaults."""
    if request.preset is not None and request.preset != PAPER:
        raise ValueError(f"--preset {request.preset.name} requires images, found text; give paper, or remove --preset")
    if not (second := plans[1:]) and request.iid is None:
        with contextlib.suppress(IndexError):  # the schedule of a learner that grows has no second stage
            second = [learner.plan(Stage(1, (1,), (1,)))]  # more mega-batches may follow later
    later = [training for plan in second for training in plan.trainings]
    context = Context(
        size=request.size,
        passes=request.passes,
        is_paper=request.preset is not None,
        owned=learner.owned,
        sizes=dict(plans[0].trainings[0].sizes),
        continues=any(each.start for each in later) if later else learner.init == "previous" and request.iid is None,
        features=request.features.record(),
        selects_weights=request.features.predicts_with != "last",
        has_start=request.finetune_from_model is not None,
        num_procs=request.num_procs,
    )
    tokens, vocab_size = None, 0
    if stream is not None and stream.tokenizer is not None:
        only_new = request.features[NewFirst].new_first is not None  # --passes counts passes through the new text
        counted = [plan.stage.arrivals if only_new else plan.stage.megabatches for plan in plans]
        tokens = [sum(stream.megabatch(t).num_tokens for t in megabatches) for megabatches in counted]
        vocab_size = stream.tokenizer.vocab_size
    folder = request.folder(request.seeds[0])  # A run that has not begun takes other options, and their defaults.
    before = (folder.read_run() or {}).get("recipe") if folder.has_begun() else None
    return complete(words, context, tokens, vocab_size, before)


def _write_run(request: RunRequest, learner: Learner, job: Job, stream: Stream, command: str) -> None:
    """Write run.json. If the run has begun, check instead that the existing run.json describes the same run."""
    folder, overridden = request.folder(learner.seed), [*request.overridden, *job.overridden]
    options = request.record(stream.kind) | learner.record(stream.kind)
    record = describe_run(learner.name, learner.seed, options, job.train_options(), stream) | {"command": command}
    if request.finetune_from_model is not None:
        record["start"] = {"sha256": file_sha256(request.finetune_from_model)}
    if isinstance(job, TextJob) and job.recipe.record is not None:
        record["recipe"] = dict(job.recipe.record)
    if request.preset is not None:
        record["preset"] = {"name": request.preset.name, "overridden": overridden}
        if overridden:
            names = ", ".join(overridden)
            print_line(f"note: the command line overrides {names} of --preset {request.preset.name}", sys.stderr)
    with folder.lock_run():
        before = folder.read_run()
        is_same = before is not None and before | {"command": command} == record  # also for --jobs and --member
        if before is None or not (is_same or folder.has_begun()):
            # The user can correct an option as long as the run has no checkpoint and no complete stage.
            folder.write_run(record)
        elif not is_same:
            for note in require_same_run(str(folder.root / RUN_RECORD), before, record, stream):
                print_line(note, sys.stderr)
            newest = before | {name: record[name] for name in ("stream", "recipe") if name in record}
            if "grow_schedule" in options:  # a longer stream extends the schedule
                newest["options"] = before["options"] | {"grow_schedule": options["grow_schedule"]}
            planned = request.stages(stream.num_megabatches)
            if newest != before and not all(folder.read_stage(stage.index) for stage in planned):
                folder.write_run(newest)  # new mega-batches of the stream, or another number of passes


class MemberJobs(contextlib.AbstractContextManager["MemberJobs"]):
    """Context manager that starts the processes of ``--jobs N`` and terminates them on exit.

    Each process is a call of ``alma-stream --member``, which trains some members in all stages. This process evaluates
    the ensemble and completes a stage as soon as all members of the stage are trained.

    Args:
        words: (arguments before ``--``, arguments after ``--``) of ``alma-stream``.
        is_trained: function that returns whether a member is trained.
        plans: plans of the requested stages.
        environments: for each process, additional environment variables.
    """

    def __init__(
        self,
        words: tuple[Sequence[str], Sequence[str]],
        is_trained: Callable[[ModelId], bool],
        plans: Sequence[StagePlan],
        environments: Sequence[Mapping[str, str]],
    ) -> None:
        self.words, self.is_trained, self.environments = words, is_trained, environments
        self.members = sorted({training.model.member for plan in plans for training in plan.trainings})
        self.jobs: list[tuple[subprocess.Popen[bytes], Any]] = []

    def __exit__(self, *exception: object) -> None:
        end_processes([process for process, _ in self.jobs])

    def await_models(self, plan: StagePlan) -> None:
        """Start the processes at the first call; wait until the models of a stage are trained or all processes exit."""
        if not self.jobs:
            for number, environment in enumerate(self.environments[: len(self.members)]):
                members = map(str, self.members[number :: len(self.environments)])
                errors = tempfile.TemporaryFile()  # noqa: SIM115 - read after the process exits
                words = [*ALMA_STREAM, *without(self.words[0], "--jobs"), "--member", *members, "--", *self.words[1]]
                variables = {**os.environ, **environment}
                process = start_process(words, env=variables, stdout=subprocess.DEVNULL, stderr=errors)
                self.jobs.append((process, errors))
        awaited = [training.model for training in plan.trainings]
        while awaited := [model for model in awaited if not self.is_trained(model)]:  # reads each trained model once
            ended = [(process, errors) for process, errors in self.jobs if process.poll() is not None]
            for process, errors in ended:
                if process.returncode:
                    errors.seek(0)
                    killed = ", SIGKILL, possibly out of memory" if process.returncode == -signal.SIGKILL else ""
                    message = f"--jobs: a process failed (exit status {process.returncode}{killed}); repeat the command"
                    line = last_line(errors.read().decode(errors="replace"))
                    raise AlmaError(line if line and process.returncode > 0 else message)
            if len(ended) == len(self.jobs):
                return
            time.sleep(0.1)


def devices_of_jobs(num_jobs: int, num_procs: int, is_on_cpu: bool) -> list[dict[str, str]]:
    """Return the variables that select the GPUs of each job (none on CPU). Raises AlmaError for too few GPUs."""
    all_devices = ",".join(map(str, range(len([*Path("/dev").glob("nvidia[0-9]*")]))))
    devices = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", all_devices).split(",") if each]
    if is_on_cpu or not devices:
        return [{}] * num_jobs
    if num_jobs * num_procs > len(devices):
        most = f"--jobs {len(devices) // num_procs}" if num_procs <= len(devices) else f"--num-procs {len(devices)}"
        raise AlmaError(
            f"--jobs {num_jobs}, --num-procs {num_procs}: expected {num_jobs * num_procs} visible GPUs, found "
            f"{len(devices)}; give at most {most}"
        )
    shares = [devices[job * num_procs : (job + 1) * num_procs] for job in range(num_jobs)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]
