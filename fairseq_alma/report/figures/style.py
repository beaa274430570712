"""How all figures look: colours, markers, sizes, axes whose numbers people can read, and how they become files.

Colours are those of Okabe and Ito (2008), which colour-blind readers can tell apart, with two more for learners that
only images have. A colour always means a learner, a marker a waiting time; nothing is told by colour
alone where two learners may stand in one panel.
"""

import math
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, Optional, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator
from matplotlib.typing import ColorType

from fairseq_alma.errors import AlmaError
from fairseq_alma.files import open_atomically
from fairseq_alma.report.spelling import LEARNER_COLOURS

EXPERT_COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#888888", "#882255", "#332288",
    "#999933", "#8C510A",
)  # fmt: skip
GREY, TREE = "#666666", "#B2182B"
IID_MARKER = "*"
_WAIT_MARKERS = {1: "o", 2: "s", 3: "^", 4: "D", 5: "v", 10: "P", 25: "X", 50: "<", 100: ">", 500: "h"}
_OTHER_MARKERS = ("p", "d", "8", "H", "$\\mathbf{w}$")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))
FULL_WIDTH = 6.8  # inches: the text width of a page
FEW_ARRIVALS = 12  # named t0, t1, … as in the tables
WIDE = 4.0  # a span of costs on a logarithmic axis: less would make much of small differences
NARROW = 1.02  # the same of results
_EVEN = 3.0  # below this factor evenly spaced ticks read better, on a logarithmic axis too
_STEPS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
_SETTINGS = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so figures look the same everywhere
    "font.size": 8.5,
    **dict.fromkeys(("axes.titlesize", "axes.labelsize"), 8.5),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize", "legend.title_fontsize"), 7.5),
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "axes.linewidth": 0.7,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.2,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",  # also below a dark page
    "pdf.fonttype": 42,  # TrueType, embedded: text stays text, and printers have it
    "svg.fonttype": "path",
    "svg.hashsalt": "fairseq_alma",  # the same figure is the same file
}
_METADATA: Mapping[str, str] = {"png": "Software", "pdf": "CreationDate", "svg": "Date"}  # what is left out


@dataclass(frozen=True)
class Drawing:
    """A figure that was drawn but not written yet."""

    name: str
    title: str
    caption: str
    figure: Figure


def applied() -> AbstractContextManager[None]:
    """Let what is drawn and saved within look as all figures do."""
    return matplotlib.rc_context(_SETTINGS)  # type: ignore[arg-type]


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of that size in inches whose layout leaves room for what stands around its axes."""
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, stem: Path) -> dict[str, Path]:
    """Write a figure as PNG, PDF and SVG and return the paths; each file appears at once and whole."""
    figure.draw_without_rendering()  # lays it out; once is enough for three files
    figure.set_layout_engine("none")
    paths = {ending: stem.with_name(f"{stem.name}.{ending}") for ending in _METADATA}
    for path in paths.values():
        write(figure, path)
    return paths


@contextmanager
def drawn(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Give an empty figure of that size in inches, and write what the block has drawn, as `write` does."""
    with applied():
        figure = new_figure(width, height)
        yield figure
        write(figure, path)


