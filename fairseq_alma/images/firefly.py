"""Firefly: a VGG network becomes wider, where its gradients ask for it (Wu et al. 2020; paper v5, section 4, "FF").

One step, after section 2 of Wu et al.:

1. every channel of every layer may be split and every layer may get new channels: `CandidateVGG`. A *split* makes a
   channel two, with incoming weights w + d and w - d and half of the outgoing weights each; a *new* channel has
   incoming weights of its own and small outgoing ones. All candidates are there at once, which costs about three times
   the network alone: the two halves of a split have the same outgoing weights, so that a layer may take their mean for
   both. A factor for each candidate, its *path*, leads from the network as it is, 0, to the candidate, 1;
2. all directions are tuned together on the images of the stage, the network itself left as it is;
3. a candidate's score is the change of the loss along its path, from the gradient at the middle of it. At its start
   the gradient of a split is 0, as its two halves cancel each other: what it gains is of second order;
4. the best candidates over all layers are kept, until the asked number of parameters is added (`select_candidates`),
   or of neurons, as in the paper's released code (`select_neurons`). The channels of a grown layer are the old ones,
   then the second halves of those that were split, then the new ones.

Every step adds the same share of the *first* size, so that a network grows linearly: "at every growth phase, we add
approximately a quarter of the initial number of parameters" (paper v5, Appendix B.1). Wu et al. also try new layers.
That is left out here: the architecture keeps its sixteen convolutions.

Letters: B images, I input and O output channels of a layer, P and Q new channels of the layer before and of this one,
T and S channels that are split there and here, H and W height and width, K classes.
"""

import math
from typing import Iterable, Iterator, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.errors import AlmaError
from fairseq_alma.images.networks import (
    BATCH_NORM_EPS,
    SMALLEST_IMAGE,
    VGG,
    ConvBlock,
    MemberBatchNorm2d,
    MemberLinear,
    count_flops,
)
from fairseq_alma.images.stage_training import batch_sizes


class LayerScores(NamedTuple):
    """The candidates of one layer, each with the change of the loss that it promises; lower is better.

    Attributes:
        split: of each channel of the layer, which may become two.
        new: of each new channel that the layer may get.
    """

    split: Sequence[float]
    new: Sequence[float]


class KeptCandidates(NamedTuple):
    """The candidates of one layer that are kept.

    Attributes:
        split: channels that become two, in ascending order.
        new: numbers of new channels, in ascending order.
    """

    split: list[int]
    new: list[int]


def num_chain_parameters(image_channels: int, channels: Sequence[int], num_classes: int) -> int:
    """Return the parameters of a chain of convolutions.

    Args:
        image_channels: of the images.
        channels: of each convolution's output.
        num_classes: outputs of the linear layer.
    """
    inputs = [image_channels, *channels[:-1]]
    convolutions = sum(9 * before * after for before, after in zip(inputs, channels, strict=True))
    return convolutions + 2 * sum(channels) + (channels[-1] + 1) * num_classes


def select_candidates(
    scores: Sequence[LayerScores], image_channels: int, num_classes: int, num_added: float
) -> list[KeptCandidates]:
    """Take candidates in the order of their scores until the next one would miss the asked size by more.

    Wu et al. 2020 choose in the same way ("greedy selection"), with a number of neurons as the limit.

    Args:
        scores: of each layer; it has as many channels as it has scores of splits.
        image_channels: of the images.
        num_classes: outputs of the linear layer.
        num_added: parameters to add, as nearly as whole channels allow.

    Returns:
        What to keep in each layer; nothing at all if one channel is more than twice what is asked.
    """
    ranked = _ranked(scores)
    growth = [KeptCandidates([], []) for _ in scores]
    channels = [len(layer.split) for layer in scores]
    size = num_chain_parameters(image_channels, channels, num_classes)
    goal = size + num_added
    for _, layer, kind, index in ranked:
        channels[layer] += 1
        next_size = num_chain_parameters(image_channels, channels, num_classes)
        if next_size - goal > goal - size:
            break
        size = next_size
        growth[layer][kind].append(index)
    return _in_order(growth)


