"""Axes whose numbers people can read: logarithmic or not, with plain labels; where to break one."""

import math
from itertools import pairwise
from typing import Callable, Optional, Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from fairseq_alma.metrics.table import show_count

WIDE = 4.0  # a span of costs on a logarithmic axis: less would make much of small differences
NARROW = 1.02  # the same of results
_MANY_POWERS = 300.0
_EVEN = 3.0  # below this factor evenly spaced ticks read better, on a logarithmic axis too
_STEPS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))


def plain(value: float) -> str:
    """Spell a number for a tick: ``0.5``, ``1,000``, ``2×10⁷`` (as mathematics) where that is shorter."""
    return f"{value:,.10g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else scientific(value)


def scientific(value: float) -> str:
    """Spell a number as a power of ten, as mathematics: ``2×10⁷``."""
    power = math.floor(math.log10(abs(value)) + 1e-9)
    digits = f"{value / 10**power:.3g}"
    return f"$10^{{{power}}}$" if digits == "1" else f"${digits}{{\\times}}10^{{{power}}}$"


def logarithmic(
    axis: Axis, values: Sequence[float], label: Callable[[float], str] = plain, least_span: float = WIDE
) -> None:
    """Make an axis logarithmic, with limits around the values and three ticks or more that have plain labels.

    Args:
        axis: x or y.
        values: what it must show; those that are not positive and finite cannot be shown.
        label: spells a tick.
        least_span: smallest factor between both ends.
    """
    low, high = _limits([value for value in values if 0 < value < math.inf], least_span)
    axes = axis.axes
    assert isinstance(axes, Axes)
    if axis is axes.xaxis:
        axes.set_xscale("log")
        axes.set_xlim(low, high)
    else:
        axes.set_yscale("log")
        axes.set_ylim(low, high)
    if high / low < _EVEN:
        axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    else:
        steps = next((each for each in _STEPS if _count_ticks(each, low, high) >= 3), _STEPS[-1])
        axis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))


def show_tflops(values: Sequence[float]) -> Callable[[float], str]:
    """Choose how ticks spell costs: over a wide range, which leaves little room for each, as powers of ten."""
    return scientific if max(values) > _MANY_POWERS * min(values) > 0 else plain


def show_params(value: float) -> str:
    """Spell a number of parameters: ``65M``."""
    return show_count(value)


def gap_in(values: Sequence[float], least: float = 3.0) -> Optional[float]:
    """Return where an axis had better be broken: within the widest gap between neighbours, if it is a wide one.

    Args:
        values: those that are not positive and finite do not count.
        least: factor between two neighbours from which on they leave no sensible common axis.
    """
    ordered = sorted(value for value in values if 0 < value < math.inf)
    steps = [(after / before, math.sqrt(after * before)) for before, after in pairwise(ordered)]
    factor, middle = max(steps, default=(1.0, 0.0))
    return middle if factor >= least else None


def linear(axis: Axis, values: Sequence[float]) -> None:
    """Give an axis limits around the values, and ticks with plain labels.

    Args:
        axis: x or y.
        values: what it must show; those that are not finite cannot be shown.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    room = 0.06 * ((high - low) or abs(high) or 1.0)
    axes = axis.axes
    assert isinstance(axes, Axes)
    if axis is axes.xaxis:
        axes.set_xlim(low - room, high + room)
    else:
        axes.set_ylim(low - room, high + room)
    axis.set_major_locator(MaxNLocator(nbins=6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


def _limits(values: Sequence[float], least_span: float) -> tuple[float, float]:
    if not values:
        return 1.0, WIDE
    low, high = min(values), max(values)
    grow = math.sqrt(max(least_span * low / high, 1.0))
    low, high = low / grow, high * grow
    room = (high / low) ** 0.06
    return low / room, high * room


def _count_ticks(steps: Sequence[float], low: float, high: float) -> int:
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    return sum(low <= step * 10.0**power <= high for power in powers for step in steps)
