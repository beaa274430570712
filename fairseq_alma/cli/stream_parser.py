"""The options of ``alma-stream`` that stand before ``--``: its own, and those that the learners declare."""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Sequence

from fairseq_alma.cli.parser import Parser
from fairseq_alma.cli.run_options import (
    LEARNERS_FROM,
    SAVE_EVERY,
    add_parts,
    add_processes,
    add_run,
    add_training,
)
from fairseq_alma.files import MAX_MEGABATCHES
from fairseq_alma.learners.learner import LEARNERS, MAX_SEED, Learner
from fairseq_alma.options import KINDS, Options, flag, options_of, whole
from fairseq_alma.runs.slurm_jobs import read_parameters
from fairseq_alma.training.anytime_options import AnytimeOptions
from fairseq_alma.training.stage_end_options import StageEndOptions

ANYTIME: tuple[type[Options], ...] = (AnytimeOptions, StageEndOptions)
# Options of alma-stream that mean something to some learners alone: option -> kinds of data, attribute of the learner.
OF_SOME: Mapping[str, tuple[tuple[str, ...], Optional[str]]] = {
    "member": (KINDS, "trains_members_alone"),
    "jobs": (KINDS, "trains_members_alone"),
    "side_by_side": (("images",), "trains_members_alone"),
    "progress_to": (KINDS, "trains_members_alone"),
    "iid": (KINDS, "has_iid_control"),
    "save_every": (("text",), None),
    "num_procs": (("text",), None),
    "nodes": (("text",), None),
    "validate": (("text",), None),
    "finetune_from_model": (("text",), None),
    "matrix": (("text",), None),
    **{name: (option.kinds, None) for each in ANYTIME for name, option in options_of(each).items()},
    "preset": (("images",), None),
}
RANGES = {
    "wait": whole(1),
    "megabatches": whole(1, MAX_MEGABATCHES),
    "save_every": whole(1),
    "iid": whole(1),
    "num_procs": whole(1, 1024),
    "jobs": whole(1, 1024),
    "side_by_side": whole(1, 1024),
    "nodes": whole(1, 1024),
}

EPILOG = """\
Text: everything after -- is handed to fairseq-train, and what the evaluation needs of it (--cpu, --tokens-per-sample,
--batch-size, ...) to fairseq-eval-lm; tests are in fp32. Example:

  alma-stream --stream STREAM --learner sm --wait 1 --run RUN -- \\
      --arch alma_switch_lm_tiny --num-experts 4 --criterion alma_switch_cross_entropy --cpu \\
      --optimizer adam --lr 0.002 --lr-scheduler polynomial_decay --warmup-updates 50 --total-num-update 500 \\
      --max-update 500 --batch-size 16 --tokens-per-sample 128

Images: nothing need stand after --; the paper's settings are the defaults. --arch, --width, --channels, --optimizer,
--lr, --max-epoch, --batch-size, --select loss|accuracy (which epoch of a stage counts: the one with the lowest
validation loss, or with the best accuracy; default: loss), --least-gain X (by how much it must be better: nats, or a
share of the images from 0 to 1; default: 0), --patience N (stop after N epochs without a better one; default: never),
--gate, --last-pool, --initial-weights, ... change them; --preset sets those in which the paper's text and its released
code differ. Example:

  alma-stream --stream STREAM --learner gmoe --wait 10 --grow-every 50 --run RUN -- --width 64 --gate soft

Learners:
{learners}

A killed run resumes with the same command and ends with the same figures. Logs are in RUN/stage-NNN/*.log.

Behind --, --tensorboard-logdir DIR and --wandb-project NAME draw test and valid figures, parameters and FLOPs over
arrivals while it runs (DIR/RUN/arrivals), and for text the curves of each training (DIR/RUN/stage-NNN/...).
TensorBoard comes with the extra [report]; Weights & Biases needs pip install wandb, and a login or WANDB_MODE=offline.
"""


