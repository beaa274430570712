"""Holds fairseq's configurations against the ranges of options, whatever form they have."""

from argparse import Namespace
from typing import Any, Mapping, cast

from omegaconf import DictConfig, OmegaConf

from fairseq_alma.option_ranges import check_config


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
    root = cfg._get_root() if isinstance(cfg, DictConfig) else cfg
    check_options(cfg)
    for group in _plain(root).values():
        if isinstance(group, (Mapping, Namespace)):
            check_options(group)


def _plain(cfg: Any) -> Mapping[str, Any]:
    if isinstance(cfg, DictConfig):
        return cast(Mapping[str, Any], OmegaConf.to_container(cfg, resolve=False))
    return cfg if isinstance(cfg, Mapping) else vars(cfg)
