"""Maps of experts and of mega-batches.

- test images coloured by expert, and the gating tree beside them (v1 of the paper, Figure 8)
- a row of panels for each experiment: which experts were used, and what is known of each mega-batch
"""

import hashlib
import re
import zipfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence

import msgspec
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree, Nested
from fairseq_alma.report.experiment import Experiment, names_of
from fairseq_alma.report.figures import style
from fairseq_alma.report.figures.style import Drawing
from fairseq_alma.report.read_run import RunTable
from fairseq_alma.report.spelling import said
from fairseq_alma.report.tables import HELD_OUT, TRAINED_ON, Matrix, matrices_of, mean_matrix

FILE = "test-experts.npz"
MOST_MAPS = 2
LAYER = 0
MOST_DIGITS = 10  # classes that have a digit of their own as a marker
MOST_IMAGES = 2000
LEAST_IMAGES = 5  # fewer have no neighbours to speak of
MOST_FEATURES = 50  # t-SNE takes long in more dimensions, and its authors advise to reduce them first
MAIN_CLASS = 0.1  # share of an expert's images from which on a class is named
MOST_LEAVES = 50  # of a tree that a page has room for
MOST_NAMED = 10  # leaves that leave room for what goes to them
REMEDY = "remove it, and the report leaves out the map of this run"

# Maps by the digest of their features. A map takes seconds; runs over the same pixels share one, and a report that is
# drawn again as stages finish need not wait for it.
_maps: dict[str, numpy.ndarray] = {}


@dataclass(frozen=True, eq=False)
class RoutedImages:
    """What the stage of an arrival left of its test in a file.

    Attributes:
        features: of each image, (N, D).
        labels: class of each image, (N,), integers.
        experts: the expert that it went to in each layer, (layers, N), integers.
        trees: the gate of each layer.
    """

    path: Path
    arrival: int
    features: numpy.ndarray
    labels: numpy.ndarray
    experts: numpy.ndarray
    trees: tuple[GateTree, ...]


def draw(runs: RunTable, groups: Sequence[Experiment], paper: bool = False) -> list[Drawing]:
    """Draw the map of the last stage of runs that left one; one run of each experiment, two maps at most.

    Raises:
        AlmaError: the file of a run is damaged, or scikit-learn is not installed.
    """
    mixtures = [group for group in groups if not group.first.is_text]
    drawn: list[Drawing] = []
    for group, name in zip(mixtures, names_of(mixtures), strict=True):
        found = next((images for run in group.runs.index for images in routed_images(group, run)), None)
        if found is not None and len(drawn) < MOST_MAPS:
            slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
            drawn.append(_draw_map(found, f"expert-map-{slug}", name))
    return drawn


def _draw_map(images: RoutedImages, file: str, name: str) -> Drawing:
    figure = style.new_figure(style.FULL_WIDTH, 3.7)
    left, right = figure.subplots(1, 2, width_ratios=[1.35, 1.0])
    experts, labels = images.experts[LAYER], images.labels
    has_digits = int(labels.max(initial=0)) < MOST_DIGITS
    draw_places(left, images)
    draw_tree(right, images.trees[LAYER], experts, labels if has_digits else None)
    left.set_title(f"t-SNE of {len(experts):,} test images")
    right.set_title(f"gating tree of expert layer {LAYER}")
    facts = {"arrival": images.arrival, "num_images": len(experts), "layer": LAYER, "has_digits": has_digits}
    return Drawing(file, *said("expert-map", name=name, **facts), figure)


def draw_places(axes: Axes, images: RoutedImages) -> None:
    """Draw the map: each image at its place, with its class as the marker and its expert as the colour."""
    experts, labels, places = images.experts[LAYER], images.labels, embed(images)
    has_digits = int(labels.max(initial=0)) < MOST_DIGITS
    for expert in numpy.unique(experts):
        for label in numpy.unique(labels):
            chosen = places[(experts == expert) & (labels == label)]
            axes.plot(
                chosen[:, 0], chosen[:, 1], marker=f"${label}$" if has_digits else ".", linestyle="none",
                color=style.expert_colour(int(expert)), markersize=3.6, markeredgewidth=0,
            )  # fmt: skip
    axes.set_axis_off()
    axes.set_aspect("equal", adjustable="datalim")


def routed_images(group: Experiment, run: int) -> Iterator[RoutedImages]:
    """Read what a run's complete stages that left such a file say, the last one first.

    Raises:
        AlmaError: the file is damaged, or does not fit its stage.json.
    """
    done = group.arrivals[(group.arrivals.run == run) & group.arrivals.done & group.arrivals.planned]
    for stage in done[::-1].itertuples():
        path = group.runs.path[run] / f"stage-{int(stage.stage):03d}" / FILE
        if path.is_file():
            features, labels, experts = _read(path)
            trees = _trees(stage.gate_trees, int(stage.num_experts), path, experts)
            yield RoutedImages(path, stage.arrival, features, labels, experts, trees)