def read_arguments(
    argv: Optional[Sequence[str]],
) -> tuple[argparse.ArgumentParser, argparse.Namespace, list[str], list[str]]:
    """Read the command line; what is wrong ends the program as a usage error.

    Returns:
        The parser, for further errors; what stands before ``--``; its words; the words after it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    _import_learners(words[:cut])
    parser = build_parser()
    arguments = parser.parse_args(words[:cut])
    for name, bounds in RANGES.items():
        try:
            if (value := vars(arguments)[name]) is not None:
                bounds.check(value)
        except ValueError as error:
            parser.error(f"{flag(name)} {value}: {error}")
    for number, seed in enumerate(arguments.seed):
        if not 0 <= seed <= MAX_SEED:
            parser.error(f"--seed {seed}: a number from 0 to {MAX_SEED} is needed")
        if seed in arguments.seed[:number]:
            parser.error(f"--seed {seed}: given twice")
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
    for name in {**_declared(), **OF_SOME}:
        value = vars(arguments)[name]
        meant = sorted(each for each in learners if _means(learners[each], name, kind))
        if value is not None and learner.name not in meant:
            use = f"goes with --learner {', '.join(meant)}, not with {learner.name}" if meant else "has no meaning"
            parser.error(f"{flag(name)} {use} on streams of {kind}")
    words = {name: vars(arguments)[name] for name in options_of(learner) if vars(arguments)[name] is not None}
    given = {name: _read_value(parser, learner, kind, name, word) for name, word in words.items()}
    if len(arguments.seed) > 1 and not (kind == "images" and learner.stacks_seeds):
        possible = ", ".join(sorted(name for name, each in LEARNERS["images"].items() if each.stacks_seeds))
        parser.error(f"--seed: several go with streams of images and --learner {possible}; give one call for each")
    for name in ("member", "jobs"):
        if vars(arguments)[name] is not None and len(arguments.seed) > 1:
            parser.error(f"{flag(name)} goes with one --seed; give one call for each seed")
    if arguments.member is not None and arguments.jobs is not None:
        parser.error("--jobs trains all members, --member some; give one of them")
    if arguments.side_by_side is not None and arguments.jobs is None and arguments.member is None:
        parser.error("--side-by-side goes with --jobs or --member; without them all members are trained side by side")
    if arguments.iid is not None and (arguments.wait != 1 or arguments.replay or arguments.drop_rest):
        parser.error("--iid is one stage: it does not go with --wait, --replay or --drop-rest")
    arguments.save_every = arguments.save_every or SAVE_EVERY
    arguments.num_procs, arguments.nodes = arguments.num_procs or 1, arguments.nodes or 1
    if arguments.num_procs % arguments.nodes:
        parser.error(f"--nodes {arguments.nodes}: each needs as many processes; give --num-procs a multiple of it")
    _check_slurm(parser, arguments)
    arguments.validate, arguments.matrix = bool(arguments.validate), bool(arguments.matrix)
    return learner, given


def _check_slurm(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.slurm is None:
        return
    for name in ("member", "jobs"):
        if vars(arguments)[name] is not None:
            parser.error(f"--slurm makes a job of each member; leave {flag(name)} out")
    if len(arguments.seed) > 1:
        parser.error("--slurm goes with one --seed; give one call for each seed")
    try:
        arguments.slurm = read_parameters(arguments.slurm)
    except ValueError as error:
        parser.error(str(error))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of what stands before ``--``."""
    parser = Parser(
        prog="alma-stream",
        description="Train on one mega-batch after the other and test after each update (Algorithm 1 of the paper).",
        epilog=EPILOG.format(learners="\n".join(_describe_learners())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="alma-stream --stream STREAM --run RUN [options] [-- fairseq-train options]",
        allow_abbrev=False,
    )
    add_run(parser)
    add_training(parser)
    group = parser.add_argument_group("learner")
    names = sorted({name for learners in LEARNERS.values() for name in learners})
    group.add_argument("--learner", choices=names, default="sm", help="how the model learns (default: %(default)s)")
    for name, declared in _declared().items():
        _add_declared(group, name, declared)
    add_parts(parser.add_argument_group("a part of the run"))
    add_processes(parser.add_argument_group("several processes"))
    for kind, each in zip(KINDS, ANYTIME, strict=True):
        each.add_to(parser.add_argument_group(f"anytime training ({kind})"), kind)
    return parser


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


def _means(learner: type[Learner], name: str, kind: str) -> bool:
    """Tell whether an option has a meaning for a learner on a kind of data."""
    if name not in OF_SOME:
        options = options_of(learner)
        return name in options and kind in options[name].kinds
    kinds, attribute = OF_SOME[name]
    return kind in kinds and (attribute is None or getattr(learner, attribute))


def _describe_learners() -> Iterable[str]:
    """Return a line for each learner: the first line of its docstring."""
    found: dict[tuple[str, str], list[str]] = {}
    for kind, learners in LEARNERS.items():
        for name, learner in learners.items():
            found.setdefault((name, (learner.__doc__ or "").partition("\n")[0]), []).append(kind)
    for (name, text), kinds in found.items():
        yield f"  {name:<9} {text}" + ("" if len(kinds) == len(KINDS) else f" [{', '.join(kinds)}]")


def _import_learners(words: Sequence[str]) -> None:
    """Import what ``--learners-from`` names, before the options of its learners are needed."""
    reader = Parser(add_help=False, allow_abbrev=False, exit_on_error=False)
    reader.add_argument(LEARNERS_FROM, default=None)
    found = reader.parse_known_args(words)[0].learners_from
    if found is None:
        return
    path = Path(found).resolve()
    if not path.exists():
        reader.error(f"{LEARNERS_FROM} {found}: no such folder or file of Python")
    sys.path.insert(0, str(path.parent))
    importlib.import_module(path.stem)
