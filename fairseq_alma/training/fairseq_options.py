"""fairseq's configurations: made of declared options, and held against their ranges, whatever form they have."""

import dataclasses
import sys
from argparse import ArgumentParser, Namespace
from typing import Any, Mapping, Optional, Sequence, cast

from fairseq.dataclass import ChoiceEnum
from omegaconf import DictConfig, OmegaConf

from fairseq_alma.errors import AlmaError
from fairseq_alma.options import NONE, PLAN, TRAINING, InRange, Option, Range, options_of
from fairseq_alma.training.option_ranges import RANGES, check_config


def fairseq_config(name: str, base: type, parts: Sequence[type], kind: Optional[str] = None) -> Any:
    """Make the configuration class of a fairseq task or model of the options of several parts.

    The class belongs to an attribute of the calling module that has its name, as hydra looks it up there.

    Args:
        name: of the class.
        base: fairseq's dataclass, or one that adds what is no option of ours, such as interpolations.
        parts: dataclasses with options; a field of ``base`` with the same name is replaced.
        kind: of data, which leaves out options that mean nothing there; None: all.
    """
    options = {each.name: each for part in parts for each in options_of(part).values() if each.side != PLAN}
    options = {name: each for name, each in options.items() if kind is None or kind in each.kinds}
    RANGES.update({each.flag: _range_with_default(each) for each in options.values() if each.range is not None})
    fields = [(each.name, _fairseq_type(each), _fairseq_field(each)) for each in options.values()]
    made = dataclasses.make_dataclass(name, fields, bases=(base,))
    made.__module__ = sys._getframe(1).f_globals["__name__"]
    return made


def _fairseq_type(option: Option) -> Any:
    """Return the type of an option as fairseq's parser and OmegaConf take it."""
    if option.type is bool:
        return bool
    default = option.default_on(TRAINING)
    if option.choices:
        kind = ChoiceEnum([*((NONE,) if default == NONE and NONE not in option.choices else ()), *option.choices])
    else:
        kind = option.type if option.type in (int, float) else str
    return Optional[kind] if default is None else kind


def _fairseq_field(option: Option) -> Any:
    default = option.default_on(TRAINING)
    default = bool(default) if option.type is bool else default
    return dataclasses.field(default=default, metadata={"help": option.help, "option": option})


def _range_with_default(option: Option) -> Range:
    """Return the range of an option, and its default in a training, which may stand for "not given"."""
    assert option.range is not None
    default = option.default_on(TRAINING)
    try:
        option.range.check(option.range.least if default is None else default)
    except ValueError:
        return dataclasses.replace(option.range, above=False)
    return option.range


def check_options(cfg: Any) -> None:
    """Raise AlmaError if a model, or whatever has one group of options, has a number out of range.

    Args:
        cfg: a ``DictConfig``, a dataclass or a ``Namespace``. References to other groups are passed over.
    """
    check_config(_plain(cfg))


def check_whole_config(cfg: Any) -> None:
    """Raise AlmaError if an option of the command that a task is set up for has a number out of range.

    Args:
        cfg: the task's; where it is part of the whole configuration, as in fairseq's commands, all groups are checked.
    """
    root = _plain(cfg._get_root() if isinstance(cfg, DictConfig) else cfg)
    window = (root.get("eval_lm") or {}).get("context_window") or 0
    if window > 0 and cfg.tokens_per_sample < 1:  # fairseq has taken the window off
        raise AlmaError(
            f"--context-window {window}: must be smaller than --tokens-per-sample {cfg.tokens_per_sample + window}"
        )
    check_options(cfg)
    for group in root.values():
        if isinstance(group, (Mapping, Namespace)):
            check_options(group)


def bound_options(parser: ArgumentParser) -> None:
    """Let fairseq's parser refuse numbers out of range: of a seed it makes use before there is a task.

    Args:
        parser: has all options but those of the optimizer, the schedule and the criterion, which `check_whole_config`
            sees.
    """
    for action in parser._actions:
        flags = [flag for flag in action.option_strings if flag in RANGES]
        if flags and action.type in (int, float):
            action.type = InRange(RANGES[flags[0]])


def _plain(cfg: Any) -> Mapping[str, Any]:
    if isinstance(cfg, DictConfig):
        return cast(Mapping[str, Any], OmegaConf.to_container(cfg, resolve=False))
    return cfg if isinstance(cfg, Mapping) else vars(cfg)
