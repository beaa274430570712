"""Draw the papers' figures that alma-report does not draw, from run folders.

    python recipes/paper_figures.py runs/mnist/*/seed-1 --out figures
    python recipes/paper_figures.py runs/mnist-4/gmoe-*/seed-1 --out figures --stream runs/mnist-4/stream-seed1

- map-STAGE: t-SNE of test images, coloured by expert, and the gating tree (v1, Figure 8), for the first gmoe run
  on images that used --keep-checkpoints
- usage: share of the test images that each expert predicts, after each arrival
- radar: result, memory and compute of complete runs, each divided by the largest (v1, Figure 3)
- replay: error or perplexity against training FLOPs, without and with replay (v5, Figures 4 and 8)
- experts: average perplexity against experts, here and in the paper's Table 2 (v5, Figure 5 right)

The script skips a figure if the runs lack the data for it. Requires pip install 'fairseq-alma[report]'. A map takes
seconds.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.errors import AlmaError
from fairseq_alma.report.figures import STYLE, Drawing, line_styles, write
from fairseq_alma.report.read_run import Experiment, RecordedRun, experiments, load_run
from fairseq_alma.terminal import command

# ``expert``: (layers, n), the expert of each of the first n test images; written with --keep-checkpoints.
EXPERTS_FILE = "test-experts.npz"
COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#888888", "#882255", "#332288",
    "#999933", "#8C510A",
)  # fmt: skip
MOST_STAGES, MOST_LEAVES = 4, 20
MAIN_CLASS = 0.1  # Minimum share of a leaf's images for a class to be named at the leaf.


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    """Draw the figures of the given runs and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder that alma-stream wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the figures (.png, .pdf)")
    parser.add_argument("--stream", type=Path, metavar="DIR", help="stream of images (default: the stream of the run)")
    args = parser.parse_args(argv)
    runs = [load_run(path) for path in args.runs]
    if len({run.is_text for run in runs}) > 1:
        parser.error("RUN: expected runs on text or runs on images, found both")
    groups = experiments(runs)
    with matplotlib.rc_context({**STYLE, "text.parse_math": True}):  # for markers that are numbers
        drawings = [
            *draw_maps(runs, args.stream),
            draw_usage(runs),
            draw_radar(groups),
            draw_replay(groups),
            draw_experts(groups),
        ]
        for drawing in drawings:
            if drawing is not None:
                print(write(drawing, args.out)["png"])


def stage_folders(run: RecordedRun) -> list[Path]:
    """Return the folders of the complete stages."""
    return [run.path / f"stage-{int(stage):03d}" for stage in run.done.stage]


def draw_maps(runs: Sequence[RecordedRun], stream: Optional[Path]) -> Iterator[Drawing]:
    """Draw the experts of test images after each of the first stages, for the first run that recorded them."""
    run = next((run for run in runs if any((folder / EXPERTS_FILE).is_file() for folder in stage_folders(run))), None)
    if run is None:
        return
    path = stream or Path(run.stream["path"])
    images = ImageStream.open(path)
    if images.stream.fingerprint != run.stream["fingerprint"]:
        raise AlmaError(f"--stream {path}: not the stream of {run.path}; give the stream that the run trained on")
    places = None
    for folder in [folder for folder in stage_folders(run) if (folder / EXPERTS_FILE).is_file()][:MOST_STAGES]:
        with np.load(folder / EXPERTS_FILE, allow_pickle=False) as file:
            experts = file["expert"][0]
        chosen = images.indices("test")[: len(experts)]
        if places is None:
            places = embed(images.images[chosen].reshape(len(chosen), -1) / 255.0)
        nested = json.loads((folder / "stage.json").read_text()).get("gate_trees")
        tree = nested[0] if nested else [*range(int(experts.max()) + 1)]
        yield draw_map(folder.name, places, experts, images.labels[chosen], tree)


