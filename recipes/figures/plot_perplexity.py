"""Draw test perplexity after each arrival, one line per run: the picture of the README.

    python recipes/figures/plot_perplexity.py runs/sm-w1 runs/sm-w2 --out perplexity.svg

While a learner waits, the model of its last update counts, so a line is a staircase.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from fairseq_alma.report.read_run import read_figures

# Okabe and Ito's colours, which colour-blind readers can tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def main() -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", required=True, type=Path, help="file to write; its ending decides the format")
    parser.add_argument("--title", default="", help="title of the figure")
    args = parser.parse_args()

    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    num_arrivals = 1
    for colour, path in zip(COLOURS * len(args.runs), args.runs, strict=False):
        run = read_figures(path)
        num_arrivals = max(num_arrivals, run.num_arrivals)
        arrivals = sorted(run.value)
        values = [run.value[arrival] for arrival in arrivals]
        steps = [*arrivals, run.num_arrivals - 1 + 0.5]
        axes.step(steps, [*values, values[-1]], where="post", color=colour, label=run.label)
        axes.plot(arrivals, values, "o", color=colour)
    axes.set_xticks(range(num_arrivals), [f"$t_{arrival}$" for arrival in range(num_arrivals)])
    axes.set_xlabel("arrivals (mega-batches)")
    axes.set_ylabel("test perplexity")
    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.grid(True, which="both", alpha=0.25)
    axes.set_title(args.title)
    axes.legend()
    plt.rcParams["svg.hashsalt"] = "fairseq_alma"  # the same figure is the same file
    figure.savefig(args.out, metadata={"Date": None} if args.out.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
