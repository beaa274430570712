"""What a command of a run finds out that those after it need not find out again, handed on by the fork server.

- Files of the stream, and checkpoints, whose content was verified.
- Its options as hydra composes them, which takes half of a small stage: the next command of the same kind differs in a
  few values, a mega-batch, a folder, a seed. These are set in what was composed before, each as hydra sets it.

A command writes it into a file in memory that the server has opened for it; what is damaged or missing costs the time
that it would have saved.
"""

import atexit
import contextlib
import gc
import json
import os
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Sequence

from fairseq_alma.data.known_files import VERIFIED


@dataclass
class Composed:
    """Options as hydra composes them.

    Attributes:
        words: what was composed, each as ``key=value``.
        config: the result.
    """

    words: Sequence[str]
    config: Any

    @classmethod
    def of(cls, words: Sequence[str]) -> "Composed":
        """Compose options as `fairseq.dataclass.utils.convert_namespace_to_omegaconf` does."""
        import fairseq
        from fairseq.dataclass import utils
        from hydra import initialize_config_dir
        from hydra.core.global_hydra import GlobalHydra

        GlobalHydra.instance().clear()
        with initialize_config_dir(str(Path(fairseq.__file__).parent / "config")):
            return cls(words, utils.compose("config", overrides=words, strict=False))

    def fits(self, words: Sequence[str]) -> bool:
        """Tell whether other words name the same options, and the same where one names a group: a key without a dot."""
        pairs = zip(self.words, words, strict=False)
        return len(words) == len(self.words) and all(
            before == now or (_key(before) == _key(now) and "." in _key(now)) for before, now in pairs
        )

    def with_values(self, words: Sequence[str]) -> Any:
        """Return what hydra would make of words that fit."""
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from omegaconf import OmegaConf

        config, known = deepcopy(self.config), set(self.words)
        for each in OverridesParser.create().parse_overrides([word for word in words if word not in known]):
            OmegaConf.update(config, each.key_or_group, each.value(), merge=True)
        return config


def _key(word: str) -> str:
    return word.partition("=")[0]


@dataclass
class PassedOn:
    """What is known by now, in the server and, as they are forked from it, in its commands.

    Attributes:
        composed: the options of commands, the newest first.
    """

    composed: list[Composed] = field(default_factory=list)

    def begin(self, file: int) -> None:
        """Use what is known in this process, a command, and write what is new when it ends.

        Args:
            file: descriptor that the server reads.
        """
        from fairseq.dataclass import utils

        num_verified, own, process, compose = len(VERIFIED), list[Sequence[str]](), os.getpid(), utils.compose

        def compose_once(name: str, overrides: Sequence[str], strict: Optional[bool] = None) -> Any:
            known = next((each for each in self.composed if each.fits(overrides)), None)
            if known is not None:
                return known.with_values(overrides)
            if len({*map(_key, overrides)}) == len(overrides):
                own.append(overrides)
            return compose(name, overrides=overrides, strict=strict)

        def write() -> None:
            if os.getpid() == process:  # no worker of the command
                with contextlib.suppress(OSError), os.fdopen(file, "w") as opened:
                    json.dump([VERIFIED.since(num_verified), own], opened)

        utils.compose = compose_once
        atexit.register(write)

    def take(self, file: int) -> None:
        """Take over what a command has written that has ended."""
        with os.fdopen(file, "rb") as opened:
            opened.seek(0)
            content = opened.read()
        with contextlib.suppress(Exception):  # of options that the user's own code brings, and the server does not know
            verified, composed = json.loads(content)
            VERIFIED.take((tuple(identity), sha256) for identity, sha256 in verified)
            for words in composed:
                self.composed = [Composed.of(words), *self.composed][:MOST_COMPOSED]
                gc.freeze()  # shared with all children from now on


MOST_COMPOSED = 8
"""Kinds of commands whose options are kept; a run has two or three."""
