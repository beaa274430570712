"""Test images and the experts that they went to, as a run leaves them, and their places on a map."""

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy

from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.report.run_figures import RunFigures

FILE = "test-experts.npz"
TREES = "gate_trees"
MOST_IMAGES = 2000
LEAST_IMAGES = 5  # fewer have no neighbours to speak of
MOST_FEATURES = 50  # t-SNE takes long in more dimensions, and its authors advise to reduce them first

# Maps by the digest of their features. A map takes seconds; runs over the same pixels share one, and a report that is
# drawn again as stages finish need not wait for it.
_maps: dict[str, numpy.ndarray] = {}


@dataclass(frozen=True)
class RoutedImages:
    """What a stage left of its test.

    Attributes:
        path: of the file.
        arrival: of the stage.
        labels: class of each image, (N,), integers.
        experts: the expert that it went to in each layer, (layers, N), integers.
        trees: the gate of each layer.
    """

    path: Path
    arrival: int
    labels: numpy.ndarray
    experts: numpy.ndarray
    trees: tuple[GateTree, ...]


def last_routed_images(run: RunFigures) -> Optional[RoutedImages]:
    """Read what the run's last complete stage that left such a file says, or return None where none did.

    Raises:
        AlmaError: the file is damaged, or does not fit its stage.json.
    """
    for index, arrival in reversed(list(enumerate(run.planned))):
        path = run.path / f"stage-{index:03d}" / FILE
        if arrival in run.value and path.is_file():
            _, labels, experts = _read(path)
            return RoutedImages(path, arrival, labels, experts, _trees(run, arrival, path, experts))
    return None


def embed(path: Path) -> numpy.ndarray:
    """Return the place of each image on a map by t-SNE, (N, 2); the same features give the same map.

    Raises:
        AlmaError: scikit-learn is not installed.
    """
    features, _, _ = _read(path)
    digest = hashlib.sha256(features.tobytes()).hexdigest()
    if digest not in _maps:
        try:
            _maps[digest] = _embed(features)
        except ModuleNotFoundError as error:
            raise AlmaError(
                f"{path}: its map needs {error.name}, which is not installed; pip install 'fairseq-alma[report]' "
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


def _read(path: Path) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Return features (N, D), labels (N,) and experts (layers, N) of at most that many images."""
    try:
        with numpy.load(path, allow_pickle=False) as file:
            features, labels, experts = (file[name] for name in ("features", "labels", "expert"))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise AlmaError(
            f"{path}: damaged ({error}); remove it, and the report leaves out the map of this run"
        ) from error
    sizes = len(features), *labels.shape, *experts.shape[1:]
    fits = features.ndim == 2 and experts.ndim == 2 and labels.ndim == 1 and len(set(sizes)) == 1 and sizes[0] > 0
    if not fits or not numpy.isfinite(features).all():
        raise AlmaError(
            f"{path}: features {features.shape}, labels {labels.shape} and expert {experts.shape} do not belong "
            "together, or are not finite; remove it, and the report leaves out the map of this run"
        )
    return features[:MOST_IMAGES], labels[:MOST_IMAGES].astype(int), experts[:, :MOST_IMAGES].astype(int)


def _trees(run: RunFigures, arrival: int, path: Path, experts: numpy.ndarray) -> tuple[GateTree, ...]:
    """Return the gate of each layer from stage.json; flat ones where it says nothing."""
    nested: Any = run.extras.get(TREES, {}).get(arrival)
    if nested is None:
        return tuple(GateTree.flat(max(int(each.max()) + 1, run.num_experts[arrival])) for each in experts)
    try:
        trees = tuple(GateTree.from_nested(each) for each in nested)
    except (TypeError, AlmaError) as error:
        raise AlmaError(
            f"{path.with_name('stage.json')}: {TREES} is damaged ({error}); remove {path.name} beside it, and the "
            "report leaves out the map of this run"
        ) from error
    if len(trees) != len(experts) or any(
        int(each.max()) >= tree.num_experts for tree, each in zip(trees, experts, strict=True)
    ):
        raise AlmaError(
            f"{path}: its experts do not belong to the {TREES} in {path.with_name('stage.json')}; remove it, and the "
            "report leaves out the map of this run"
        )
    return trees
