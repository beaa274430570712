"""Draw the maps of test images by expert after the first growth steps of one run side by side (v1, Figure 8).

    python recipes/vision/growth_map.py RUN --out FILE.png

RUN is of gmoe on images, made with --keep-checkpoints; recipes/vision/growth_map.sh makes one.
"""

import argparse
from pathlib import Path

from fairseq_alma.report.experiment import experiments
from fairseq_alma.report.figures import style
from fairseq_alma.report.figures.maps import LAYER, draw_places, draw_tree, routed_images
from fairseq_alma.report.read_run import RunTable, read_run


def main() -> None:
    """Read the options and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="a picture, .png, .pdf or .svg")
    parser.add_argument("--most", type=int, default=4, help="stages to draw, from the first (default: %(default)s)")
    args = parser.parse_args()
    (group,) = experiments(RunTable.of([read_run(args.run)]))
    stages = [*routed_images(group, group.runs.index[0])][::-1][: args.most]
    if not stages:
        parser.error(f"{args.run}: no stage left a map; run gmoe with --keep-checkpoints")
    with style.drawn(args.out, 2.4 * len(stages), 4.2) as figure:
        for column, images in enumerate(stages):
            above, below = (figure.add_subplot(2, len(stages), row * len(stages) + column + 1) for row in (0, 1))
            draw_places(above, images)
            draw_tree(below, images.trees[LAYER], images.experts[LAYER], images.labels)
            above.set_title(f"t{images.arrival}: {images.trees[LAYER].num_experts} experts")


if __name__ == "__main__":
    main()
