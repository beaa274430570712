"""Models of a run: construction from options, storage and predictions.

`ImageSettings` parses the options with fairseq's parser, so that fairseq's commands can load and test the models.
`ModelStore` keeps the models in fairseq checkpoints and in memory, and tests them. `Tally` combines the predictions of
several models by mean of probabilities, mean of logits, or majority vote.

Letters in shapes: N models, B images, C channels, H height, W width, K classes.
"""

import contextlib
import itertools
import json
import shlex
import sys
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, NoReturn, Optional, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from fairseq import options as fairseq_options
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY
from fairseq.optim import build_optimizer
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from fairseq_alma.checkpoints import JOINT_MODEL, LAST_CHECKPOINT
from fairseq_alma.checkpoints.checkpoint_file import (
    load_archive,
    read_checkpoint,
    refuse_other_shapes,
    untrained_checkpoint,
    write_checkpoint,
)
from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import open_atomically
from fairseq_alma.images.image_job import MODEL_OPTIONS, ImageTrainOptions
from fairseq_alma.images.image_models import GrownLayers, ImageClassifier, image_architectures
from fairseq_alma.images.mixtures import mixture_layers
from fairseq_alma.images.networks import ImageKind, ImageNetwork, NetworkFlops, count_flops, in_chunks, load_exactly
from fairseq_alma.learners.learner import ModelId, StagePlan
from fairseq_alma.runs.run_folder import AVERAGE_FILE, BRANCH, RunFolder, predicting_checkpoint
from fairseq_alma.terminal import print_line
from fairseq_alma.training.stage_task import configuration_of

UNFINISHED = "training.pt"
TRAINING_KEY = "alma_image_training"  # in ``extra_state``: the attributes of `TrainedModel` except the weights
_FACTS = {"grown": dict, "num_updates": int, "num_images": int, "growth": dict}
_PREFIX = "network."
Metrics = dict[str, float]
Examples = tuple[Tensor, Tensor]  # normalized images (B, C, H, W), int64 labels (B)


