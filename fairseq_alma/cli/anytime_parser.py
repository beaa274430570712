"""The options of ``alma-stream`` for anytime training; what they are is in `AnytimeOptions`."""

from typing import Any

from fairseq_alma.runs.anytime_options import HALF_LIVES, REWARMS, SHAPES


def add_anytime(group: Any) -> None:
    """Add the options to a group of the parser."""
    add = group.add_argument
    add(
        "--carry-optimizer",
        action="store_true",
        default=None,
        help="optimizer state, number of updates and learning-rate schedule run on through the stages, each of which "
        "makes --max-update more; with --lr-scheduler fixed or inverse_sqrt (default: each stage begins anew)",
    )
    add(
        "--ema-half-life",
        choices=HALF_LIVES,
        help="test a moving average of the weights; its half-life is this share of the updates so far "
        "(default: test the weights)",
    )
    add(
        "--branch-decay",
        type=float,
        metavar="D",
        help="test a copy whose learning rate decays to zero over the last share D of a stage's updates; training goes "
        "on from weights that did not decay",
    )
    add("--branch-shape", choices=SHAPES, help=f"of that decay: 1 - sqrt, or linear (default: {SHAPES[0]})")
    add(
        "--branch-continue",
        action="store_true",
        default=None,
        help="with --branch-decay: decay the model itself and go on from there",
    )
    add(
        "--best-checkpoint",
        action="store_true",
        default=None,
        help="test the checkpoint of a stage with the lowest loss on valid, of those that --save-every makes and the "
        "last; the next stage begins with it, unless the optimizer is carried on",
    )
    add(
        "--replay-share",
        type=float,
        metavar="R",
        help="share of a stage's sequences that come from earlier mega-batches, drawn uniformly; the updates do not "
        "grow",
    )
    add(
        "--rewarm",
        choices=REWARMS,
        help="what the learning rate of each stage warms up to: --lr, or what one schedule over all stages so far "
        f"would have (default: {REWARMS[0]})",
    )
