"""How all figures look: colours, markers, sizes, number formats, and how they become files.

Colours are those of Okabe and Ito (2008), which colour-blind readers can tell apart, with two more for learners that
only images have. A colour always means a learner, a marker a waiting time; nothing is told by colour
alone where two learners may stand in one panel.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from fairseq_alma.atomic_file import open_atomically

LEARNER_COLOURS = {
    "sm": "#0072B2",
    "ens": "#D55E00",
    "gens": "#E69F00",
    "gmoe": "#CC79A7",
    "umix": "#009E73",
    "moe": "#56B4E9",
    "bagging": "#882255",
    "firefly": "#333333",
}
EXPERT_COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#888888", "#882255", "#332288",
    "#999933", "#8C510A",
)  # fmt: skip
GREY = "#666666"
TREE = "#B2182B"
IID_MARKER = "*"
_WAIT_MARKERS = {1: "o", 2: "s", 3: "^", 4: "D", 5: "v", 10: "P", 25: "X", 50: "<", 100: ">", 500: "h"}
_OTHER_MARKERS = ("p", "d", "8", "H", "$\\mathbf{w}$")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))

FULL_WIDTH = 6.8  # inches: the text width of a page
PANEL = (2.3, 2.0)  # inches of a panel among several, without what stands around it

_SETTINGS = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so figures look the same everywhere
    "font.size": 8.5,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.5,
    "legend.title_fontsize": 7.5,
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
_METADATA: Mapping[str, Mapping[str, None]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
}


@dataclass(frozen=True)
class Drawing:
    """A figure that was drawn but not written yet; see `figure_files.FigureFile`."""

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


def save(figure: Figure, stem: Path) -> tuple[Path, Path, Path]:
    """Write a figure as PNG, PDF and SVG and return the three paths.

    Each file appears at once and whole, so that a page that is open meanwhile never shows half of one.
    """
    figure.draw_without_rendering()  # lays it out; once is enough for three files
    figure.set_layout_engine("none")
    paths = []
    for ending, metadata in _METADATA.items():
        path = stem.with_name(f"{stem.name}.{ending}")
        with open_atomically(path) as file:
            figure.savefig(file, format=ending, dpi=200, metadata=dict(metadata))
        paths.append(path)
    return paths[0], paths[1], paths[2]


def colour_of(learner: str) -> str:
    """Return the colour that always stands for a learner; grey for one that the paper does not have."""
    return LEARNER_COLOURS.get(learner, GREY)


def expert_colour(expert: int) -> str:
    """Return the colour of an expert; they repeat, so its number stands beside it wherever it matters."""
    return EXPERT_COLOURS[expert % len(EXPERT_COLOURS)]


def ink_on(colour: str) -> str:
    """Return black or white, whichever can be read on a colour."""
    red, green, blue = to_rgb(colour)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def wait_markers(waits: Iterable[int]) -> dict[int, str]:
    """Return a marker for each waiting time: the same for the paper's in all figures, the others in turn."""
    others = iter(_OTHER_MARKERS * 20)
    return {wait: _WAIT_MARKERS.get(wait) or next(others) for wait in sorted(set(waits))}


def shades(count: int) -> list[str]:
    """Return colours from dark to light for that many steps of one quantity."""
    scale = matplotlib.colormaps["viridis"]
    return [to_hex(scale(0.82 * index / max(count - 1, 1))) for index in range(count)]


def lighter(colour: str, step: int) -> str:
    """Return a colour mixed with white: a little for step 1, more for each further one."""
    share = 1 - 0.72**step
    red, green, blue = (value + (1 - value) * share for value in to_rgb(colour))
    return to_hex((red, green, blue))


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Move places apart, as little as can be, until neighbours are a gap apart: where labels stand.

    Args:
        places: wanted places, in any order.
        gap: smallest distance that labels need, in the same unit.
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    clusters: list[list[float]] = []  # centre, number of labels
    for index in order:
        clusters.append([places[index], 1])
        while len(clusters) > 1 and _overlap(clusters[-2], clusters[-1], gap):
            (centre, count), (other, more) = clusters.pop(-2), clusters.pop()
            clusters.append([(centre * count + other * more) / (count + more), count + more])
    spaced = [centre + (step - (count - 1) / 2) * gap for centre, count in clusters for step in range(int(count))]
    return [spaced[order.index(index)] for index in range(len(places))]


def _overlap(lower: Sequence[float], upper: Sequence[float], gap: float) -> bool:
    return upper[0] - lower[0] < (lower[1] + upper[1]) / 2 * gap


def hide(axes: Axes) -> None:
    """Leave the place of a panel empty, but for a legend that hangs on it."""
    axes.set_axis_off()