class ImageSettings:
    """Settings of a run on images.

    Args:
        stream: stream of images.
        options: options after ``--``.
        num_joint: number of members of a joint model; 1: a single model.
        joint_logits: how the logits of a joint model's members are combined: ``mean`` or ``sum``.
        smallest_batch: number of images in the smallest training batch.

    Attributes:
        images: shape and number of classes of the images.
        model_class: class of the architecture.
        cfg: fairseq's configuration, parsed from the options.
        device: the GPU if a GPU is available and --cpu is not given, else the CPU.
        joint_logits: value of the argument; None: a single model.

    Raises:
        AlmaError: the architecture is not an image model, fairseq rejects an option, or the model does not fit into
            memory or cannot train on the smallest batch.
    """

    def __init__(
        self,
        stream: ImageStream,
        options: ImageTrainOptions,
        num_joint: int = 1,
        joint_logits: str = "mean",
        smallest_batch: int = 2,
    ) -> None:
        self.stream, self.options = stream, options
        self.images = ImageKind(stream.shape, stream.num_classes)
        self.num_joint, self.joint_logits = num_joint, joint_logits if num_joint > 1 else None
        possible = image_architectures()
        if options.arch not in possible:
            raise AlmaError(f"--arch {options.arch}: not an image model; choose from {', '.join(possible)}")
        self.model_class: type[ImageClassifier] = MODEL_REGISTRY[ARCH_MODEL_NAME_REGISTRY[options.arch]]
        self._model_words = options.words(name for name in options.values if name in MODEL_OPTIONS)
        names = ("--task", "alma_image_classification", "--criterion", "alma_image_cross_entropy")
        parser = fairseq_options.get_training_parser()
        parser.error = _refuse
        self.cfg = configuration_of(
            fairseq_options.parse_args_and_arch(parser, [str(stream.stream.root), *names, *options.fairseq_words()])
        )
        self.device = torch.device("cuda" if torch.cuda.is_available() and not self.cfg.common.cpu else "cpu")
        content = json.dumps(OmegaConf.to_container(self.cfg, resolve=True), default=str)  # str converts enumerations
        self._plain: dict[str, Any] = json.loads(content)
        try:
            self._optimizer = build_optimizer(self.cfg.optimizer, [nn.Parameter(torch.zeros(1))]).optimizer
            _, _ = self._optimizer.defaults.get("betas", (0, 0))  # fairseq evaluates --adam-betas
        except (ValueError, TypeError, NameError, SyntaxError) as error:
            raise AlmaError(
                f"options after --: the optimizer {self.cfg.optimizer._name} rejects its options ({error}); "
                "correct or remove these options"
            ) from error
        try:  # fail before any file is written
            self.build(1).check_batch(smallest_batch)
        except RuntimeError as error:
            if not any(word in str(error) for word in ("memory", "overflow")):
                raise
            raise AlmaError(
                f"options after --: the network {options.arch} {' '.join(self._model_words)} does not fit into "
                "memory; reduce the size of the network"
            ) from error

    def build(self, num_models: int, grown: Optional[GrownLayers] = None) -> ImageNetwork:
        """Build one network of all models with uninitialized weights, on the CPU; a joint model is the only model.

        Args:
            num_models: number of models.
            grown: see `ImageClassifier.build_members`.
        """
        network = self.model_class.build_members(self.cfg.model, self.images, num_models * self.num_joint, grown)
        network.joint_logits = self.joint_logits
        return network

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build an optimizer as fairseq does, which would parse the options again for each optimizer."""
        return type(self._optimizer)(parameters, **self._optimizer.defaults)

    def read_grown(self, options: Mapping[str, Any]) -> GrownLayers:
        """Return the grown layer sizes, read from the model options of a checkpoint; see `GrownLayers.options`.

        Raises:
            AlmaError: the value of an option is invalid.
            OmegaConfBaseException: the architecture lacks an option.
        """
        return self.model_class.read_grown(OmegaConf.merge(self.cfg.model, dict(options)))

    def checkpoint_config(self, grown: GrownLayers) -> dict[str, Any]:
        """Return the fairseq configuration (``cfg``) to store in a checkpoint."""
        if self.joint_logits is None:
            return {**self._plain, "model": {**self._plain["model"], **grown.options()}}
        model = {
            "_name": JOINT_MODEL,
            "num_members": self.num_joint,
            "member_arch": self.options.arch,
            "member_options": shlex.join(self._model_words),
            "joint_logits": self.joint_logits,
        }
        return {**self._plain, "model": model}


def _refuse(message: str) -> NoReturn:
    raise AlmaError(f"options after --: {message.replace('invalid <lambda> value', 'invalid value')}")


@dataclass(frozen=True)
class TrainedModel:
    """Weights of a trained model, and a record of the training run.

    Attributes:
        state: state dictionary of the network.
        grown: layer sizes after growth, which a checkpoint stores as model options.
        num_updates: number of updates in the last stage that trained the model, without updates of the branch (copy of
            the model that is trained with a decaying learning rate).
        num_images: number of images processed in the same stage, summed over all epochs of the model and the branch.
        growth: record of the growth step at the start of the same stage; empty without growth.
        tested: weights to predict with: average of weights, or weights of the branch; None: ``state``.
    """

    state: Mapping[str, Tensor]
    grown: GrownLayers
    num_updates: int
    num_images: int
    growth: Mapping[str, Any] = field(default_factory=dict)
    tested: Optional[Mapping[str, Tensor]] = None

    @property
    def predicting(self) -> "TrainedModel":
        """Return the model with ``state`` replaced by the weights to predict with."""
        return self if self.tested is None else replace(self, state=self.tested, tested=None)


def write_model(path: Path, model: TrainedModel, config: Mapping[str, Any]) -> None:
    """Write a checkpoint that fairseq's commands can load; ``config``: see `ImageSettings.checkpoint_config`."""
    weights = {_PREFIX + name: tensor.detach().cpu().clone() for name, tensor in model.state.items()}
    checkpoint = untrained_checkpoint(dict(config), weights, {})
    history = {
        "criterion_name": "AlmaImageCrossEntropy",
        "optimizer_name": str(config["optimizer"]["_name"]),
        "lr_scheduler_state": {},
        "num_updates": model.num_updates,
    }
    facts = {
        "grown": model.grown.options(),
        "growth": dict(model.growth),
        "num_updates": model.num_updates,
        "num_images": model.num_images,
    }
    write_checkpoint({**checkpoint, "optimizer_history": [history], "extra_state": {TRAINING_KEY: facts}}, path)


def read_model(path: Path, read_grown: Callable[[Mapping[str, Any]], GrownLayers], remedy: str) -> TrainedModel:
    """Read a checkpoint that `write_model` wrote; ``read_grown`` is `ImageSettings.read_grown`.

    Error messages end with ``remedy``.

    Raises:
        AlmaError: the file is missing or damaged, was written by another command, or has options of another network.
    """
    checkpoint = read_checkpoint(path, mmap=False, remedy=remedy)
    extra = checkpoint.get("extra_state")
    facts = extra.get(TRAINING_KEY) if isinstance(extra, dict) else None
    if not isinstance(facts, dict):
        raise AlmaError(f"{path}: not written by alma-stream; {remedy}")
    if facts.keys() != _FACTS.keys() or not all(isinstance(facts[name], kind) for name, kind in _FACTS.items()):
        raise AlmaError(f"{path}: damaged (entries of an alma-stream checkpoint are missing or invalid); {remedy}")
    try:
        grown = read_grown(facts["grown"])
    except (OmegaConfBaseException, AlmaError) as error:
        raise AlmaError(f"{path}: not the weights of this run's network ({error}); {remedy}") from error
    state = {name.removeprefix(_PREFIX): tensor for name, tensor in checkpoint["model"].items()}
    return TrainedModel(state, grown, facts["num_updates"], facts["num_images"], facts["growth"])


