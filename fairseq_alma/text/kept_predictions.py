"""What an ensemble predicted of each held-out token, kept for the stage after: members that stay are not tested again.

A growing ensemble has the members of the stage before and new ones. The log of the sum of its members' probabilities of
a token, 8 bytes, is all that the next stage needs: whatever its number of members, it tests the new ones. Without the
file, or with one of other members or of other text, all are tested, to the same bits. See also `images.predictions`.
"""

import contextlib
import math
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np

from fairseq_alma.files import open_atomically

_ARRAYS = ("about", "members", "splits", "sizes", "log_sums")


@dataclass
class KeptPredictions:
    """Sums over members, split by split.

    Attributes:
        about: what else decides them: text, and how it is cut into sequences.
        members: sha256 of the members' checkpoints, in the order in which they were added.
        log_sums: by the name of a split, (N,) float64: the log of the sum of the members' probabilities of each token.
    """

    about: str
    members: tuple[str, ...]
    log_sums: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Optional[KeptPredictions]":
        """Read a file; None where it is not there, or damaged."""
        with contextlib.suppress(OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError):
            with np.load(path, allow_pickle=False) as file:
                about, members, splits, sizes, log_sums = (file[name] for name in _ARRAYS)
            if sizes.sum() == len(log_sums) and len(sizes) == len(splits):
                parts = np.split(log_sums.astype(np.float64, copy=False), np.cumsum(sizes)[:-1])
                names = [name.decode() for name in splits.tolist()]
                sums = dict(zip(names, parts, strict=True))
                return cls(str(about.item().decode()), tuple(each.decode() for each in members.tolist()), sums)
        return None

    def write(self, path: Path) -> None:
        """Write the file, atomically."""
        sizes = np.array([len(each) for each in self.log_sums.values()], dtype=np.int64)
        parts = np.concatenate([*self.log_sums.values()]) if self.log_sums else np.zeros(0)
        names = (np.array([each.encode() for each in names]) for names in (self.members, [*self.log_sums]))
        with open_atomically(path) as file:
            arrays: dict[str, Any] = dict(
                zip(_ARRAYS, (np.array(self.about.encode()), *names, sizes, parts), strict=True)
            )
            np.savez(file, **arrays)

    def is_begun_by(self, before: "Optional[KeptPredictions]") -> bool:
        """Tell whether these are of the same text, and of the members of ``before`` and perhaps further ones."""
        return (
            before is not None and before.about == self.about and before.members == self.members[: len(before.members)]
        )

    def add(self, split: str, log_probs: np.ndarray) -> None:
        """Add a member's (N,) log-probabilities of the tokens of a split; members come in their order."""
        found = log_probs.astype(np.float64)
        before = self.log_sums.get(split)
        self.log_sums[split] = found if before is None else np.logaddexp(before, found)

    def loss(self, split: str) -> float:
        """Return the loss of the members' mean probability, bits per token; as fairseq's, without infinite ones."""
        log_probs = self.log_sums[split] - math.log(len(self.members))
        log_probs = log_probs[~np.isinf(log_probs)]
        return float(-log_probs.sum() / len(log_probs) / math.log(2)) if len(log_probs) else 0.0
