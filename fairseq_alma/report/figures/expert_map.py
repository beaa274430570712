"""The map of test images coloured by expert, and the gating tree beside it (v1 of the paper, Figure 8)."""

import re
from typing import Sequence

import numpy
from matplotlib.axes import Axes

from fairseq_alma.report.figures import style
from fairseq_alma.report.figures.gate_tree_plot import draw_tree
from fairseq_alma.report.figures.routed_images import RoutedImages, embed, last_routed_images
from fairseq_alma.report.figures.run_groups import groups_of, names_of
from fairseq_alma.report.figures.style import Drawing
from fairseq_alma.report.run_figures import RunFigures

NAME = "expert-map"
TITLE = "Map of test images by expert"
MOST_MAPS = 2
LAYER = 0
MOST_DIGITS = 10  # classes that have a digit of their own as a marker


def draw(runs: Sequence[RunFigures]) -> list[Drawing]:
    """Draw the map of the last stage of runs that left one; one run of each kind, two kinds at most.

    Raises:
        AlmaError: the file of a run is damaged, or scikit-learn is not installed.
    """
    groups = [group for group in groups_of(runs) if not group.first.is_text]
    drawn: list[Drawing] = []
    for group, name in zip(groups, names_of(groups), strict=True):
        found = [images for run in group.experiment.runs if (images := last_routed_images(run)) is not None][:1]
        if found and len(drawn) < MOST_MAPS:
            slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
            drawn.append(_draw_map(found[0], f"{NAME}-{slug}", name))
    return drawn


def _draw_map(images: RoutedImages, file: str, name: str) -> Drawing:
    figure = style.new_figure(style.FULL_WIDTH, 3.7)
    left, right = figure.subplots(1, 2, width_ratios=[1.35, 1.0])
    experts = images.experts[LAYER]
    _draw_points(left, embed(images.path), images.labels, experts)
    draw_tree(right, images.trees[LAYER], experts, images.labels if _has_digits(images.labels) else None)
    left.set_title(f"t-SNE of {len(experts):,} test images")
    right.set_title(f"gating tree of expert layer {LAYER}")
    marks = "Digits are the classes" if _has_digits(images.labels) else "Each dot is an image"
    caption = (
        f"{name} after arrival t{images.arrival}: t-SNE of {len(experts):,} test images, as the gate of expert layer "
        f"{LAYER} sees them. {marks}, colours the experts that the images go to. Beside it the gating tree: red "
        "squares choose, leaves are experts with their share of the images"
        + (" and the classes that make up a tenth of them or more." if _has_digits(images.labels) else ".")
    )
    return Drawing(file, f"{TITLE}: {name}", caption, figure)


def _has_digits(labels: numpy.ndarray) -> bool:
    return int(labels.max(initial=0)) < MOST_DIGITS


def _draw_points(axes: Axes, places: numpy.ndarray, labels: numpy.ndarray, experts: numpy.ndarray) -> None:
    for expert in numpy.unique(experts):
        for label in numpy.unique(labels):
            chosen = places[(experts == expert) & (labels == label)]
            marker = f"${label}$" if _has_digits(labels) else "."
            axes.plot(
                chosen[:, 0], chosen[:, 1], marker=marker, linestyle="none", color=style.expert_colour(int(expert)),
                markersize=3.6, markeredgewidth=0,
            )  # fmt: skip
    axes.set_axis_off()
    axes.set_aspect("equal", adjustable="datalim")