def select_neurons(scores: Sequence[LayerScores], num_added: int) -> list[KeptCandidates]:
    """Take a number of candidates in the order of their scores, as the paper's released code does.

    Args:
        scores: of each layer.
        num_added: neurons to add over all layers.
    """
    growth = [KeptCandidates([], []) for _ in scores]
    for _, layer, kind, index in _ranked(scores)[:num_added]:
        growth[layer][kind].append(index)
    return _in_order(growth)


def _ranked(scores: Sequence[LayerScores]) -> list[tuple[float, int, int, int]]:
    """Return score, layer, kind and index of all candidates, the best first."""
    return sorted(
        (score, layer, kind, index)
        for layer, of_layer in enumerate(scores)
        for kind, of_kind in enumerate(of_layer)
        for index, score in enumerate(of_kind)
    )


def _in_order(growth: Sequence[KeptCandidates]) -> list[KeptCandidates]:
    return [KeptCandidates(sorted(layer.split), sorted(layer.new)) for layer in growth]


TUNING_RATE = 0.1
FEWEST_NEW = 4  # candidates for a layer's new channels, however narrow it is
NUM_PASSES = 2  # forward and backward of the candidates over the images: one tunes directions, one scores

Batches = Iterable[tuple[Tensor, Tensor]]
_NOTHING = KeptCandidates([], [])


class Steps(NamedTuple):
    """How far candidates lead away from the network; small, so that it computes nearly the same with them.

    Attributes:
        split: length of a split's change d, as a part of the length of the channel's weights w.
        new: length of a new channel's outgoing weights, as a part of the typical length of the old channels' ones.
    """

    split: float = 0.2
    new: float = 0.05


DEFAULT_STEPS = Steps()


class CandidateLayer(nn.Module):
    """What the layers of a network with candidates have in common: inputs from the new channels of the layer before.

    Args:
        weight: of the layer without candidates, (O, I, …).
        steps: how large candidates are.
    """

    outgoing: nn.Parameter

    def __init__(self, weight: Tensor, steps: Steps) -> None:
        super().__init__()
        self.weight = weight
        # The root mean square length of an input's outgoing weights.
        self.outgoing_length = steps.new * (weight.square().sum() / weight.size(1)).sqrt()

    def outgoing_weight(self) -> Tensor:
        """Return outgoing weights of the new channels of the layer before, (O, P, …)."""
        return (self.outgoing * self.outgoing_length).transpose(0, 1)


