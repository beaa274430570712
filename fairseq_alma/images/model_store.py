"""The trained models of a run: plain fairseq checkpoints, where a restart finds them, and in memory for the next stage.

Beside them the file that an unfinished training resumes from, and what predicts after a stage, which is tested by the
mean of the models' probabilities or logits, or by their vote. A growing ensemble has as many models as stages before;
all but the new ones predict what they predicted before.

Letters: N models, B images, K classes.
"""

import contextlib
import sys
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from fairseq_alma.checkpoints import LAST_CHECKPOINT
from fairseq_alma.checkpoints.checkpoint_file import load_archive, read_checkpoint, write_checkpoint
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import open_atomically, sweep
from fairseq_alma.images.image_classifier import GrownLayers
from fairseq_alma.images.image_settings import ImageSettings
from fairseq_alma.images.mixtures import mixture_layers
from fairseq_alma.images.networks import ImageNetwork, NetworkFlops, count_flops, in_chunks, join_logits
from fairseq_alma.learners.learner import ModelId, StagePlan
from fairseq_alma.runs.run_folder import AVERAGE, BRANCH, RunFolder, predicting_checkpoint
from fairseq_alma.terminal import tell

UNFINISHED = "training.pt"
TRAINING_KEY = "alma_image_training"
"""Key in a checkpoint's ``extra_state``: what `TrainedModel` says beside weights and configuration."""
_FACTS = {"grown": dict, "num_updates": int, "num_images": int, "growth": dict}
_PREFIX = "network."


@dataclass(frozen=True)
class TrainedModel:
    """One model that is trained to its end.

    Attributes:
        state: its weights, by the names that its network gives them.
        grown: what growth has changed; its file has it as options of the model.
        num_updates: updates of its last stage.
        num_images: images that these updates trained on, each pass counted.
        growth: what the growth step before its last stage did; empty where it did not grow.
        tested: what predicts instead of its weights, an average or a copy; it has a file of its own.
    """

    state: Mapping[str, Tensor]
    grown: GrownLayers
    num_updates: int
    num_images: int
    growth: Mapping[str, Any] = field(default_factory=dict)
    tested: Optional[Mapping[str, Tensor]] = None

    @property
    def predicting(self) -> "TrainedModel":
        """The model by which it predicts."""
        return self if self.tested is None else replace(self, state=self.tested, tested=None)


def write_model(path: Path, model: TrainedModel, config: Mapping[str, Any]) -> None:
    """Write a checkpoint that fairseq's commands read; ``config`` is its ``cfg``, `ImageSettings.checkpoint_config`."""
    counts = {"num_updates": model.num_updates, "num_images": model.num_images}
    history = {
        "criterion_name": "AlmaImageCrossEntropy",
        "optimizer_name": str(config["optimizer"]["_name"]),
        "lr_scheduler_state": {},
        "num_updates": model.num_updates,
    }
    checkpoint = {
        "args": None,
        "cfg": dict(config),
        "model": {_PREFIX + name: tensor.detach().cpu().clone() for name, tensor in model.state.items()},
        "optimizer_history": [history],
        "task_state": {},
        "extra_state": {TRAINING_KEY: {"grown": model.grown.options(), **counts, "growth": dict(model.growth)}},
    }
    write_checkpoint(checkpoint, path)


def read_model(path: Path, read_grown: Callable[[Mapping[str, Any]], GrownLayers]) -> TrainedModel:
    """Read a checkpoint that `write_model` wrote; ``read_grown`` is that of `ImageSettings`.

    Raises:
        AlmaError: it is missing, damaged, or another command's.
    """
    remedy = f"remove {path.parent.parent} to train that stage again"
    checkpoint = read_checkpoint(path, mmap=False, remedy=remedy)
    extra = checkpoint.get("extra_state")
    facts = extra.get(TRAINING_KEY) if isinstance(extra, dict) else None
    if not isinstance(facts, dict):
        raise AlmaError(f"{path}: not written by alma-stream; {remedy}")
    weights = checkpoint["model"]
    whole = facts.keys() == _FACTS.keys() and all(isinstance(facts[name], kind) for name, kind in _FACTS.items())
    if not whole or not isinstance(weights, dict) or not all(isinstance(each, Tensor) for each in weights.values()):
        raise AlmaError(f"{path}: damaged, it is not what alma-stream writes; {remedy}")
    try:
        grown = read_grown(facts["grown"])
    except (OmegaConfBaseException, AlmaError) as error:
        raise AlmaError(f"{path}: not the weights of this run's network ({error}); {remedy}") from error
    state = {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items()}
    return TrainedModel(state, grown, facts["num_updates"], facts["num_images"], facts["growth"])


