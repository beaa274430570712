"""The ranges of fairseq's own options, which fairseq itself accepts unchecked, beside those that this package declares.

``alma-stream`` looks at the words after ``--`` before anything is written, the tasks at the whole configuration before
fairseq does its work, and the models at their own options, which a checkpoint may bring too. No fairseq and no torch
here: a dry run imports neither.
"""

import ast
from typing import Any, Iterable, Iterator, Mapping, Sequence

import numpy as np

from fairseq_alma.checkpoints.model_options import MAX_SIZE, MODELS
from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import StageOptions
from fairseq_alma.options import Number, Range, choices_of, ranges_of, real, whole

_COUNT, _POSITIVE, _SIZE = whole(0), whole(1), whole(0, MAX_SIZE)
_SEED = whole(0, 2**32 - 1)  # what NumPy takes
_SHARE, _AMOUNT, _ABOVE_0 = real(0, 1), real(0), real(0, above=True)
_COUNT_OR_NONE = whole(-1)  # fairseq says -1 for none
_PROCESSES = whole(1, 65_536)

RANGES: dict[str, Range] = {
    **ranges_of(*MODELS, StageOptions),
    # data
    "--batch-size": _POSITIVE,
    "--batch-size-valid": _POSITIVE,
    "--max-tokens": _POSITIVE,
    "--max-tokens-valid": _POSITIVE,
    "--required-batch-size-multiple": _POSITIVE,
    "--required-seq-len-multiple": _POSITIVE,
    "--num-workers": whole(0, 1024),
    "--num-workers-valid": whole(0, 1024),
    "--data-buffer-size": _COUNT,
    "--validate-interval": _POSITIVE,
    "--validate-interval-updates": _COUNT,
    "--validate-after-updates": _COUNT,
    "--fixed-validation-seed": _SEED,
    "--max-valid-steps": _COUNT,
    "--curriculum": _COUNT,
    "--num-shards": _POSITIVE,
    "--shard-id": _COUNT,
    "--context-window": _SIZE,
    "--softmax-batch": whole(1, 2**63 - 1),
    # length and speed of a training
    "--max-epoch": _COUNT,
    "--max-update": _COUNT,
    "--stop-time-hours": _AMOUNT,
    "--stop-min-lr": real(-1),
    "--clip-norm": _AMOUNT,
    "--update-freq": Range(1, is_list=True),
    "--lr": Range(0, 1e30, is_whole=False, is_list=True),
    "--seed": _SEED,
    "--log-interval": _POSITIVE,
    "--empty-cache-freq": _COUNT,
    "--all-gather-list-size": _POSITIVE,
    # numbers of 16 bits
    "--fp16-init-scale": _POSITIVE,
    "--fp16-scale-window": _POSITIVE,
    "--fp16-scale-tolerance": _SHARE,
    "--min-loss-scale": _AMOUNT,
    "--threshold-loss-scale": _AMOUNT,
    "--amp-batch-retries": _COUNT,
    "--amp-init-scale": _POSITIVE,
    "--amp-scale-window": _POSITIVE,
    # processes
    "--distributed-world-size": _PROCESSES,
    "--distributed-num-procs": _PROCESSES,
    "--distributed-rank": whole(0, 65_535),
    "--distributed-port": whole(-1, 65_535),
    "--device-id": whole(0, 65_535),
    "--nprocs-per-node": _PROCESSES,
    "--bucket-cap-mb": _POSITIVE,
    "--heartbeat-timeout": _COUNT_OR_NONE,
    # checkpoints
    "--save-interval": _POSITIVE,
    "--save-interval-updates": _COUNT,
    "--keep-interval-updates": _COUNT_OR_NONE,
    "--keep-interval-updates-pattern": _COUNT_OR_NONE,
    "--keep-last-epochs": _COUNT_OR_NONE,
    "--keep-best-checkpoints": _COUNT_OR_NONE,
    "--patience": _COUNT_OR_NONE,
    "--checkpoint-shard-count": _POSITIVE,
    "--ema-decay": _SHARE,
    "--ema-start-update": _COUNT,
    "--ema-update-freq": _POSITIVE,
    # optimizers
    "--weight-decay": _AMOUNT,
    "--momentum": _SHARE,
    "--adam-eps": _AMOUNT,
    "--adadelta-rho": _SHARE,
    "--adadelta-eps": _AMOUNT,
    "--adamax-eps": _AMOUNT,
    "--lamb-eps": _AMOUNT,
    "--clip-threshold": _ABOVE_0,
    # learning-rate schedules
    "--warmup-updates": _COUNT,
    "--warmup-init-lr": real(-1),
    "--end-learning-rate": _AMOUNT,
    "--total-num-update": _ABOVE_0,
    "--power": _AMOUNT,
    "--force-anneal": _COUNT,
    "--min-lr": real(-1),
    "--max-lr": _AMOUNT,
    "--t-mult": _ABOVE_0,
    "--lr-period-updates": real(-1),
    "--lr-shrink": _SHARE,
    "--lr-threshold": _AMOUNT,
    "--lr-patience": _COUNT,
    "--lr-decay": _SHARE,
    "--warmup-steps": _COUNT,
    "--hold-steps": _COUNT,
    "--decay-steps": _COUNT,
    "--init-lr-scale": _AMOUNT,
    "--final-lr-scale": _AMOUNT,
    # generation
    "--beam": whole(1, 10_000),
    "--nbest": whole(1, 10_000),
    "--min-len": _COUNT,
    "--max-len-a": _AMOUNT,
    "--max-len-b": _COUNT,
    "--temperature": _ABOVE_0,
    "--sampling-topk": _COUNT_OR_NONE,
    "--sampling-topp": real(-1, 1),
    "--prefix-size": _COUNT,
    "--no-repeat-ngram-size": _COUNT,
}
"""Option of a fairseq command -> its range; those of this package declare theirs, `fairseq_config` adds the tasks'.

An option that is not here has no numbers, or any is fine."""
CHOICES = choices_of(*MODELS)
"""Option of this package's models -> what it may be."""

