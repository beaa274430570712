"""The joint predictions of an ensemble's members for each test token, kept for the ensemble of the next stage.

A growing ensemble has the members of the stage before and new ones. The log of the sum of its members' probabilities of
a token, 8 bytes, is all that the next stage needs: it tests the new members alone, to the same bits.
"""

import json
import math
import zipfile
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Optional, Sequence

import numpy as np

from fairseq_alma.files import open_atomically

LogProbs = Callable[[int, Sequence[str]], Iterable[tuple[str, np.ndarray]]]


class KeptPredictions:
    """Sums over the members of an ensemble, in their order.

    Args:
        text: describes the test text, and how it is cut into sequences.
        members: sha256 of the members' checkpoints.

    Attributes:
        log_sums: for each split (N,) float64, the log of the sum of the members' probabilities of each token.
    """

    def __init__(self, text: str, members: list[str]) -> None:
        self.text, self.members = text, members
        self.log_sums: dict[str, np.ndarray] = {}

    def add_missing(self, splits: Sequence[str], files: Iterable[Path], log_probs: LogProbs) -> None:
        """Fill in the sums of some splits.

        Args:
            splits: names of the splits.
            files: may have the sums over the first members; the first that fits is taken.
            log_probs: returns for member n and some splits the log-probabilities of each split's tokens, (N,).
        """
        num_known, known = next(filter(None, map(self._read, files)), (0, {}))
        self.log_sums = {split: known[split] for split in splits if split in known}
        for number in range(len(self.members)):
            todo = [split for split in splits if number >= num_known or split not in known]
            for split, found in log_probs(number, todo) if todo else ():
                found = found.astype(np.float64)
                self.log_sums[split] = np.logaddexp(self.log_sums[split], found) if split in self.log_sums else found

    def write(self, path: Path) -> None:
        """Write the file, atomically."""
        arrays: dict[str, Any] = {"head": np.array(json.dumps([self.text, self.members])), **self.log_sums}
        with open_atomically(path) as file:
            np.savez(file, **arrays)

    def _read(self, path: Path) -> Optional[tuple[int, dict[str, np.ndarray]]]:
        """Return the number of members and the sums in a file; None if it is of other text or members, or damaged."""
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            text, members = json.loads(str(arrays.pop("head")))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        is_known = text == self.text and members == self.members[: len(members)]
        return (len(members), arrays) if is_known else None

    def losses(self) -> Iterator[tuple[str, float]]:
        """Yield for each split the loss of the mean probability, bits per token, without infinite ones, as fairseq."""
        for split, log_sums in self.log_sums.items():
            log_probs = log_sums[np.isfinite(log_sums)] - math.log(len(self.members))
            yield split, float(-log_probs.mean() / math.log(2)) if len(log_probs) else 0.0