def write_unfinished(path: Path, state: Mapping[str, Any]) -> None:
    """Save an unfinished training; the file before stays until the new one is whole."""
    with open_atomically(path) as file:
        torch.save(dict(state), file)


def read_unfinished(path: Path) -> Optional[dict[str, Any]]:
    """Return the training that was cut off, or None where there is none or nothing to resume from."""
    if not path.is_file():
        return None
    state = None
    with contextlib.suppress(Exception):  # of many kinds
        state = load_archive(path, mmap=False)
    if not isinstance(state, dict):
        tell(f"note: {path}: damaged, the stage is trained from its beginning", sys.stderr)
        return None
    return state


def remove_unfinished(path: Path) -> None:
    """Remove what a training that is done was to be resumed from, with what a kill left of it."""
    path.unlink(missing_ok=True)
    sweep(path.parent)


def remove_model(folder: Path) -> None:
    """Remove what is kept of a model, and its folder if nothing else is in it."""
    for here, names in ((folder / BRANCH, (LAST_CHECKPOINT,)), (folder, (LAST_CHECKPOINT, AVERAGE, UNFINISHED))):
        for name in names:
            (here / name).unlink(missing_ok=True)
        if here.is_dir() and not any(here.iterdir()):
            here.rmdir()


class ModelStore:
    """Trained models.

    Args:
        folder: the run.
        settings: of the run.
        predicts_with: what predicts: the ``last`` weights of a model, or others beside them, which have their own file.
    """

    def __init__(self, folder: RunFolder, settings: ImageSettings, predicts_with: str = "last") -> None:
        self.folder, self.settings, self.predicts_with = folder, settings, predicts_with
        self.models: dict[ModelId, TrainedModel] = {}
        self.flops: dict[GrownLayers, NetworkFlops] = {}
        self.built: Optional[tuple[list[ModelId], ImageNetwork]] = None

    def __contains__(self, model: ModelId) -> bool:
        return self._path(model).is_file()

    def is_whole(self, model: ModelId) -> bool:
        """Tell whether a model's file has its end: what torch saves is a zip file, its directory stands last."""
        return all(zipfile.is_zipfile(path) for path in (self._tested(model), self._path(model)))

    def __getitem__(self, model: ModelId) -> TrainedModel:
        """Return a model. Raises AlmaError if it is gone."""
        if model not in self.models:
            if model not in self:
                raise AlmaError(
                    f"{self._path(model)}: not there, but a later stage needs it; remove "
                    f"{self.folder.stage_folder(model.stage)} to train that stage again"
                )
            self.models[model] = self._read(model)
        return self.models[model]

    def __setitem__(self, model: ModelId, trained: TrainedModel) -> None:
        """Take in a model, and write its checkpoint."""
        config = self.settings.checkpoint_config(trained.grown)
        if trained.tested is not None:  # first, as a model is there when its last checkpoint is
            write_model(self._tested(model), trained.predicting, config)
        write_model(self._path(model), trained, config)
        self.models[model] = trained

    def remove(self, gone: Sequence[ModelId]) -> None:
        for model in gone:
            remove_model(self.folder.model_folder(model))
            self.models.pop(model, None)

    def network_of(self, models: Sequence[ModelId]) -> ImageNetwork:
        """Build the network by which models predict, side by side, unless it is the one that was asked for last."""
        if self.built is None or self.built[0] != [*models]:
            network = build_network(self.settings, [self[model].predicting for model in models])
            self.built = ([*models], network)
        return self.built[1]

    def flops_of(self, grown: GrownLayers) -> NetworkFlops:
        """Return the operations of one model that has grown so."""
        if grown not in self.flops:
            network = self.settings.build(self.settings.num_joint, grown)
            for parameter in network.parameters():
                torch.nn.init.zeros_(parameter)
            self.flops = {grown: count_flops(network, self.settings.stream.shape)}
        return self.flops[grown]

    def _read(self, model: ModelId) -> TrainedModel:
        trained = read_model(self._path(model), self.settings.read_grown)
        try:
            build_network(self.settings, [trained])
        except (KeyError, RuntimeError, AlmaError) as error:
            raise AlmaError(
                f"{self._path(model)}: not the weights of this run's network ({error}); remove "
                f"{self.folder.stage_folder(model.stage)} to train that stage again"
            ) from error
        if self.predicts_with == "last":
            return trained
        return replace(trained, tested=read_model(self._tested(model), self.settings.read_grown).state)

    def _tested(self, model: ModelId) -> Path:
        return predicting_checkpoint(self.folder, model, self.predicts_with)

    def _path(self, model: ModelId) -> Path:
        return self.folder.checkpoint(model)


