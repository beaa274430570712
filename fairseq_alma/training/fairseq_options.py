"""Build configuration classes for fairseq from the options of this package, and check the ranges of options."""

import dataclasses
import sys
from argparse import ArgumentParser, Namespace
from enum import Enum
from typing import Any, Mapping, Optional, Sequence, TypeVar, cast

from fairseq.dataclass import ChoiceEnum
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import DictConfig, OmegaConf

from fairseq_alma.errors import AlmaError
from fairseq_alma.options import NONE, PLAN, TRAINING, Option, options_of

DECLARED: dict[str, Option] = {}
"""All registered options that have a range, by field name."""
Config = TypeVar("Config", bound=type)


def declared(config: Config) -> Config:
    """Register the options of a configuration class for `check_options` and `bound_options`, and return the class."""
    DECLARED.update({name: each for name, each in options_of(config).items() if each.range is not None})
    return config


def fairseq_config(name: str, base: type, parts: Sequence[type], kind: Optional[str] = None) -> Any:
    """Build the configuration class of a fairseq task or model from the options of several dataclasses.

    The calling module must assign the class to an attribute of the same name, because hydra looks up the class there.

    Args:
        name: name of the class.
        base: ``FairseqDataclass`` or a subclass; the options replace fields of the same name.
        parts: dataclasses that declare options.
        kind: ``text`` or ``images``, to omit the options for the other kind of data; None: use all options.
    """
    options = [each for part in parts for each in options_of(declared(part)).values()]
    fields: dict[str, tuple[str, Any, Any]] = {}
    for option in options:
        if option.side == PLAN or (kind is not None and kind not in option.kinds):
            continue
        default = option.default_on(TRAINING)
        annotation: Any = option.type if option.type in (bool, int, float) else str
        if option.choices:
            annotation = ChoiceEnum([*([NONE] if default == NONE else []), *option.choices])
        if option.type is bool:
            default = bool(default)
        described = dataclasses.field(default=default, metadata={"help": option.help, "option": option})
        fields[option.name] = (option.name, Optional[annotation] if default is None else annotation, described)
    config = dataclasses.make_dataclass(name, fields.values(), bases=(base,))
    config.__module__ = sys._getframe(1).f_globals["__name__"]
    return config


def configuration_of(args: Namespace) -> DictConfig:
    """Return the same configuration as fairseq's ``convert_namespace_to_omegaconf``, without hydra.

    Hydra parses about 300 options from strings, which takes half of the run time of a short command. If a model, such
    as ``lstm_lm``, has no dataclass, this function calls ``convert_namespace_to_omegaconf`` instead. The options of an
    optimizer without a dataclass, such as ``sgd``, are a dict and not a Namespace; see `features_of`.

    Args:
        args: arguments parsed by a parser of fairseq.
    """
    registries: dict[str, dict[str, Any]] = {name: each["dataclass_registry"] for name, each in REGISTRIES.items()}
    models = {arch: getattr(model, "__dataclass", None) for arch, model in ARCH_MODEL_REGISTRY.items()}
    registries |= {"task": TASK_DATACLASS_REGISTRY, "model": models}
    groups: dict[str, Any] = {}
    for group, declaration in FairseqConfig.__dataclass_fields__.items():
        choice, config = "", declaration.type
        if group in registries:
            choice = getattr(args, "arch" if group == "model" else group, None) or ""
            config = registries[group].get(choice)
            if choice and config is None and group != "optimizer":
                return convert_namespace_to_omegaconf(args)
        if group == "_name" or config is None:
            groups[group] = {**vars(args), "_name": choice} if choice else None
            continue
        values = groups[group] = vars(config.from_namespace(args))
        for name, field in config.__dataclass_fields__.items():
            if isinstance(values[name], Enum):
                values[name] = values[name].value
            elif field.type is float and values[name] is not None:
                values[name] = float(values[name])
        if choice:
            values["_name"] = choice
    for values in filter(None, groups.values()):
        for name, value in values.items():
            while isinstance(value, str) and value.startswith("${"):  # a reference such as ${common.cpu}
                group, _, other = value[2:-1].partition(".")
                value = groups[group][other]
            values[name] = value
    cfg = OmegaConf.create(groups)
    OmegaConf.set_struct(cfg, True)
    return cast(DictConfig, cfg)


def check_options(cfg: Any) -> None:
    """Raise AlmaError if an option of this package is out of range in ``cfg``, a group of fairseq's configuration."""
    values = OmegaConf.to_container(cfg, resolve=False) if isinstance(cfg, DictConfig) else cfg
    for name, value in (values if isinstance(values, Mapping) else vars(values)).items():
        option = DECLARED.get(str(name))
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if option is not None and is_number and value != option.default_on(TRAINING):
            try:
                option.value(value)
            except ValueError as error:
                raise AlmaError(str(error)) from error


def bound_options(parser: ArgumentParser) -> None:
    """Make fairseq's parser check the ranges of this package's options."""
    for action in parser._actions:
        option = DECLARED.get(action.dest)
        if option is not None and action.type in (int, float):
            action.type = option.range