def _read(path: Path) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Return features (N, D), labels (N,) and experts (layers, N) of at most that many images."""
    try:
        with numpy.load(path, allow_pickle=False) as file:
            features, labels, experts = (file[name] for name in ("features", "labels", "expert"))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise AlmaError(f"{path}: damaged ({error}); {REMEDY}") from error
    sizes = len(features), *labels.shape, *experts.shape[1:]
    fits = features.ndim == 2 and experts.ndim == 2 and labels.ndim == 1 and len(set(sizes)) == 1 and sizes[0] > 0
    if not fits or not numpy.isfinite(features).all():
        raise AlmaError(
            f"{path}: features {features.shape}, labels {labels.shape} and expert {experts.shape} do not belong "
            f"together, or are not finite; {REMEDY}"
        )
    return features[:MOST_IMAGES], labels[:MOST_IMAGES].astype(int), experts[:, :MOST_IMAGES].astype(int)


def _trees(nested: object, num_experts: int, path: Path, experts: numpy.ndarray) -> tuple[GateTree, ...]:
    """Return the gate of each layer from stage.json; flat ones where it says nothing."""
    if nested is None or nested != nested:
        return tuple(GateTree.flat(max(int(each.max()) + 1, num_experts)) for each in experts)
    record = path.with_name("stage.json")
    try:
        trees = tuple(GateTree.from_nested(each) for each in nested)  # type: ignore[attr-defined]
    except (TypeError, AlmaError) as error:
        raise AlmaError(
            f"{record}: gate_trees is damaged ({error}); remove {path.name} beside it, and the report leaves out the "
            "map of this run"
        ) from error
    if len(trees) != len(experts) or any(
        int(each.max()) >= tree.num_experts for tree, each in zip(trees, experts, strict=True)
    ):
        raise AlmaError(f"{path}: its experts do not belong to the gate_trees in {record}; {REMEDY}")
    return trees


def embed(images: RoutedImages) -> numpy.ndarray:
    """Return the place of each image on a map by t-SNE, (N, 2); the same features give the same map.

    Raises:
        AlmaError: scikit-learn is not installed.
    """
    digest = hashlib.sha256(images.features.tobytes()).hexdigest()
    try:
        _maps[digest] = _maps[digest] if digest in _maps else _embed(images.features)
    except ModuleNotFoundError as error:
        raise AlmaError(
            f"{images.path}: its map needs {error.name}, which is not installed; pip install 'fairseq-alma[report]' "
            "brings it"
        ) from error
    return _maps[digest]


def _embed(features: numpy.ndarray) -> numpy.ndarray:
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    num_images, num_features = features.shape
    if num_images < LEAST_IMAGES:
        return numpy.pad(features, ((0, 0), (0, 2)))[:, :2]
    if num_features > MOST_FEATURES and num_images > MOST_FEATURES:
        features = PCA(MOST_FEATURES, random_state=0).fit_transform(features)
    start = "pca" if num_features > 1 else "random"
    perplexity = min(30.0, (num_images - 1) / 3)
    return TSNE(init=start, perplexity=perplexity, max_iter=500, random_state=0).fit_transform(features)


def draw_tree(axes: Axes, tree: GateTree, experts: numpy.ndarray, labels: Optional[numpy.ndarray]) -> None:
    """Draw a tree with its root on top: choices as red squares, experts as leaves, with what goes to them.

    ``experts`` and ``labels`` are those of each image, (N,), integers; without labels no classes are named.
    """
    axes.set_axis_off()
    if tree.num_experts > MOST_LEAVES:
        axes.text(0.5, 0.5, f"{tree.num_experts} experts:\ntoo many to draw", ha="center", transform=axes.transAxes)
        return
    leaves: dict[int, int] = {}  # expert: level, from left to right
    _draw_choice(axes, _without_single_children(tree.to_nested()), 0, leaves)
    for column, (expert, level) in enumerate(leaves.items()):
        colour = style.expert_colour(expert)
        axes.plot([column], [-level], marker="o", markersize=13, color=colour, zorder=2)
        ink = style.ink_on(colour)
        axes.text(column, -level, str(expert), ha="center", va="center", fontsize=7, color=ink, zorder=3)
        if len(leaves) <= MOST_NAMED:
            axes.annotate(
                _describe(experts == expert, labels), (column, -level), xytext=(0, -10), textcoords="offset points",
                ha="center", va="top", fontsize=6.5, linespacing=1.25,
            )  # fmt: skip
    axes.set(xlim=(-0.6, len(leaves) - 0.4), ylim=(-max(leaves.values()) - 0.95, 0.3))


def _draw_choice(axes: Axes, nested: Nested, level: int, leaves: dict[int, int]) -> float:
    """Draw a choice with all below it and return its column; note a leaf and return the column alone."""
    if isinstance(nested, int):
        leaves[nested] = level
        return len(leaves) - 1.0
    below = [_draw_choice(axes, child, level + 1, leaves) for child in nested]
    middle = (min(below) + max(below)) / 2
    for column in below:
        axes.plot([middle, column], [-level, -level - 1], color=style.TREE, linewidth=1.2, zorder=1)
    axes.plot([middle], [-level], marker="s", color=style.TREE, markersize=6, zorder=2)
    return middle


def _describe(own: numpy.ndarray, labels: Optional[numpy.ndarray]) -> str:
    """Spell what goes to a leaf: its share of the images, and the main classes among them, three in a line."""
    lines = [f"{100 * own.mean():.0f} %"]
    if labels is not None and own.any():
        classes, counts = numpy.unique(labels[own], return_counts=True)
        main = [str(label) for label, count in zip(classes, counts, strict=True) if count >= MAIN_CLASS * own.sum()]
        lines += [" ".join(main[start : start + 3]) for start in range(0, len(main), 3)]
    return "\n".join(lines)


def _without_single_children(nested: Nested) -> Nested:
    """Leave out choices that have nothing to choose: a gate that began with one expert has one as its root."""
    if isinstance(nested, int):
        return nested
    if len(nested) == 1 and isinstance(nested[0], list):
        return _without_single_children(nested[0])
    return [_without_single_children(child) for child in nested]


MOST_RUNS = 4
MOST_LAYERS = 6
MOST_STEPS = 100  # updates that a panel has room for
LEAST_LABELLED = 0.06  # of all
MOST_NUMBERS = 8  # mega-batches: beyond, numbers would not fit into the fields


def _rows(
    shown: Sequence[Experiment], columns: int, size: tuple[float, float], **sharing: bool
) -> tuple[Figure, list[numpy.ndarray], list[str]]:
    """Return a figure that is so wide and each of whose rows is so high (inches), their axes, and the names."""
    figure, names = style.new_figure(size[0], size[1] * len(shown) + 0.5), names_of(shown)
    lines = []
    for part, name in zip(figure.subfigures(len(shown), 1, squeeze=False)[:, 0], names, strict=True):
        lines.append(part.subplots(1, columns, squeeze=False, sharey=True, **sharing)[0])
        if len(shown) > 1:
            part.suptitle(name, fontsize=8.5, weight="bold")
    return figure, lines, names


def draw_usage(runs: RunTable, groups: Sequence[Experiment], paper: bool = False) -> list[Drawing]:
    """Draw the shares of the test set that each expert predicts, for four experiments at most.

    Those come first that grow, then those that update most often.

    Raises:
        AlmaError: what a run says of its experts is damaged; names the run.
    """
    usages = {group: usage for group in groups if (usage := _usage(group))}
    ordered = sorted(
        usages, key=lambda group: (group.first.min_experts == group.first.max_experts, -group.course.done.sum())
    )
    shown = ordered[:MOST_RUNS]
    if not shown:
        return []
    columns = min(max(len(layers) for group in shown for layers in usages[group].values()), MOST_LAYERS)
    figure, lines, names = _rows(shown, columns, (max(0.8 + 1.7 * columns, 3.4), 1.7), sharex=True)
    for line, group in zip(lines, shown, strict=True):
        for layer, axes in enumerate(line):
            found = {t: layers[layer] for t, layers in usages[group].items() if layer < len(layers) and layers[layer]}
            if found:
                _draw_layer(axes, found, group.first.num_known)
                axes.set_title(f"layer {layer}")
            else:
                axes.set_axis_off()
        line[0].set_ylabel("share of test set (%)")
    for axes in lines[-1]:
        axes.set_xlabel("arrival (mega-batch)")
    texts = said("expert-usage", names=names, more=len(ordered) - len(shown))
    return [Drawing("expert-usage", *texts, figure)]


def _usage(group: Experiment) -> Mapping[int, list[list[float]]]:
    """Return the shares of each layer's experts by arrival, where some layer has more than one expert."""
    run, rows = group.first, group.arrivals.set_index("arrival")
    told = rows[(rows.run == run.Index) & rows.expert_usage.notna() & (rows.index < run.num_known)]
    usage: dict[int, Any] = told.expert_usage.to_dict()
    for arrival, layers in usage.items():
        try:
            usage[arrival] = msgspec.convert(layers, list[list[float]])
        except msgspec.ValidationError as error:
            raise AlmaError(
                f"{run.path}: expert_usage after arrival t{arrival} is damaged: {str(layers)[:60]} is no list of "
                "shares for each layer; remove it from that stage.json, and the usage of experts is drawn again"
            ) from error
    return usage if any(len(shares) > 1 for layers in usage.values() for shares in layers) else {}


