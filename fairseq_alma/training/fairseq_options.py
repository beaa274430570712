"""fairseq's configuration classes, made of this package's declared options, and the check of their ranges."""

import dataclasses
import sys
from argparse import ArgumentParser
from typing import Any, Mapping, Optional, Sequence, TypeVar

from fairseq.dataclass import ChoiceEnum
from omegaconf import DictConfig, OmegaConf

from fairseq_alma.errors import AlmaError
from fairseq_alma.options import NONE, PLAN, TRAINING, InRange, Option, options_of

DECLARED: dict[str, Option] = {}
"""Options with a range, of all configurations that were made here or are `declared`, by field name."""
Config = TypeVar("Config", bound=type)


def declared(config: Config) -> Config:
    """Let parsers check the ranges of the options (`options.opt`) of a configuration class."""
    DECLARED.update({name: each for name, each in options_of(config).items() if each.range is not None})
    return config


def fairseq_config(name: str, base: type, parts: Sequence[type], kind: Optional[str] = None) -> Any:
    """Make the configuration class of a fairseq task or model from the options of several dataclasses.

    The class belongs to an attribute of the calling module that has its name, as hydra looks it up there.

    Args:
        name: of the class.
        base: fairseq's dataclass, or one that adds fields that are no options of ours, such as interpolations.
        parts: dataclasses with options; a field of ``base`` with the same name is replaced.
        kind: of data; options without a meaning there are omitted; None: all options.
    """
    options = {each.name: each for part in parts for each in options_of(part).values() if each.side != PLAN}
    options = {name: each for name, each in options.items() if kind is None or kind in each.kinds}
    DECLARED.update({each.name: each for each in options.values() if each.range is not None})
    fields = []
    for each in options.values():
        default = bool(each.default_on(TRAINING)) if each.type is bool else each.default_on(TRAINING)
        described = dataclasses.field(default=default, metadata={"help": each.help, "option": each})
        fields.append((each.name, _fairseq_type(each), described))
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


def check_options(cfg: Any) -> None:
    """Raise AlmaError if an option of this package in a group of fairseq's configuration is out of range."""
    values = OmegaConf.to_container(cfg, resolve=False) if isinstance(cfg, DictConfig) else cfg
    values = values if isinstance(values, Mapping) else vars(values)
    for name, value in values.items():
        option = DECLARED.get(str(name))
        if option is None or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if value != option.default_on(TRAINING):
            try:
                option.value(value)
            except ValueError as error:
                raise AlmaError(str(error)) from error


def bound_options(parser: ArgumentParser) -> None:
    """Let fairseq's parser check the ranges of this package's options."""
    for action in parser._actions:
        option = DECLARED.get(action.dest)
        if option is not None and option.range is not None and action.type in (int, float):
            action.type = InRange(option.range)