def build_network(settings: ImageSettings, models: Sequence[TrainedModel]) -> ImageNetwork:
    """Build models of the same architecture side by side, or the members of a joint one, on the run's device."""
    if settings.is_joint:
        network = settings.build(settings.num_joint, models[0].grown)
        network.load_state_dict(dict(models[0].state))
    else:
        network = settings.build(len(models), models[0].grown)
        for member, model in enumerate(models):
            network.load_member_state(member, model.state)
    return network.to(settings.device)


class Tally:
    """Predictions of several models for the same images.

    Models are added in their order, so that a sum that is built again after a restart is the same to the last bit.

    Args:
        combine: ``single`` or ``probabilities``: predict the class of the largest mean probability; ``logits``: of the
            largest mean logit; ``vote``: the class that most models find most likely, of several such classes the one
            of the largest mean probability.
    """

    def __init__(self, combine: str) -> None:
        self.combine = combine
        self.num_models = 0
        self.log_sum: Optional[Tensor] = None  # of logits: their sum itself
        self.votes: Optional[Tensor] = None

    def add(self, logits: Tensor) -> None:
        """Add the (N, B, K) logits of N more models."""
        self.num_models += len(logits)
        if self.combine == "logits":
            for each in logits:
                self.log_sum = each if self.log_sum is None else self.log_sum + each
            return
        log_probs = F.log_softmax(logits, dim=-1)
        for each in log_probs:
            self.log_sum = each if self.log_sum is None else torch.logaddexp(self.log_sum, each)
            if self.combine == "vote":
                vote = F.one_hot(each.argmax(dim=-1), logits.size(-1))
                self.votes = vote if self.votes is None else self.votes + vote

    def result(self, labels: Tensor) -> dict[str, float]:
        """Return ``loss``, of the mean of probabilities or logits, in nats, and ``error``, 0 to 1, for (B) labels."""
        assert self.log_sum is not None  # a model was added
        if self.combine == "logits":
            log_probs = F.log_softmax(self.log_sum / self.num_models, dim=-1)
        else:
            log_probs = self.log_sum - torch.log(torch.tensor(float(self.num_models)))
        # The mean of probabilities, at most 1, decides between equal votes and no others.
        scores = log_probs if self.votes is None else self.votes + log_probs.exp() / 2
        wrong = (scores.argmax(dim=-1) != labels).sum().item()
        return {"loss": F.nll_loss(log_probs, labels).item(), "error": wrong / len(labels)}


EXPERTS_FILE = "test-experts.npz"
NUM_SHOWN = 2000
Metrics = dict[str, float]
Examples = tuple[Tensor, Tensor]
"""(B, C, H, W) normalised images and (B) labels."""


class Predicted(NamedTuple):
    """What a network says of B images: (N, B, K) logits, of a joint network (1, B, K).

    And for each mixture the share of the images that each expert got; empty without mixtures.
    """

    logits: Tensor
    usage: list[list[float]]