def _draw_layer(axes: Axes, shares: Mapping[int, Sequence[float]], num_arrivals: int) -> None:
    """Draw areas of shares above each other; each holds until the next update. Experts are numbered at the end."""
    arrivals = sorted(shares)
    arrivals = [*arrivals[: -1 : 1 + len(arrivals) // MOST_STEPS], arrivals[-1]]
    places = numpy.array([*arrivals, num_arrivals])
    table = numpy.zeros((len(places), max(len(each) for each in shares.values())))
    for row, arrival in enumerate([*arrivals, arrivals[-1]]):
        table[row, : len(shares[arrival])] = shares[arrival]
    tops = 100 * table.cumsum(axis=1)
    for expert, (below, top) in enumerate(pairwise(numpy.pad(tops, ((0, 0), (1, 0))).T)):
        axes.fill_between(places, below, top, step="post", color=style.expert_colour(expert), linewidth=0)
        axes.step(places, top, where="post", color="white", linewidth=0.5 if len(arrivals) <= 30 else 0.25)
        if table[-1, expert] >= LEAST_LABELLED:
            axes.annotate(
                str(expert), (num_arrivals, (below[-1] + top[-1]) / 2), xytext=(2, 0), textcoords="offset points",
                fontsize=6.5, va="center", annotation_clip=False,
            )  # fmt: skip
    axes.set(xlim=(arrivals[0], num_arrivals), ylim=(0, 100), yticks=range(0, 101, 25))
    axes.grid(False)
    style.arrival_axis(axes.xaxis, arrivals, num_arrivals, 4)


def draw_matrix(runs: RunTable, groups: Sequence[Experiment], paper: bool = False) -> list[Drawing]:
    """Draw heat maps of the losses on slices of each mega-batch after each arrival, four experiments at most."""
    found = {each: matrices for each in groups if (matrices := matrices_of(each))}
    shown = list(found)[:MOST_RUNS]
    if not shown:
        return []
    figure, lines, names = _rows(shown, 3, (7.2, 2.1))
    for line, each in zip(lines, shown, strict=True):
        held_out, training = (mean_matrix(found[each], slices) for slices in (HELD_OUT, TRAINED_ON))
        gap = {arrival: held_out[arrival] - training[arrival] for arrival in held_out}
        losses = [*held_out.values(), *training.values()]
        limits = min(loss.min() for loss in losses), max(loss.max() for loss in losses)
        _draw_losses(line[0], held_out, "held out", limits, "viridis_r")
        _draw_losses(line[1], training, "trained on", limits, "viridis_r")
        most = max(abs(losses).max() for losses in gap.values()) or 1.0
        _draw_losses(line[2], gap, "difference: memorised", (-most, most), "RdBu_r")
        line[0].set_ylabel("after arrival")
    return [Drawing("matrix", *said("matrix-map", names=names, more=len(found) - len(shown)), figure)]


def _draw_losses(axes: Axes, matrix: Matrix, title: str, limits: tuple[float, float], colours: str) -> None:
    arrivals = sorted(matrix)
    table = numpy.array([matrix[arrival] for arrival in arrivals])
    image = axes.imshow(table, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto")
    axes.set(title=title, xlabel="mega-batch")
    axes.set_yticks(range(len(arrivals)), [f"t{arrival}" for arrival in arrivals])
    axes.grid(False)
    for row, arrival in enumerate(arrivals):  # steps: what is left of them has arrived
        axes.plot([arrival + 0.5] * 2, [row - 0.5, row + 0.5], color="white", linewidth=1.2)
    if table.shape[1] <= MOST_NUMBERS:
        for (row, column), loss in numpy.ndenumerate(table):
            red, green, blue, _ = image.cmap(image.norm(loss))
            ink = style.ink_on((red, green, blue))
            axes.text(column, row, f"{loss:.2f}", ha="center", va="center", fontsize=6, color=ink)
    axes.set_xlim(-0.5, table.shape[1] - 0.5)
    axes.set_xticks(range(0, table.shape[1], max(1, table.shape[1] // MOST_NUMBERS)))