def embed(features: np.ndarray) -> np.ndarray:
    """Return the place of each of N images on a map, (N, 2), by t-SNE after PCA; features are (N, D)."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    if min(features.shape) > 50:
        features = PCA(50, random_state=0).fit_transform(features)
    perplexity = min(30.0, (len(features) - 1) / 3)
    places: np.ndarray = TSNE(init="pca", perplexity=perplexity, max_iter=500, random_state=0).fit_transform(features)
    return places


def draw_map(stage: str, places: np.ndarray, experts: np.ndarray, labels: np.ndarray, tree: list[Any]) -> Drawing:
    """Draw the map of N images, (N, 2), by expert and class, and the gating tree of the first layer."""
    figure = Figure(figsize=(6.8, 3.7), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.35, 1.0])
    for expert in np.unique(experts):
        for label in np.unique(labels):
            chosen = places[(experts == expert) & (labels == label)]
            marker = f"${label}$" if labels.max() < 10 else "."
            left.plot(
                *chosen.T, marker=marker, linestyle="none", color=colour(expert), markersize=3.6, markeredgewidth=0
            )
    left.set_axis_off()
    left.set_title(f"t-SNE of {len(experts):,} test images")
    leaves: dict[int, int] = {}
    right.set_axis_off()
    draw_choice(right, without_single_children(tree), 0, leaves)
    for column, (expert, level) in enumerate(list(leaves.items())[:MOST_LEAVES]):
        right.plot([column], [-level], "o", markersize=13, color=colour(expert), zorder=2)
        right.text(column, -level, str(expert), ha="center", va="center", fontsize=7, color="white", zorder=3)
        right.text(
            column, -level - 0.25, describe(labels[experts == expert], len(labels)), ha="center", va="top", fontsize=6.5
        )
    right.set(
        xlim=(-0.6, len(leaves) - 0.4), ylim=(-max(leaves.values()) - 1, 0.3), title="gating tree of the first layer"
    )
    return Drawing(f"map-{stage}", "Experts of test images", "", figure)


def colour(expert: int) -> str:
    """Return the colour of an expert; colours repeat."""
    return COLOURS[int(expert) % len(COLOURS)]


def draw_choice(axes: Axes, nested: Any, level: int, leaves: dict[int, int]) -> float:
    """Draw a gate node and the subtree below it; only record a leaf, with its level. Return the column of the node."""
    if isinstance(nested, int):
        leaves[nested] = level
        return len(leaves) - 1.0
    below = [draw_choice(axes, child, level + 1, leaves) for child in nested]
    middle = (min(below) + max(below)) / 2
    for column in below:
        axes.plot([middle, column], [-level, -level - 1], color="#B2182B", linewidth=1.2, zorder=1)
    axes.plot([middle], [-level], "s", color="#B2182B", markersize=6, zorder=2)
    return middle


def without_single_children(nested: Any) -> Any:
    """Remove gate nodes with a single child; a gate that began with one expert has such a node at the root."""
    if isinstance(nested, int):
        return nested
    if len(nested) == 1 and isinstance(nested[0], list):
        return without_single_children(nested[0])
    return [without_single_children(child) for child in nested]


def describe(labels: np.ndarray, total: int) -> str:
    """Return a leaf's share of all images and its main classes, three in a line."""
    classes, counts = np.unique(labels, return_counts=True)
    main = [str(each) for each, count in zip(classes, counts, strict=True) if count >= MAIN_CLASS * len(labels)]
    rows = [" ".join(main[start : start + 3]) for start in range(0, len(main), 3)]
    return "\n".join([f"{100 * len(labels) / total:.0f} %", *rows])


def draw_usage(runs: Sequence[RecordedRun]) -> Optional[Drawing]:
    """Draw the share of test images that each expert predicts in the first gmoe run, with one panel for each layer."""
    for run in runs:
        usage = {
            int(arrival): shares
            for arrival, folder in zip(run.done.index, stage_folders(run), strict=True)
            if (shares := json.loads((folder / "stage.json").read_text()).get("expert_usage"))
        }
        if any(len(shares) > 1 for layers in usage.values() for shares in layers):
            break
    else:
        return None
    num_layers = max(map(len, usage.values()))
    figure = Figure(figsize=(1 + 2 * num_layers, 2.2), layout="constrained")
    for layer, axes in enumerate(figure.subplots(1, num_layers, squeeze=False, sharey=True)[0]):
        most = max(len(layers[layer]) for layers in usage.values())
        table = np.zeros((len(usage), most + 1))
        for row, layers in enumerate(usage.values()):
            table[row, 1 : len(layers[layer]) + 1] = layers[layer]
        tops = 100 * table.cumsum(axis=1)
        for expert in range(most):
            axes.fill_between(
                [*usage], tops[:, expert], tops[:, expert + 1], step="post", color=colour(expert), linewidth=0
            )
        axes.set(title=f"layer {layer}", xlabel="arrival (mega-batch)", ylim=(0, 100))
    figure.axes[0].set_ylabel("share of test images (%)")
    return Drawing("usage", "Use of experts", "", figure)