def read_unfinished(path: Path) -> Optional[dict[str, Any]]:
    """Return the state of an unfinished training run; None if the file is missing or damaged."""
    if path.is_file():
        with contextlib.suppress(Exception):  # a damaged file raises errors of many types
            if isinstance(state := load_archive(path, mmap=False), dict):
                return state
        print_line(f"note: {path}: damaged; restarting the training of the stage", sys.stderr)
    return None


class ModelStore:
    """Mapping from model identifiers to the trained models of a run.

    Args:
        folder: folder of the run.
        settings: settings of the run.
        predicts_with: weights to predict with: ``last``, ``average`` or ``branch``.
        sizes: layer sizes of all models; None if models grow.
    """

    def __init__(
        self, folder: RunFolder, settings: ImageSettings, predicts_with: str, sizes: Optional[GrownLayers]
    ) -> None:
        self.folder, self.settings, self.predicts_with, self.sizes = folder, settings, predicts_with, sizes
        self.models: dict[ModelId, TrainedModel] = {}
        self.flops: dict[GrownLayers, NetworkFlops] = {}
        self.built: dict[tuple[ModelId, ...], ImageNetwork] = {}
        self.tally = Tally()  # predictions of the models in `counted` on the test set
        self.counted: list[tuple[ModelId, ...]] = []

    def __contains__(self, model: ModelId) -> bool:
        return self.folder.checkpoint(model).is_file()

    def is_complete(self, model: ModelId) -> bool:
        """Return whether all checkpoints of a model exist and are complete zip archives."""
        return all(zipfile.is_zipfile(path) for path in (self._tested(model), self.folder.checkpoint(model)))

    def __getitem__(self, model: ModelId) -> TrainedModel:
        """Return a trained model. Raises AlmaError if its checkpoint is missing, damaged, or of another network."""
        if model in self.models:
            return self.models[model]
        remedy = f"remove the stage folder {self.folder.stage_folder(model.stage)} to train the stage again"
        path, tested = self.folder.checkpoint(model), self._tested(model)
        found = {each: read_model(each, self.settings.read_grown, remedy) for each in dict.fromkeys((path, tested))}
        network = self.settings.build(1, self.sizes or found[path].grown)
        for each, trained in found.items():
            refuse_other_shapes(trained.state, network, str(each), remedy)
        self.models[model] = replace(found[path], tested=None if tested == path else found[tested].state)
        return self.models[model]

    def __setitem__(self, model: ModelId, trained: TrainedModel) -> None:
        config = self.settings.checkpoint_config(trained.grown)
        if trained.tested is not None:  # written first: the other checkpoint marks the model as complete
            write_model(self._tested(model), trained.predicting, config)
        write_model(self.folder.checkpoint(model), trained, config)
        self.models[model] = trained

    def remove(self, gone: Sequence[ModelId]) -> None:
        """Remove the models ``gone`` and their files, and delete folders that become empty."""
        for model in gone:
            folder = self.folder.model_folder(model)
            for here in (folder / BRANCH, folder):
                for name in (LAST_CHECKPOINT, AVERAGE_FILE, UNFINISHED):
                    (here / name).unlink(missing_ok=True)
                if here.is_dir() and not any(here.iterdir()):
                    here.rmdir()
            self.models.pop(model, None)

    def networks_of(self, plan: StagePlan) -> Mapping[tuple[ModelId, ...], ImageNetwork]:
        """Return models -> network with the weights that these models predict with, in the order of the predictors.

        All models of a stage share a network, so that results are equal after a restart. The store caches the networks
        of the last plan.
        """
        groups = [tuple(each) for _, each in itertools.groupby(plan.predictors, key=lambda model: model.stage)]
        self.built = {
            group: self.built.get(group) or build_network(self.settings, [self[model].predicting for model in group])
            for group in groups
        }
        return self.built

    def flops_of(self, grown: GrownLayers) -> NetworkFlops:
        """Return the FLOPs per image of one model with layer sizes ``grown``."""
        if grown not in self.flops:
            network = self.settings.build(1, grown)
            for parameter in network.parameters():
                torch.nn.init.zeros_(parameter)
            self.flops = {grown: count_flops(network, self.settings.stream.shape)}
        return self.flops[grown]

    def test(self, plan: StagePlan, images: Tensor, labels: Tensor) -> tuple[Metrics, list[list[float]]]:
        """Test the models that predict after a stage. Models of a growing ensemble predict the test set only once.

        Returns:
            (mean loss and error on the test set; for each mixture layer of the newest network, the share of the test
            images that the gate assigns to each expert).
        """
        networks = self.networks_of(plan)
        usage: list[list[float]] = []
        if self.tally.combine != plan.combine or self.counted != [*networks][: len(self.counted)]:
            self.tally, self.counted = Tally(plan.combine), []
        for models in [*networks][len(self.counted) :]:
            logits, shares = predict(networks[models], images)
            self.tally.add(logits)
            self.counted.append(models)
            totals = (sum(each.sum(dim=0) for each in of_layer) / len(images) for of_layer in zip(*shares, strict=True))
            usage = [[round(share, 4) for share in total.tolist()] for total in totals]
        return self.tally.result(labels), usage

    def _tested(self, model: ModelId) -> Path:
        return predicting_checkpoint(self.folder, model, self.predicts_with)