_OF_ONE: Mapping[tuple[str, str], Range] = {("inverse_sqrt", "--warmup-updates"): _POSITIVE}
"""Name of a schedule and option -> its range, where it is not that of the others."""

_PAIRS: Mapping[str, Range] = {
    **dict.fromkeys(("--adam-betas", "--adamax-betas", "--lamb-betas"), real(0, 1, below=True)),
    "--adafactor-eps": real(0),
}
"""Option of two numbers, which fairseq would evaluate whatever stands there -> the range of each."""

BREAK_MODE = "--sample-break-mode"


def check_words(options: Iterable[tuple[str, Sequence[str]]], *parts: type) -> None:
    """Raise ValueError, which begins with the option, if words after ``--`` are no numbers in its range.

    Args:
        options: each with its values.
        parts: dataclasses that declare some of them otherwise than fairseq does.
    """
    options = [*options]
    ranges, choices = {**RANGES, **ranges_of(*parts)}, {**CHOICES, **choices_of(*parts)}
    schedule = next((" ".join(values) for name, values in reversed(options) if name == "--lr-scheduler"), "")
    if schedule == "polynomial_decay" and all(name != "--total-num-update" for name, _ in options):
        raise ValueError(f"--lr-scheduler {schedule} after the --: give --total-num-update too")
    for name, values in options:
        given = " ".join(values)
        if name == BREAK_MODE:
            _check_break_mode(given)
        if given not in choices.get(name, (given,)):
            raise ValueError(f"{name} {given:.200} after the --: choose from {', '.join(choices[name])}")
        bounds = _OF_ONE.get((schedule, name), ranges.get(name))
        if bounds is None and name not in _PAIRS:
            continue
        try:
            if bounds is None:
                check_pair(name, given)
                continue
            if len(values) != 1 or ("," in given and not bounds.is_list):
                raise ValueError("one number is needed")
            bounds.read_all(given) if bounds.is_list else bounds.read(given)
        except ValueError as error:
            needed = str(error)
            if bounds is not None and bounds.is_whole:  # a word, where a file has a number of the right type already
                needed = needed.replace("a number", "a whole number")
            raise ValueError(f"{name} {given:.200} after the --: {needed}") from error


def check_config(config: Mapping[str, Any]) -> None:
    """Raise AlmaError if a group of fairseq's configuration has a number out of its option's range.

    Args:
        config: plain values by their names, ``max_epoch`` being ``--max-epoch``; what is no number is passed over, as
            groups may have a name in another meaning.
    """
    for name, value in config.items():
        flag = f"--{str(name).replace('_', '-')}"
        try:
            if flag == BREAK_MODE and value is not None:
                _check_break_mode(str(value))
            if flag in _PAIRS and value is not None:
                check_pair(flag, str(value))
            if flag in RANGES:
                bounds = _OF_ONE.get((str(config.get("_name")), flag), RANGES[flag])
                for number in _numbers(value):
                    bounds.check(number)
        except ValueError as error:
            message = str(error)
            raise AlmaError(message if message.startswith("--") else f"{flag} {value}: {message}") from error


def check_pair(flag: str, given: str) -> None:
    """Raise ValueError with what is needed if the value of an option of two numbers is no such pair."""
    try:
        first, second = ast.literal_eval(given)
        _PAIRS[flag].check(first)
        _PAIRS[flag].check(second)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        most = "from 0 to 1" if _PAIRS[flag].below else "of at least 0"
        raise ValueError(f"two numbers {most} are needed, such as '(0.9, 0.98)'") from error


def _numbers(value: Any) -> Iterator[Number]:
    for each in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(each, (int, float)) and not isinstance(each, bool):
            yield each


def _check_break_mode(mode: str) -> None:
    """Raise ValueError for the mode that fairseq has written for NumPy 1 alone (``np.compat``)."""
    if mode == "eos" and not hasattr(np, "compat"):
        raise ValueError(f"{BREAK_MODE} eos: fairseq cannot do it with NumPy 2; give none, or install numpy<2")
