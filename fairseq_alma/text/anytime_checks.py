"""Whether the options after ``--`` fit those of anytime training, before anything is trained."""

from typing import Optional, Sequence

from fairseq_alma.learners.plan import StagePlan
from fairseq_alma.text.train_options import TrainOptions
from fairseq_alma.training.anytime_options import AnytimeOptions

ENDLESS = ("fixed", "inverse_sqrt")
"""Schedules without a horizon; fairseq's ``fixed`` is a warm-up, then constant."""
GROWABLE = ("adam", "fused_adam")
"""Optimizers whose state is known well enough to be shared between the halves of an expert."""


def check_schedule(anytime: AnytimeOptions, options: TrainOptions, plans: Sequence[StagePlan]) -> None:
    """Raise ValueError, which begins with the option, if the training cannot do what anytime options ask for."""
    if anytime.branch_decay is not None:
        _require_updates("--branch-decay", options)
        _require_endless(f"--branch-decay {anytime.branch_decay:g}", options)
    if anytime.replay_share is not None:
        _require_updates(f"--replay-share {anytime.replay_share:g}", options)
    if anytime.rewarm == "one-schedule":
        _require_one_decay(options)
    if anytime.carry_optimizer:
        _require_updates("--carry-optimizer", options)
        _require_whole_stream(options, len(plans))
        _require_growable(options, plans)


def _require_updates(flag: str, options: TrainOptions) -> None:
    if options.max_update is None or options.max_epoch is not None:
        raise ValueError(f"{flag}: counts the updates of a stage; give --max-update after the --, and no --max-epoch")


def _schedule(options: TrainOptions) -> str:
    return " ".join(options.last("--lr-scheduler") or ("fixed",))


def _require_endless(flag: str, options: TrainOptions) -> None:
    """Refuse schedules that decay by themselves, and rates that depend on the epoch."""
    schedule = _schedule(options)
    if schedule not in ENDLESS:
        raise ValueError(
            f"{flag}: --lr-scheduler {schedule} after the -- decays by itself; give {' or '.join(ENDLESS)} instead"
        )
    _refuse_rates_by_epoch(flag, options)


def _refuse_rates_by_epoch(flag: str, options: TrainOptions) -> None:
    rates = " ".join(options.last("--lr") or ())
    if "," in rates or options.last("--force-anneal") is not None:
        given = f"--lr {rates}" if "," in rates else "--force-anneal"
        raise ValueError(
            f"{flag}: {given} after the -- depends on the epoch, which begins anew in each stage; give one --lr"
        )


def _require_whole_stream(options: TrainOptions, num_stages: int) -> None:
    """Refuse schedules that end before the stream does."""
    schedule = _schedule(options)
    if schedule in ENDLESS:
        _refuse_rates_by_epoch("--carry-optimizer", options)
        return
    if schedule != "polynomial_decay":
        raise ValueError(
            f"--carry-optimizer: --lr-scheduler {schedule} after the -- knows no stream of several stages; give "
            f"{' or '.join(ENDLESS)}, or polynomial_decay with a --total-num-update for all of it"
        )
    total, needed = _number(options.last("--total-num-update")), num_stages * (options.max_update or 0)
    if total is None or total < needed:
        raise ValueError(
            f"--carry-optimizer: --total-num-update {'' if total is None else f'{total:g} '}after the --, and the "
            f"{num_stages} stages make {needed:,} updates in all; give at least that, or --lr-scheduler fixed"
        )


def _require_one_decay(options: TrainOptions) -> None:
    """Refuse schedules of whose value at an update nothing is known here."""
    flag = "--rewarm one-schedule"
    _require_updates(flag, options)
    total = _number(options.last("--total-num-update"))
    if _schedule(options) != "polynomial_decay" or total != options.max_update:
        raise ValueError(
            f"{flag}: needs --lr-scheduler polynomial_decay after the --, with a --total-num-update of --max-update"
        )
    if (_number(options.last("--end-learning-rate")) or 0.0) > 0 or len(options.last("--lr") or ()) != 1:
        raise ValueError(f"{flag}: needs one --lr after the --, and an --end-learning-rate of 0")
    _refuse_rates_by_epoch(flag, options)


def _require_growable(options: TrainOptions, plans: Sequence[StagePlan]) -> None:
    """Refuse an optimizer whose state cannot grow with the model."""
    optimizer = " ".join(options.last("--optimizer") or ())
    if optimizer not in GROWABLE and any(each.growth for plan in plans for each in plan.trainings):
        raise ValueError(
            f"--carry-optimizer: the state of --optimizer {optimizer or '(none given)'} is not known to grow with a "
            f"model; give {' or '.join(GROWABLE)} after the --"
        )


def _number(values: Optional[tuple[str, ...]]) -> Optional[float]:
    return None if values is None else float(" ".join(values))