@torch.no_grad()
def predict(network: ImageNetwork, images: Tensor, joint_logits: Optional[str] = None) -> Predicted:
    """Predict (B, C, H, W) normalised images; members that are one model by the ``mean`` or ``sum`` of their logits."""
    network.eval()
    layers = mixture_layers(network)
    totals: list[Tensor] = [torch.zeros(layer.num_experts, device=images.device) for layer in layers]
    parts = []
    for some in in_chunks(images):
        logits = network(some)
        parts.append(logits if joint_logits is None else join_logits(logits, joint_logits)[None])
        totals = [total + layer.shares().sum(dim=0) for total, layer in zip(totals, layers, strict=True)]
    usage = [[round(share, 4) for share in (total / len(images)).tolist()] for total in totals]
    return Predicted(torch.cat(parts, dim=1), usage)


def measure(network: ImageNetwork, images: Tensor, labels: Tensor) -> Metrics:
    """Return loss (nats) and error (0 to 1) of a network of one member."""
    tally = Tally("single")
    tally.add(predict(network, images).logits)
    return tally.result(labels)


@torch.no_grad()
def write_experts(folder: Path, network: ImageNetwork, examples: Examples) -> None:
    """Write which expert each of the first test images goes to, for a picture; nothing without mixtures.

    ``test-experts.npz`` has ``features`` (n, d), what the first layer's gate sees, ``labels`` (n) and ``expert``
    (layers, n).
    """
    layers = mixture_layers(network)
    if not layers:
        return
    images, labels = examples
    network.eval()
    network(images[:NUM_SHOWN])
    features = layers[0].gate_input
    assert features is not None
    experts = torch.stack([layer.shares().argmax(dim=-1) for layer in layers])
    with open_atomically(folder / EXPERTS_FILE) as file:
        np.savez_compressed(
            file,
            features=features.cpu().numpy(),
            labels=labels[:NUM_SHOWN].cpu().numpy(),
            expert=experts.cpu().numpy(),
        )


class Predictions:
    """Predictions of one run's models; what frozen models predict on the test set is computed once.

    Args:
        store: the models.
        test: examples of the test set.
    """

    def __init__(self, store: ModelStore, test: Examples) -> None:
        self.network_of, self.test = store.network_of, test
        self.joint_logits = store.settings.joint_logits if store.settings.is_joint else None
        self._tally = Tally("single")
        self._counted: list[ModelId] = []
        self._frozen: dict[ModelId, ImageNetwork] = {}

    def on_test(self, plan: StagePlan) -> tuple[Metrics, list[list[float]]]:
        """Return loss and error on the test set, and the use of experts in the last network; see `Predicted`."""
        images, labels = self.test
        is_longer = self._counted and self._counted == list(plan.predictors[: len(self._counted)])
        if not is_longer or plan.combine == "single":
            self._tally, self._counted = Tally(plan.combine), []
        usage: list[list[float]] = []
        for models in _groups(plan, plan.predictors[len(self._counted) :]):
            logits, usage = predict(self.network_of(models), images, self.joint_logits)
            self._tally.add(logits)
            self._counted += models
        return self._tally.result(labels), usage

    def on_valid(self, plan: StagePlan, valid: Examples) -> Metrics:
        """Return loss and error on the stage's validation set."""
        tally = Tally(plan.combine)
        known = set(plan.predictors)
        self._frozen = {model: network for model, network in self._frozen.items() if model in known}
        for models in _groups(plan, plan.predictors):
            if plan.stage.index == models[0].stage:
                network = self.network_of(models)
            else:
                network = self._frozen.get(models[0]) or self.network_of(models)
                self._frozen[models[0]] = network
            tally.add(predict(network, valid[0], self.joint_logits).logits)
        return tally.result(valid[1])


def _groups(plan: StagePlan, models: Sequence[ModelId]) -> list[list[ModelId]]:
    """Put the models that the stage trained into one group, computed together; each other stands alone."""
    new = {training.model for training in plan.trainings}
    groups = [[model] for model in models if model not in new]
    together = [model for model in models if model in new]
    return [*groups, together] if together else groups
