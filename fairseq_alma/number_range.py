"""Ranges of numbers: what an option may be, said in the same words wherever it is checked."""

import argparse
import math
from dataclasses import dataclass
from typing import Union

Number = Union[int, float]
LARGEST_COUNT = 2**31 - 1


@dataclass(frozen=True)
class Range:
    """The numbers from ``least`` to ``most``; infinity and NaN are in no range.

    Attributes:
        least: smallest number.
        most: largest number.
        is_whole: whether only whole numbers are in it.
        above: whether ``least`` itself is left out.
        below: whether ``most`` itself is left out.
        is_list: whether an option has several such numbers, as fairseq's ``--lr 0.1,0.05``.
    """

    least: Number
    most: Number = LARGEST_COUNT
    is_whole: bool = True
    above: bool = False
    below: bool = False
    is_list: bool = False

    def read(self, text: str) -> Number:
        """Return the number that a text stands for. Raises ValueError with what is needed if it is not in the range."""
        try:
            value = int(text) if self.is_whole else float(text)
        except ValueError as error:
            raise ValueError(f"a {'whole ' if self.is_whole else ''}number is needed") from error
        self.check(value)
        return value

    def read_all(self, text: str) -> list[Number]:
        """Return the numbers of a list with commas, in brackets or not; see `read`."""
        return [self.read(word.strip()) for word in text.strip("[]() ").rstrip(",").split(",")]

    def check(self, value: Number) -> None:
        """Raise ValueError with what is needed if a number is not in the range."""
        if math.isnan(value):
            raise ValueError("a number is needed")
        if value < self.least or (self.above and value == self.least):
            raise ValueError(f"a number {'above' if self.above else 'of at least'} {spell(self.least)} is needed")
        if value > self.most or (self.below and value == self.most):
            raise ValueError(f"a number {'below' if self.below else 'of at most'} {spell(self.most)} is needed")


class InRange:
    """The type of an option that is a number of a range, for ``add_argument(type=...)``.

    Args:
        bounds: the range.
    """

    def __init__(self, bounds: Range) -> None:
        self.bounds = bounds

    def __call__(self, text: str) -> Number:
        """Return the number that a text stands for."""
        try:
            return self.bounds.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text} found, {error}") from error


def spell(number: Number) -> str:
    """Spell a bound: ``1,000,000``, ``0.5``, ``1e+30``."""
    return f"{number:,}" if isinstance(number, int) or abs(number) < 1e6 else f"{number:g}"


def whole(least: int = 1, most: int = LARGEST_COUNT) -> Range:
    """Return a range of whole numbers."""
    return Range(least, most)


def real(least: Number = 0, most: Number = 1e30, above: bool = False, below: bool = False) -> Range:
    """Return a range of real numbers."""
    return Range(least, most, is_whole=False, above=above, below=below)
