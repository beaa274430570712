"""What the options of ``alma-stream`` mean together: which go with which learner, and the plan that they make."""

import argparse
import itertools
import math
import sys
from typing import Mapping, Optional, Sequence

from fairseq_alma.cli.stream_parser import GROW_SHARE, MAX_SEED, SAVE_EVERY, SIDE_BY_SIDE, build_parser
from fairseq_alma.learners.image_strategy import IMAGE_LEARNERS
from fairseq_alma.learners.plan import MAX_MEMBERS, StagePlan
from fairseq_alma.learners.schedule import Stage, stages
from fairseq_alma.learners.strategy import LEARNERS, Learner, LearnerOptions, plan_stages

LEARNERS_OF: Mapping[str, Mapping[str, type[Learner]]] = {"text": LEARNERS, "images": IMAGE_LEARNERS}
GROWING = ("gens", "gmoe", "firefly")


def read_arguments(argv: Optional[Sequence[str]]) -> tuple[argparse.ArgumentParser, argparse.Namespace, list[str]]:
    """Read the command line; what is wrong ends the program as a usage error.

    Returns:
        The parser, for further errors; what stands before ``--``; the words after it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = build_parser()
    arguments = parser.parse_args(words[:cut])
    for name in ("wait", "megabatches", "save_every", "iid", "num_members", "grow_every", "num_procs"):
        value = vars(arguments)[name]
        if value is not None and value < 1:
            parser.error(f"{_flag(name)} {value}: a number of at least 1 is needed")
    if arguments.grow_share is not None and not 0 < arguments.grow_share < math.inf:
        parser.error(f"--grow-share {arguments.grow_share}: a number above 0 is needed")
    for number, seed in enumerate(arguments.seed):
        if not 0 <= seed <= MAX_SEED:
            parser.error(f"--seed {seed}: a number from 0 to {MAX_SEED} is needed")
        if seed in arguments.seed[:number]:
            parser.error(f"--seed {seed}: given twice")
    return parser, arguments, words[cut + 1 :]


def check_learner(parser: argparse.ArgumentParser, arguments: argparse.Namespace, kind: str) -> None:
    """Refuse options that mean nothing to the learner on this kind of data, and fill in those that depend on it.

    Args:
        parser: for errors.
        arguments: what stands before ``--``; what the learner has no use for stays None.
        kind: ``text`` or ``images``.
    """
    learners, learner = LEARNERS_OF[kind], arguments.learner
    if learner not in learners:
        parser.error(f"--learner {learner}: not for streams of {kind}; choose from {', '.join(learners)}")
    for name, meant in _meant_for(kind).items():
        if vars(arguments)[name] is not None and learner not in meant:
            use = f"goes with --learner {', '.join(meant)}, not with {learner}" if meant else "has no meaning"
            parser.error(f"{_flag(name)} {use} on streams of {kind}")
    if arguments.init == "fresh" and learner != "gens":
        parser.error(f"--init fresh goes with --learner gens; for {learner} it is --init scratch")
    if arguments.init == "scratch" and learner in ("gmoe", "firefly"):
        parser.error(
            f"--init scratch: {learner} grows the model of the stage before; use --learner sm, or --init previous"
        )
    if len(arguments.seed) > 1 and (kind == "text" or learner not in SIDE_BY_SIDE):
        parser.error(
            f"--seed: several go with streams of images and --learner {', '.join(SIDE_BY_SIDE)}; give one call for each"
        )
    if arguments.iid is not None and (arguments.wait != 1 or arguments.replay or arguments.drop_rest):
        parser.error("--iid is one stage: it does not go with --wait, --replay or --drop-rest")
    if arguments.init in (None, "fresh"):
        arguments.init = "scratch" if learner == "gens" else "previous"
    if arguments.num_members is None:
        arguments.num_members = learners[learner].default_members
    (_fill_in_text if kind == "text" else _fill_in_images)(parser, arguments)


def _meant_for(kind: str) -> dict[str, tuple[str, ...]]:
    """Return which learners an option is for."""
    learners = LEARNERS_OF[kind]
    everyone = tuple(learners)
    of_text, of_images = (everyone, ()) if kind == "text" else ((), everyone)
    return {
        "num_members": tuple(name for name, learner in learners.items() if learner.default_members is not None),
        "member": _only(of_text, "ens", "gens"),
        "grow_schedule": _only(of_text, "gmoe"),
        "grow_method": _only(of_text, "gmoe"),
        "grow_select": _only(of_text, "gmoe"),
        "grow_every": _only(of_images, "gmoe", "firefly"),
        "grow_share": _only(of_images, "firefly"),
        "combine": _only(of_images, "ens", "bagging", "gens"),
        "iid": tuple(name for name in everyone if name not in GROWING),
        "save_every": of_text,
        "num_procs": of_text,
        "validate": of_text,
    }


def _only(possible: Sequence[str], *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if name in possible)


def _fill_in_text(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    arguments.save_every = arguments.save_every or SAVE_EVERY
    arguments.num_procs = arguments.num_procs or 1
    arguments.validate = bool(arguments.validate)
    if arguments.learner != "gmoe":
        return
    if arguments.grow_schedule is None:
        parser.error("--learner gmoe needs --grow-schedule, the experts of each stage; the paper: 4,6,8,12")
    if arguments.grow_method == "scratch" and arguments.grow_select is not None:
        parser.error("--grow-select has no meaning with --grow-method scratch, which copies no expert")
    arguments.grow_method = arguments.grow_method or "copy"
    if arguments.grow_method != "scratch":
        arguments.grow_select = arguments.grow_select or "loss"
    read_schedule(parser, arguments)


def _fill_in_images(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.learner in ("gmoe", "firefly"):
        arguments.grow_every = arguments.grow_every or 1
    if arguments.learner == "firefly":
        arguments.grow_share = arguments.grow_share or GROW_SHARE
    if arguments.learner in ("ens", "bagging", "gens"):
        arguments.combine = arguments.combine or "probabilities"


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


def plan_run(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, num_megabatches: int, kind: str, seed: int
) -> list[StagePlan]:
    """Plan all stages of the run of one seed on a stream of that many mega-batches of text or images."""
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
    if kind == "text" and total > MAX_MEMBERS:
        parser.error(
            f"--num-members {num_members}: {total} models in the whole run, at most {MAX_MEMBERS} are possible"
        )
    options = LearnerOptions(
        seed=seed,
        from_previous=arguments.init == "previous",
        num_members=num_members,
        grow_schedule=schedule,
        grow_method=arguments.grow_method or "copy",
        grow_select=arguments.grow_select or "loss",
        wait=arguments.wait,
        grow_every=arguments.grow_every or 1,
        grow_share=arguments.grow_share or 0.0,
        combine=arguments.combine or "probabilities",
    )
    plans = plan_stages(arguments.learner, options, planned, LEARNERS_OF[kind])
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


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