def draw_radar(groups: Sequence[Experiment]) -> Optional[Drawing]:
    """Draw result, memory, training and test compute of complete runs; smaller is better."""
    complete = [each for each in groups if each.is_complete]
    if len(complete) < 2:
        return None
    is_text = complete[0].first.is_text
    names = ["log avg PPL" if is_text else "CER", "Mem", "training\nFLOPs", "test\nFLOPs"]
    table = np.array([costs(each) for each in complete])
    shares = table / table.max(axis=0)
    angles = np.linspace(0, 2 * np.pi, len(names), endpoint=False)
    figure = Figure(figsize=(5.4, 3.2), layout="constrained")
    axes: Any = figure.subplots(subplot_kw={"projection": "polar"})
    for each, share, look in zip(complete, shares, line_styles(complete), strict=True):
        axes.plot([*angles, 0], [*share, share[0]], markersize=3, label=each.name, **look)
    axes.set_theta_zero_location("N")
    axes.set_rlim(-0.12, 1.04)
    axes.set_rgrids((0.25, 0.5, 0.75, 1.0), [])
    axes.set_thetagrids(np.degrees(angles), names)
    figure.legend(loc="outside right upper")
    return Drawing("radar", "Result and cost", "", figure)


def costs(each: Experiment) -> list[float]:
    """Return log average perplexity or CER, Mem, Comp and test FLOPs, as means over seeds."""
    runs = [run for run in each.runs if run.is_complete]
    over = np.mean([run.over_stream for run in runs])
    rows = [(run.memory, run.done.train_flops.sum(), run.done.test_flops.iloc[-1]) for run in runs]
    return [math.log(over) if each.first.is_text else over, *np.mean(rows, axis=0)]


def draw_replay(groups: Sequence[Experiment]) -> Optional[Drawing]:
    """Draw a segment from each learner without replay (full marker) to the same learner with replay (hollow marker)."""

    def key(each: Experiment) -> str:
        kept = {name: value for name, value in each.first.settings.items() if name != "--replay"}
        return f"{each.first.record['learner']} {sorted(kept.items())}"

    complete = [each for each in groups if each.is_complete]
    without = {key(each): each for each in complete if not each.first.options["replay"]}
    pairs = [(without[key(e)], e) for e in complete if e.first.options["replay"] and key(e) in without]
    if not pairs:
        return None
    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axes = figure.subplots()
    for pair, look in zip(pairs, line_styles([first for first, _ in pairs]), strict=True):
        xs = [costs(each)[2] for each in pair]
        ys = [np.mean([run.over_stream for run in each.runs if run.is_complete]) for each in pair]
        axes.plot(xs, ys, color=look["color"], linewidth=0.9)
        axes.plot(xs[:1], ys[:1], look["marker"], color=look["color"], label=pair[0].name)
        axes.plot(xs[1:], ys[1:], look["marker"], color=look["color"], markerfacecolor="white")
    axes.set(
        xscale="log",
        xlabel="training FLOPs",
        ylabel="average PPL" if pairs[0][0].first.is_text else "CER (percentage points)",
    )
    figure.legend(loc="outside right upper")
    return Drawing("replay", "Replay", "", figure)


def draw_experts(groups: Sequence[Experiment]) -> Optional[Drawing]:
    """Draw average perplexity against the number of experts in all models, next to the paper's base models."""
    complete = [each for each in groups if each.is_complete and each.first.is_text]
    if len({float(each.course.experts.iloc[-1]) for each in complete}) < 2:
        return None
    figure = Figure(figsize=(6.8, 3.2), layout="constrained")
    ours, theirs = figure.subplots(1, 2)
    for each, look in zip(complete, line_styles(complete), strict=True):
        course = each.course[each.course.experts.notna()]
        ours.plot(course.experts, course.average, label=each.name, **look)
    for row in json.loads((Path(__file__).parent / "records/paper_tables.json").read_text())["table2"]:
        if row["size"] == "base" and None not in row["ppl"]:
            stages = [math.prod(map(int, part.split("@"))) for part in row["experts"].split(", ")]
            average = np.cumsum(row["ppl"]) / np.arange(1, 5)
            theirs.plot(
                stages if len(stages) > 1 else stages * 4, average, "o-", label=f"{row['learner']} {row['experts']}"
            )
    theirs.legend(fontsize=6)
    for axes, title in ((ours, "these runs"), (theirs, "the paper, base")):
        axes.set(title=title, xlabel="experts in a layer, over all models", ylabel="average test perplexity")
    figure.legend(*ours.get_legend_handles_labels(), loc="outside right upper")
    return Drawing("experts", "Number of experts", "", figure)


if __name__ == "__main__":
    sys.exit(main(None))