def build_network(settings: ImageSettings, models: Sequence[TrainedModel]) -> ImageNetwork:
    """Build a network on the device with the weights of ``models``, which have equal layer sizes."""
    network = settings.build(len(models), models[0].grown)
    for state, model in zip(network.model_states(), models, strict=True):
        load_exactly(state, model.state)
    return network.to(settings.device)


class Tally:
    """Combined predictions of several models for the same images.

    If the models are added in the same order, the sums are bit-identical after a restart.

    Args:
        combine: rule for the predicted class: ``probabilities`` (largest mean probability), ``logits`` (largest mean
            logit), or ``vote`` (most votes; ties: largest mean probability).
    """

    def __init__(self, combine: str = "probabilities") -> None:
        self.combine = combine
        self.num_models = 0
        self.log_sum: Optional[Tensor] = None  # sum of logits for "logits", else log of summed probabilities
        self.votes: Optional[Tensor] = None

    def add(self, logits: Tensor) -> None:
        """Add the logits (N, B, K) of N more models."""
        self.num_models += len(logits)
        for each in logits if self.combine == "logits" else F.log_softmax(logits, dim=-1):
            add = torch.add if self.combine == "logits" else torch.logaddexp
            self.log_sum = each if self.log_sum is None else add(self.log_sum, each)
            if self.combine == "vote":
                vote = F.one_hot(each.argmax(dim=-1), logits.size(-1))
                self.votes = vote if self.votes is None else self.votes + vote

    def result(self, labels: Tensor) -> Metrics:
        """Return ``loss`` (mean, nats) and ``error`` (0 to 1) of the combined predictions, given the labels (B)."""
        assert self.log_sum is not None  # at least one model was added
        if self.combine == "logits":
            log_probs = F.log_softmax(self.log_sum / self.num_models, dim=-1)
        else:
            log_probs = self.log_sum - torch.log(torch.tensor(float(self.num_models)))
        # Half of a mean probability is less than one vote, so probabilities only break ties.
        scores = log_probs if self.votes is None else self.votes + log_probs.exp() / 2
        wrong = (scores.argmax(dim=-1) != labels).sum().item()
        return {"loss": F.nll_loss(log_probs, labels).item(), "error": wrong / len(labels)}


@torch.no_grad()
def predict(network: ImageNetwork, images: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
    """Return predictions for normalized images (B, C, H, W).

    Returns:
        (logits of the U models (U, B, K); for each chunk of the images, the weight of each expert for each image (b, E)
        in each mixture layer).
    """
    network.eval()
    layers = mixture_layers(network)
    logits, shares = [], []
    for some in in_chunks(images):
        logits.append(network(some))
        shares.append([layer.shares() for layer in layers])
    return torch.cat(logits, dim=1), shares


def measure(
    networks: Iterable[ImageNetwork], images: Tensor, labels: Tensor, combine: str = "probabilities"
) -> Metrics:
    """Return the joint ``loss`` (mean, nats) and ``error`` (0 to 1) of networks on labeled images; see `Tally`."""
    tally = Tally(combine)
    for network in networks:
        tally.add(predict(network, images)[0])
    return tally.result(labels)


def write_experts(folder: Path, network: ImageNetwork, images: Tensor) -> None:
    """Write which expert has the largest weight in each mixture layer, for each of the first 2,000 test images.

    The file contains the array ``expert`` (layers, n).
    """
    _, shares = predict(network, images[:2000])
    experts = [torch.stack([each.argmax(dim=-1) for each in of_layers]) for of_layers in shares]
    with open_atomically(folder / "test-experts.npz") as file:
        np.savez_compressed(file, expert=torch.cat(experts, dim=1).cpu().numpy())
