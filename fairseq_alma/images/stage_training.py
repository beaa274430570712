"""Settings of a run on images, and the training of one network on the images of one stage.

`StageTraining` selects the best epoch by validation (paper v1, section 5). A *unit* is one member, or all members of a
joint model. Each unit has a separate image order, best epoch and early stopping, so a unit gets the same weights as in
a separate training run. A *branch* is a copy of the model that is trained with a decaying learning rate. If there is a
branch, the branch predicts on the test set; the next stage starts from the model without the decay.

`ImageSettings` parses the options with fairseq's parser, so that fairseq's commands can load and test the models.

Letters in shapes: N members, B images in a batch, C channels, H height, W width, K classes.
"""

import json
import math
import shlex
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, NoReturn, Optional, Sequence

import torch
import torch.nn.functional as F
from fairseq import options as fairseq_options
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY
from fairseq.optim import build_optimizer
from omegaconf import OmegaConf
from torch import Generator, Tensor, nn

from fairseq_alma.checkpoints import JOINT_MODEL
from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.errors import AlmaError
from fairseq_alma.images.image_batches import TrainingImages, batch_sizes
from fairseq_alma.images.image_job import MODEL_OPTIONS, ImageTrainOptions, LoopOptions
from fairseq_alma.images.image_models import GrownLayers, ImageClassifier, image_architectures
from fairseq_alma.images.networks import ImageKind, ImageNetwork, in_chunks, load_exactly
from fairseq_alma.training.fairseq_options import configuration_of
from fairseq_alma.training.feature import Features

COUNTS = ("ntokens", "nsentences", "sample_size")
"""Keys in fairseq's logging outputs for the number of images in an update; N separate models count an image N times."""


@dataclass
class UnitProgress:
    """Training progress of one unit: a member, or all members of a joint model."""

    best_score: float = math.inf  # lowest score so far, see `validation_scores`
    best_epoch: int = 0  # epoch with the best score, numbered from 1; 0: no epoch yet
    stopped_after: Optional[int] = None  # number of epochs before early stopping; None: not stopped


