"""What the options of ``alma-stream`` mean together: which go with which learner, and the plan that they make."""

import argparse
import itertools
import sys
from typing import Optional, Sequence

from fairseq_alma.cli.stream_parser import MAX_SEED, build_parser
from fairseq_alma.learners.plan import MAX_MEMBERS, StagePlan
from fairseq_alma.learners.schedule import Stage, stages
from fairseq_alma.learners.strategy import LEARNERS, LearnerOptions, plan_stages
from fairseq_alma.learners.train_options import TrainOptions

GROWING = ("gens", "gmoe")
WITH_MEMBERS = tuple(name for name, learner in LEARNERS.items() if learner.default_members is not None)


def read_arguments(argv: Optional[Sequence[str]]) -> tuple[argparse.ArgumentParser, argparse.Namespace, TrainOptions]:
    """Read and check the command line; what is wrong ends the program as a usage error."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = build_parser()
    arguments = parser.parse_args(words[:cut])
    for name in ("wait", "megabatches", "save_every", "iid", "num_members"):
        value = vars(arguments)[name]
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: a number of at least 1 is needed")
    if not 0 <= arguments.seed <= MAX_SEED:
        parser.error(f"--seed {arguments.seed}: a number from 0 to {MAX_SEED} is needed")
    _check_learner(parser, arguments)
    _fill_in(parser, arguments)
    try:
        options = TrainOptions(words[cut + 1 :], LEARNERS[arguments.learner].owned)
        if arguments.learner == "umix" and options.last("--arch") == ("alma_umix",):
            raise ValueError("--arch alma_umix after the --: give the members' architecture; --learner umix wraps it")
    except ValueError as error:
        parser.error(str(error))
    return parser, arguments, options


def _check_learner(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse options that mean nothing to the learner."""
    learner = arguments.learner
    meant_for = {
        "num_members": WITH_MEMBERS,
        "member": ("ens", "gens"),
        "grow_schedule": ("gmoe",),
        "grow_method": ("gmoe",),
        "grow_select": ("gmoe",),
        "iid": tuple(name for name in LEARNERS if name not in GROWING),
    }
    for name, learners in meant_for.items():
        if vars(arguments)[name] is not None and learner not in learners:
            parser.error(f"--{name.replace('_', '-')} goes with --learner {', '.join(learners)}, not with {learner}")
    if arguments.init == "fresh" and learner != "gens":
        parser.error(f"--init fresh goes with --learner gens; for {learner} it is --init scratch")
    if arguments.init == "scratch" and learner == "gmoe":
        parser.error("--init scratch: gmoe grows the model of the stage before; use --learner sm, or --init previous")
    if learner == "gmoe" and arguments.grow_schedule is None:
        parser.error("--learner gmoe needs --grow-schedule, the experts of each stage; the paper: 4,6,8,12")
    if arguments.grow_method == "scratch" and arguments.grow_select is not None:
        parser.error("--grow-select has no meaning with --grow-method scratch, which copies no expert")
    if arguments.iid is not None and (arguments.wait != 1 or arguments.replay or arguments.drop_rest):
        parser.error("--iid is one stage: it does not go with --wait, --replay or --drop-rest")


def _fill_in(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Set the defaults that depend on the learner; what the learner has no use for stays None."""
    if arguments.init in (None, "fresh"):
        arguments.init = "scratch" if arguments.learner == "gens" else "previous"
    if arguments.num_members is None:
        arguments.num_members = LEARNERS[arguments.learner].default_members
    if arguments.learner == "gmoe":
        arguments.grow_method = arguments.grow_method or "copy"
        if arguments.grow_method != "scratch":
            arguments.grow_select = arguments.grow_select or "loss"
        read_schedule(parser, arguments)


def read_schedule(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> tuple[int, ...]:
    """Return the experts of each stage; refuse what cannot be grown."""
    shown = arguments.grow_schedule
    if shown is None:
        return ()
    words = shown.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        parser.error(f"--grow-schedule {shown}: whole numbers of at least 1 with commas are needed, such as 4,6,8,12")
    schedule = tuple(int(word) for word in words)
    for stage, (before, now) in enumerate(itertools.pairwise(schedule), 1):
        if now < before:
            parser.error(
                f"--grow-schedule {shown}: shrinks from {before} to {now} experts before stage {stage}; a model only "
                "grows"
            )
        if now > 2 * before and arguments.grow_method != "scratch":
            parser.error(
                f"--grow-schedule {shown}: from {before} to {now} experts before stage {stage}, but each of the "
                f"{before} can be copied or split once; give at most {2 * before}, or --grow-method scratch"
            )
    return schedule


def plan_run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, num_megabatches: int) -> list[StagePlan]:
    """Plan all stages of the run on a stream of that many mega-batches."""
    planned = _stages(parser, arguments, num_megabatches)
    if arguments.stage is not None and not 0 <= arguments.stage < len(planned):
        parser.error(f"--stage {arguments.stage}: the run has stages 0 to {len(planned) - 1}")
    schedule = read_schedule(parser, arguments)
    if schedule and len(schedule) != len(planned):
        parser.error(
            f"--grow-schedule {arguments.grow_schedule}: {len(schedule)} numbers, the run has {len(planned)} stages; "
            "give one for each"
        )
    num_members = arguments.num_members or 1
    total = num_members * (len(planned) if arguments.learner == "gens" else 1)
    if total > MAX_MEMBERS:
        parser.error(
            f"--num-members {num_members}: {total} models in the whole run, at most {MAX_MEMBERS} are possible"
        )
    options = LearnerOptions(
        seed=arguments.seed,
        from_previous=arguments.init == "previous",
        num_members=num_members,
        grow_schedule=schedule,
        grow_method=arguments.grow_method or "copy",
        grow_select=arguments.grow_select or "loss",
    )
    plans = plan_stages(arguments.learner, options, planned)
    _check_member(parser, arguments, plans)
    return plans


def _stages(parser: argparse.ArgumentParser, arguments: argparse.Namespace, num_megabatches: int) -> list[Stage]:
    if arguments.iid is not None:
        if arguments.iid > num_megabatches:
            parser.error(f"--iid {arguments.iid}: the stream has {num_megabatches} mega-batches; give at most that")
        return stages(num_megabatches, arguments.iid)[:1]
    planned = stages(num_megabatches, arguments.wait, arguments.replay, arguments.drop_rest)
    if not planned:
        parser.error(
            f"--wait {arguments.wait} --drop-rest: the stream has {num_megabatches} mega-batches, so no stage "
            "is left; give a smaller --wait"
        )
    return planned


def _check_member(parser: argparse.ArgumentParser, arguments: argparse.Namespace, plans: Sequence[StagePlan]) -> None:
    if arguments.member is None:
        return
    chosen = [plan for plan in plans if arguments.stage in (None, plan.stage.index)]
    members = sorted({training.model.member for plan in chosen for training in plan.trainings})
    if arguments.member not in members:
        where = "the run trains" if arguments.stage is None else f"stage {arguments.stage} trains"
        parser.error(f"--member {arguments.member}: {where} members {', '.join(map(str, members))}")