class CandidateBlock(CandidateLayer):
    """A convolution, batch norm, ReLU with its candidates.

    Args:
        block: what it is without candidates, with one member; stays as it is.
        num_new_before: P.
        num_new: Q.
        steps: how large candidates are.
        generator: of the first directions, on the CPU.
    """

    def __init__(self, block: ConvBlock, num_new_before: int, num_new: int, steps: Steps, generator: Generator) -> None:
        super().__init__(block.conv.weight.detach()[0], steps)
        out_channels, in_channels = self.weight.shape[:2]
        self.norm_weight, self.norm_bias = block.norm.weight.detach()[0], block.norm.bias.detach()[0]
        self.new_norm = nn.BatchNorm2d(num_new, affine=False, momentum=None).to(self.weight)
        lengths = self.weight.flatten(1).norm(dim=1)
        self.split_lengths = steps.split * lengths.view(-1, 1, 1, 1)
        self.new_length = lengths.square().mean().sqrt()
        kernel = self.weight.shape[2:]
        self.split = random_directions((out_channels, in_channels, *kernel), self.weight, generator)
        self.new = random_directions((num_new, in_channels, *kernel), self.weight, generator)
        self.outgoing = random_directions((num_new_before, out_channels, *kernel), self.weight, generator)
        self.set_path(1.0)

    def set_path(self, position: float) -> tuple[Tensor, Tensor]:
        """Put all candidates at one position of their paths. Returns the positions: (O) of splits, (Q) of new ones."""
        self.split_path = torch.full_like(self.split[:, 0, 0, 0], position, requires_grad=True)
        self.new_path = torch.full_like(self.new[:, 0, 0, 0], position, requires_grad=True)
        return self.split_path, self.new_path

    def split_change(self) -> Tensor:
        """Return d of every channel, (O, I, 3, 3)."""
        return self.split * self.split_lengths

    def new_weight(self) -> Tensor:
        """Return incoming weights of the new channels, (Q, I, 3, 3); batch norm makes their length immaterial."""
        return self.new * self.new_length

    def forward(self, x: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        """Map images, (B, I, H, W), or what the block before returns, (B, 2 I + P, H, W), to (B, 2 O + Q, H, W)."""
        out_channels, in_channels = self.weight.shape[:2]
        weights = torch.cat([self.weight, self.split_change(), self.new_weight()])
        heard, new_before = join_halves(x, in_channels)
        old, change, new = F.conv2d(heard, weights, padding=1).split([out_channels, out_channels, len(self.new)], dim=1)
        if len(self.outgoing):
            old = old + F.conv2d(new_before, self.outgoing_weight(), padding=1)
        change = change * self.split_path[:, None, None]
        halves = [F.relu(self._norm(half)) for half in (old + change, old - change)]
        return torch.cat([*halves, F.relu(self.new_norm(new)) * self.new_path[:, None, None]], dim=1)

    def _norm(self, x: Tensor) -> Tensor:
        """Normalise by the batch, as in training: a constant shift that training takes out again is no gain."""
        return F.batch_norm(x, None, None, self.norm_weight, self.norm_bias, training=True, eps=BATCH_NORM_EPS)


class CandidateClassifier(CandidateLayer):
    """The linear layer behind the last candidates; arguments as those of `CandidateBlock`."""

    def __init__(self, classifier: MemberLinear, num_new_before: int, steps: Steps, generator: Generator) -> None:
        super().__init__(classifier.weight.detach()[0], steps)
        self.bias = classifier.bias.detach()[0]
        self.outgoing = random_directions((num_new_before, len(self.weight)), self.weight, generator)

    def forward(self, features: Tensor) -> Tensor:
        """Map (1, B, 2 I + P) to (1, B, K)."""
        old, new = join_halves(features[0], self.weight.size(1))
        weight = torch.cat([self.weight, self.outgoing_weight()], dim=1)
        return F.linear(torch.cat([old, new], dim=1), weight, self.bias)[None]


class CandidateVGG(VGG):
    """A network with candidates in every layer; its only parameters are their directions, each of length 1.

    Args:
        network: with `ConvBlock`s and one member; stays as it is.
        num_new: Q of each convolution.
        steps: how large candidates are.
        generator: of the first directions, on the CPU.
    """

    def __init__(self, network: VGG, num_new: Sequence[int], steps: Steps, generator: Generator) -> None:
        old = conv_blocks(network)
        super().__init__(
            *outer_sizes(network),
            [block.conv.weight.size(1) for block in old],
            make_block=lambda layer, _before, _after: CandidateBlock(
                old[layer], num_new[layer - 1] if layer else 0, num_new[layer], steps, generator
            ),
            variant=network.variant,
        )
        self.add_module("classifier", CandidateClassifier(network.classifier, num_new[-1], steps, generator))

    def layers(self) -> Iterator[CandidateBlock]:
        """Iterate over the convolutions."""
        for block in self.blocks:
            assert isinstance(block, CandidateBlock)
            yield block


def join_halves(x: Tensor, num_old: int) -> tuple[Tensor, Tensor]:
    """Return the means of both halves of each old channel, and the new channels behind them.

    Not before here: a max pool between the layers treats each half by itself, as it will once they are channels.

    Args:
        x: (B, 2 I + P, …), or (B, I, …) images, which have no halves.
        num_old: I.
    """
    if x.size(1) == num_old:
        return x, x[:, num_old:]
    first, second, new = x.split([num_old, num_old, x.size(1) - 2 * num_old], dim=1)
    return (first + second) / 2, new


def conv_blocks(network: VGG) -> list[ConvBlock]:
    """Return the blocks of a plain network with one member."""
    assert network.num_members == 1
    blocks = [block for block in network.blocks if isinstance(block, ConvBlock)]
    assert len(blocks) == len(network.blocks)
    return blocks


def outer_sizes(network: VGG) -> tuple[tuple[int, int, int], int]:
    """Return (C, H, W) of the smallest images that a network takes, and K."""
    image_channels = conv_blocks(network)[0].conv.weight.size(2)
    return (image_channels, SMALLEST_IMAGE, SMALLEST_IMAGE), network.classifier.bias.size(1)


def random_directions(shape: Sequence[int], like: Tensor, generator: Generator) -> nn.Parameter:
    """Draw a direction of length 1 for each candidate: ``shape`` is their number, then the shape of a direction.

    On the CPU, so that every device gets the same ones, then of the type and on the device of ``like``.
    """
    return nn.Parameter(unit_length(torch.randn(*shape, generator=generator)).to(like))


def unit_length(directions: Tensor) -> Tensor:
    """Scale each candidate's direction to length 1; one of length 0 stays so."""
    return F.normalize(directions.flatten(1)).view_as(directions)


@torch.no_grad()
def widen_vgg(network: VGG, candidates: CandidateVGG, growth: Sequence[KeptCandidates]) -> VGG:
    """Return a network of one member, which stays as it is, with those of its candidates in it that are kept."""
    before = [_NOTHING, *growth[:-1]]
    state = {}
    for number, (old, block) in enumerate(zip(conv_blocks(network), candidates.layers(), strict=True)):
        kept = growth[number]
        state[f"blocks.{number}.conv.weight"] = _wider_convolution(block, before[number], kept)
        for name, values in _wider_norm(old.norm, block, kept).items():
            state[f"blocks.{number}.norm.{name}"] = values
    head = candidates.get_submodule("classifier")
    assert isinstance(head, CandidateClassifier)
    state["classifier.weight"] = _wider_inputs(head.weight, head.outgoing_weight(), growth[-1])
    state["classifier.bias"] = head.bias
    channels = [len(state[f"blocks.{number}.norm.weight"]) for number in range(len(growth))]
    grown = VGG(*outer_sizes(network), channels, variant=network.variant).to(network.classifier.weight)
    grown.load_member_state(0, {name: tensor[None] for name, tensor in state.items()})
    return grown.train(network.training)


def _wider_convolution(block: CandidateBlock, before: KeptCandidates, kept: KeptCandidates) -> Tensor:
    """Return the (O + S + Q, I + T + P, 3, 3) weight."""
    change = block.split_change()[kept.split]
    first_halves = block.weight.index_add(0, _rows(kept.split, block.weight), change)
    weight = torch.cat([first_halves, block.weight[kept.split] - change, block.new_weight()[kept.new]])
    # Both halves of a channel hear from the new channels before what the whole one did, new ones hear nothing yet.
    outgoing = block.outgoing_weight()
    silent = outgoing.new_zeros(len(kept.new), *outgoing.shape[1:])
    return _wider_inputs(weight, torch.cat([outgoing, outgoing[kept.split], silent]), before)


def _wider_inputs(weight: Tensor, outgoing: Tensor, before: KeptCandidates) -> Tensor:
    """Return a weight for the inputs of a layer whose layer before has grown.

    Args:
        weight: (O, I, …).
        outgoing: (O, all new channels before, …).
        before: T inputs that were split and P new ones.

    Returns:
        (O, I + T + P, …).
    """
    halves = weight[:, before.split] / 2
    first_halves = weight.index_copy(1, _rows(before.split, weight), halves)
    return torch.cat([first_halves, halves, outgoing[:, before.new]], dim=1)


def _wider_norm(old: MemberBatchNorm2d, block: CandidateBlock, kept: KeptCandidates) -> dict[str, Tensor]:
    """Return parameters and statistics of O + S + Q channels; halves have those of the whole, new ones measured."""
    new = block.new_norm
    assert new.running_mean is not None and new.running_var is not None
    of_new = {
        "weight": torch.ones_like(new.running_mean),
        "bias": torch.zeros_like(new.running_mean),
        "running_mean": new.running_mean,
        "running_var": new.running_var,
    }
    return {
        name: torch.cat([values[0], values[0][kept.split], of_new[name][kept.new]])
        for name, values in old.state_dict().items()
    }


def _rows(indices: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(indices, dtype=torch.int64, device=like.device)


def grow_firefly(
    network: VGG,
    batches: Batches,
    first_channels: Sequence[int],
    share: float,
    generator: Generator,
    steps: Steps = DEFAULT_STEPS,
    share_of: str = "parameters",
) -> VGG:
    """Return a wider network that computes nearly the same.

    Args:
        network: of `ConvBlock`s and one member, trained; stays as it is.
        batches: images, (B, C, H, W) or (1, B, C, H, W), normalised, and their labels, (B) or (1, B) int64, on the
            network's device. They are gone through twice, so a list will do and a generator will not.
        first_channels: of each convolution, before any growth.
        share: parameters or neurons to add, as a part of those of the network before any growth; the paper: 0.25.
        generator: of the first directions, on the CPU.
        steps: how large candidates are.
        share_of: what ``share`` counts, ``parameters`` or ``neurons``.

    Returns:
        The grown network, on the same device, in the same mode. Its parameters are new ones: it needs a new optimizer.

    Raises:
        AlmaError: the share is not above 0 or less than a channel, or the network's loss is not a number.
    """
    (image_channels, *_), num_classes = outer_sizes(network)
    num_added = amount_to_add(image_channels, first_channels, num_classes, share, share_of)
    candidates = candidates_of(network, first_channels, share, generator, steps)
    tune_directions(candidates, batches)
    scores = score_candidates(candidates, batches)
    if share_of == "neurons":
        growth = select_neurons(scores, round(num_added))
    else:
        growth = select_candidates(scores, image_channels, num_classes, num_added)
    if not any(layer.split or layer.new for layer in growth):
        raise _too_small(share, num_added)
    return widen_vgg(network, candidates, growth)


def amount_to_add(
    image_channels: int, first_channels: Sequence[int], num_classes: int, share: float, share_of: str = "parameters"
) -> float:
    """Return how many parameters or neurons a share is, for images of C channels and K classes; see `grow_firefly`.

    Raises:
        AlmaError: the share is not above 0, or too small for any channel of the network before its growth.
    """
    if not 0 < share < math.inf:
        raise AlmaError(f"--grow-share {share}: a number above 0 is needed; the paper: 0.25")
    if share_of == "neurons":
        num_neurons = share * sum(first_channels)
        if round(num_neurons) < 1:
            raise AlmaError(
                f"--grow-share {share}: less than one of {sum(first_channels)} neurons; give a larger share"
            )
        return num_neurons
    first_size = num_chain_parameters(image_channels, first_channels, num_classes)
    wider = ([size + (layer == one) for layer, size in enumerate(first_channels)] for one in range(len(first_channels)))
    smallest = min(num_chain_parameters(image_channels, each, num_classes) for each in wider) - first_size
    if smallest > 2 * share * first_size:  # nothing would be nearer to what is asked
        raise _too_small(share, share * first_size)
    return share * first_size


def candidates_of(
    network: VGG, first_channels: Sequence[int], share: float, generator: Generator, steps: Steps = DEFAULT_STEPS
) -> CandidateVGG:
    """Return the network with all candidates of one step; see `grow_firefly`."""
    num_new = [max(FEWEST_NEW, math.ceil(share * channels)) for channels in first_channels]
    return CandidateVGG(network, num_new, steps, generator)


def tune_directions(candidates: CandidateVGG, batches: Batches, rate: float = TUNING_RATE) -> None:
    """Turn every direction, in place, a little against its gradient, once for each batch.

    Directions stay of length 1 and gradients are scaled to length 1, so that the rate, the length of an update, means
    the same for all of them.
    """
    directions = [direction for direction in candidates.parameters() if len(direction)]
    for images, labels in batches:
        gradients = torch.autograd.grad(_loss(candidates, images, labels), directions)
        with torch.no_grad():
            for direction, gradient in zip(directions, gradients, strict=True):
                direction.copy_(unit_length(direction - rate * unit_length(gradient)))


def score_candidates(candidates: CandidateVGG, batches: Batches) -> list[LayerScores]:
    """Return by how much each candidate would change the loss, in nats.

    It is the gradient of the mean loss at the middle of all paths, taken together: exact where the loss is linear or
    quadratic along them. (Wu et al. take the mean of several such points.) In passing, the statistics of the new
    channels' batch norms are measured.

    Raises:
        AlmaError: the loss is not a number.
    """
    paths: list[Tensor] = []
    for layer in candidates.layers():
        layer.new_norm.reset_running_stats()
        paths += layer.set_path(0.5)
    totals, num_images = [torch.zeros_like(path) for path in paths], 0
    for images, labels in batches:
        gradients = torch.autograd.grad(_loss(candidates, images, labels), paths)
        for total, gradient in zip(totals, gradients, strict=True):
            total += gradient * labels.numel()
        num_images += labels.numel()
    if not num_images:
        raise ValueError("no images to score candidates with; batches must be something that one can go through twice")
    scores = [(total / num_images).tolist() for total in totals]
    if not all(math.isfinite(score) for of_path in scores for score in of_path):
        raise AlmaError("growth: the network's loss is not a number, so it cannot grow; train with a lower --lr")
    return [LayerScores(split, new) for split, new in zip(scores[::2], scores[1::2], strict=True)]


def _loss(candidates: CandidateVGG, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(candidates(images)[0], labels.flatten())


def _too_small(share: float, num_added: float) -> AlmaError:
    return AlmaError(
        f"--grow-share {share}: {num_added:.0f} parameters to add, less than one channel has; give a larger share; the "
        "paper: 0.25"
    )


def grow_on_images(
    network: VGG,
    images: Tensor,
    labels: Tensor,
    batch_size: int,
    first_channels: Sequence[int],
    share: float,
    generator: Generator,
    share_of: str = "parameters",
) -> tuple[VGG, int]:
    """Return a wider network, grown on so many normalised images at a time, and the operations that this took.

    See `grow_firefly` for what the other arguments mean.
    """
    flops = growth_flops(network, first_channels, share, len(images), images.shape[1:])
    sizes = batch_sizes(len(images), batch_size)
    batches = list(zip(images.split(sizes), labels.split(sizes), strict=True))
    return grow_firefly(network, batches, first_channels, share, generator, share_of=share_of), flops


def growth_flops(
    network: VGG, first_channels: Sequence[int], share: float, num_images: int, image_shape: Sequence[int]
) -> int:
    """Count the operations of one growth step: it goes over its images as training does, with all candidates.

    Each pass is a forward and a backward pass of the network with its candidates, counted as `NetworkFlops.train` is.
    What growing a mixture looks at, the validation loss, counts as little as other validation.
    """
    candidates = candidates_of(network, first_channels, share, torch.Generator().manual_seed(0))
    return NUM_PASSES * num_images * count_flops(candidates, image_shape).train