class StageTraining:
    """Training of one stage. After any epoch, a new object can resume from the `state_dict`.

    Args:
        network: network with initial weights, on the device for training.
        optimizer: optimizer of the parameters of the network.
        data: training images.
        valid_images: normalized validation images (B, C, H, W).
        valid_labels: int64 labels (B) of the validation images.
        loop: options of the training loop.
        generators: random generators on the CPU for image order and crops: one for each member, or one for a joint
            model.
        features: training features; None for no features.
        branch: training of a copy of the network, from the state before an epoch of this training; None if no branch
            is trained.
        branch_epoch: number of completed epochs at which the branch starts.

    Attributes:
        best: weights of the best epoch, for each unit.
        tested: weights to test, for each unit; None: weights of the best epoch.
    """

    def __init__(
        self,
        network: ImageNetwork,
        optimizer: torch.optim.Optimizer,
        data: TrainingImages,
        valid_images: Tensor,
        valid_labels: Tensor,
        loop: LoopOptions,
        generators: Sequence[Generator],
        features: Optional[Features] = None,
        branch: "Optional[StageTraining]" = None,
        branch_epoch: int = 0,
    ) -> None:
        self.features, self.branch, self.branch_epoch = features or Features(), branch, branch_epoch
        self.network, self.optimizer, self.data, self.loop = network, optimizer, data, loop
        self.valid_images, self.valid_labels = valid_images, valid_labels
        self.generators = list(generators)
        self.epoch = 0
        self.updates_per_epoch = len(batch_sizes(data.num_images, loop.batch_size))
        self.states = network.model_states()  # views
        self.best = [{name: tensor.clone() for name, tensor in state.items()} for state in self.states]
        self.tested: list[Optional[dict[str, Tensor]]] = [None] * len(self.states)
        self.units = [UnitProgress() for _ in self.states]

    @property
    def is_over(self) -> bool:
        """Return whether the training of all units is complete; the branch is trained before the remaining epochs."""
        return self.epoch >= self.loop.max_epoch or all(unit.stopped_after is not None for unit in self.units)

    @property
    def num_epochs(self) -> tuple[int, int]:
        """Return (completed epochs, maximum epochs), including the branch."""
        done, most = self.epoch, self.loop.max_epoch
        if self.branch is not None:
            done += max(0, self.branch.epoch - self.branch_epoch)
            most += self.loop.max_epoch - self.branch_epoch
        return done, most

    def epochs_of(self, unit: int) -> int:
        """Return the number of epochs that a unit was trained for."""
        stopped = self.units[unit].stopped_after
        return self.epoch if stopped is None else stopped

    def run_epoch(self) -> Tensor:
        """Train for one epoch, validate, and update ``best``. Return the units' mean loss (nats) in the last update."""
        if self.branch is not None and self.epoch == self.branch_epoch and not self.branch.is_over:
            if self.branch.epoch == 0:
                self.branch.load_state_dict(deepcopy(self.state_dict()))
            return self.branch.run_epoch()
        self.network.train()
        batches = self.data.epoch(self.loop.batch_size, self.generators)
        for update, (images, labels) in enumerate(batches, start=self.epoch * self.updates_per_epoch):
            self.optimizer.zero_grad()
            with self.features.around_forward(self.network):
                loss = self._loss(images, labels)
            loss.backward()
            self.features.before_step(self.optimizer, update)
            self.optimizer.step()
            self.features.after_step(self.network, update)
            self.features.count([{"loss": loss.detach(), **dict.fromkeys(COUNTS, labels.numel())}])
        self.epoch += 1
        self._select()
        return loss.detach() / len(self.units)

    def finish(self) -> None:
        """Load the best weights of each unit into the network, for the next stage. The branch is tested instead."""
        if self.branch is not None:
            self.tested = [*self.branch.best]
        for state, best in zip(self.states, self.best, strict=True):
            load_exactly(state, best)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training: weights, optimizer, random generators and progress."""
        return {
            "epoch": self.epoch,
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generators": [generator.get_state() for generator in self.generators],
            "best": self.best,
            "tested": self.tested,
            "units": [vars(unit) for unit in self.units],
            "features": self.features.state_dict(),
            "branch": self.branch.state_dict() if self.branch is not None and self.branch.epoch else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`. Loading the state of a different training run may raise any exception."""
        load_exactly(self.network.state_dict(), state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        for generator, before in zip(self.generators, state["generators"], strict=True):
            generator.set_state(before)
        for best, before in zip(self.best, state["best"], strict=True):
            load_exactly(best, before)
        self.units = [UnitProgress(*unit.values()) for unit in state["units"]]  # older files have the key best_loss
        self.features.load_state_dict(state["features"])
        device = self.valid_labels.device
        self.tested = [each and {name: tensor.to(device) for name, tensor in each.items()} for each in state["tested"]]
        self.epoch = state["epoch"]
        if self.branch is not None and state["branch"] is not None:
            self.branch.load_state_dict(state["branch"])

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the units' mean cross entropies. With a sum, the gradients of the units are independent."""
        logits = self.network(images, self.generators)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / labels.size(1)

    def _select(self) -> None:
        """Validate, store weights of improved units, and stop units after ``patience`` epochs without improvement."""
        with self.features.around_forward(self.network):
            scores = validation_scores(self.network, self.valid_images, self.valid_labels, self.loop.select)
        own: Optional[Mapping[str, Tensor]] = None
        patience = math.inf if self.loop.patience is None else self.loop.patience
        for number, (unit, score, state) in enumerate(zip(self.units, scores, self.states, strict=True)):
            if unit.stopped_after is not None:
                continue
            if self.loop.is_better(score, unit.best_score):
                unit.best_score, unit.best_epoch = score, self.epoch
                load_exactly(self.best[number], state)
                own = self.features.to_test(self.network) if own is None else own
                if own is not None:
                    mine = self.network.model_states(own)[number]
                    self.tested[number] = self.best[number] | {name: tensor.clone() for name, tensor in mine.items()}
                continue
            is_out_of_patience = self.epoch - unit.best_epoch >= patience
            if not unit.best_epoch and (is_out_of_patience or self.epoch == self.loop.max_epoch):
                raise AlmaError(
                    f"training diverged: the validation score is {score} after {self.epoch} epochs; start a new --run "
                    "with a lower --lr"
                )
            if is_out_of_patience:
                unit.stopped_after = self.epoch


@torch.no_grad()
def validation_scores(network: nn.Module, images: Tensor, labels: Tensor, select: str) -> list[float]:
    """Return the validation score of each unit, and leave the network in evaluation mode.

    If ``select`` is ``loss``, the score is the mean cross entropy in nats. If ``select`` is ``accuracy``, the score is
    the error (0 to 1), or NaN if a logit is not finite.
    """
    network.eval()
    logits = torch.cat([network(chunk) for chunk in in_chunks(images)], dim=1).float()  # (U, B, K)
    if select == "accuracy":
        errors = (logits.argmax(dim=-1) != labels).double().mean(dim=1)
        return errors.where(logits.isfinite().all(dim=2).all(dim=1), torch.nan).tolist()
    return torch.stack([F.cross_entropy(each, labels) for each in logits]).tolist()


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
        words = [str(stream.stream.root), "--task", "alma_image_classification"]
        words += ["--criterion", "alma_image_cross_entropy", *options.fairseq_words()]
        parser = fairseq_options.get_training_parser()
        parser.error = _refuse
        self.cfg = configuration_of(fairseq_options.parse_args_and_arch(parser, words))
        use_gpu = torch.cuda.is_available() and not self.cfg.common.cpu
        self.device = torch.device("cuda" if use_gpu else "cpu")
        content: Any = OmegaConf.to_container(self.cfg, resolve=True)
        self._plain = json.loads(json.dumps(content, default=str))  # default=str converts enumeration values
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
        model = {**self._plain["model"], **grown.options()}
        if self.joint_logits is not None:
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