def write(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, PDF or SVG, as the path ends; the file appears at once and whole, and its folder is made.

    Raises:
        AlmaError: it ends otherwise, or something else than a file is in its place.
        OSError: it cannot be written.
    """
    ending = path.suffix[1:]
    if ending not in _METADATA:
        raise AlmaError(f"{path}: the name of a figure ends in .{', .'.join(_METADATA)}")
    with open_atomically(path) as file:
        figure.savefig(file, format=ending, dpi=200, metadata={_METADATA[ending]: None})


def sample(label: str, colour: str, marker: str = "", dash: Any = "none", **look: Any) -> Line2D:
    """Return a line or a marker as a sample for a legend."""
    return Line2D([], [], color=colour, marker=marker, linestyle=dash, label=label, **look)


def colour_of(learner: str) -> str:
    """Return the colour that always stands for a learner; grey for one that the paper does not have."""
    return LEARNER_COLOURS.get(learner, GREY)


def expert_colour(expert: int) -> str:
    """Return the colour of an expert; they repeat, so its number stands beside it wherever it matters."""
    return EXPERT_COLOURS[expert % len(EXPERT_COLOURS)]


def ink_on(colour: ColorType) -> str:
    """Return black or white, whichever can be read on a colour."""
    red, green, blue = to_rgb(colour)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def wait_markers(waits: Iterable[int]) -> dict[int, str]:
    """Return a marker for each waiting time: the same for the paper's in all figures, the others in turn."""
    others = iter(_OTHER_MARKERS * 20)
    return {wait: _WAIT_MARKERS.get(wait) or next(others) for wait in sorted(set(waits))}


def shades(count: int) -> list[str]:
    """Return colours from dark to light for that many steps of one quantity."""
    return [to_hex(matplotlib.colormaps["viridis"](0.82 * index / max(count - 1, 1))) for index in range(count)]


def lighter(colour: str, step: int) -> str:
    """Return a colour mixed with white: a little for step 1, more for each further one."""
    share = 1 - 0.72**step
    red, green, blue = (value + (1 - value) * share for value in to_rgb(colour))
    return to_hex((red, green, blue))


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Move places apart, as little as can be, until neighbours are a gap apart: where labels stand."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    clusters: list[tuple[float, int]] = []  # centre, number of labels
    for index in order:
        clusters.append((places[index], 1))
        while len(clusters) > 1:
            (centre, count), (other, more) = clusters[-2:]
            if other - centre >= (count + more) / 2 * gap:
                break
            clusters[-2:] = [((centre * count + other * more) / (count + more), count + more)]
    spaced = [centre + (step - (count - 1) / 2) * gap for centre, count in clusters for step in range(count)]
    return [spaced[order.index(index)] for index in range(len(places))]


def plain(value: float) -> str:
    """Spell a number for a tick: ``0.5``, ``1,000``, ``2×10⁷`` (as mathematics) where that is shorter."""
    return f"{value:,.10g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else scientific(value)


def scientific(value: float) -> str:
    """Spell a number as a power of ten, as mathematics: ``2×10⁷``."""
    power = math.floor(math.log10(abs(value)) + 1e-9)
    digits = f"{value / 10**power:.3g}"
    return f"$10^{{{power}}}$" if digits == "1" else f"${digits}{{\\times}}10^{{{power}}}$"


def show_tflops(values: Sequence[float]) -> Callable[[float], str]:
    """Choose how ticks spell costs: over a wide range, which leaves little room for each, as powers of ten."""
    return scientific if max(values) > 300 * min(values) > 0 else plain


def _set_up(axis: Axis, low: float, high: float, scale: str, locator: Locator, label: Callable[[float], str]) -> None:
    axes = axis.axes
    assert isinstance(axes, Axes)
    letter = "x" if axis is axes.xaxis else "y"
    axes.set(**{f"{letter}scale": scale})
    axes.set(**{f"{letter}lim": (low, high)})
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))


def logarithmic(
    axis: Axis, values: Sequence[float], label: Callable[[float], str] = plain, least_span: float = WIDE
) -> None:
    """Make an axis logarithmic, with limits around the positive finite values and three ticks or more.

    ``label`` spells a tick; ``least_span`` is the smallest factor between both ends.
    """
    shown = [value for value in values if 0 < value < math.inf] or [1.0, WIDE]
    low, high = min(shown), max(shown)
    grow = math.sqrt(max(least_span * low / high, 1.0)) * (max(high / low, least_span)) ** 0.06
    low, high = low / grow, high * grow
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    counts = [sum(low <= step * 10.0**power <= high for power in powers for step in each) for each in _STEPS]
    steps = next((each for each, count in zip(_STEPS, counts, strict=True) if count >= 3), _STEPS[-1])
    even, uneven = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]), LogLocator(subs=steps, numticks=12)
    _set_up(axis, low, high, "log", even if high / low < _EVEN else uneven, label)


def linear(axis: Axis, values: Sequence[float]) -> None:
    """Give an axis limits around the finite ones of the values, and ticks with plain labels."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    room = 0.06 * ((high - low) or abs(high) or 1.0)
    _set_up(axis, low - room, high + room, "linear", MaxNLocator(nbins=6), plain)


def arrival_axis(axis: Axis, arrivals: Sequence[int], end: int, nbins: int) -> None:
    """Name a few arrivals as the tables do, number many."""
    if end <= FEW_ARRIVALS:
        axis.set_ticks(arrivals, [f"$t_{{{arrival}}}$" for arrival in arrivals])
    else:
        axis.set_major_locator(MaxNLocator(nbins=nbins, integer=True))


def gap_in(values: Sequence[float], least: float = 3.0) -> Optional[float]:
    """Return where an axis had better be broken: within the widest gap between positive finite neighbours.

    None where no two are apart by ``least`` as a factor: they have a sensible common axis.
    """
    ordered = sorted(value for value in values if 0 < value < math.inf)
    steps = [(after / before, math.sqrt(after * before)) for before, after in pairwise(ordered)]
    factor, middle = max(steps, default=(1.0, 0.0))
    return middle if factor >= least else None
