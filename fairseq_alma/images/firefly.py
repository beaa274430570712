"""Firefly: a VGG network grows where its gradients ask for it, in width, in depth, or in both (Wu et al. 2020).

One step, after section 2 of Wu et al.:

1. every channel of every layer may be split and every layer may get new channels: `CandidateVGG`. A *split* makes a
   channel two, with incoming weights w + d and w - d and half of the outgoing weights each; a *new* channel has
   incoming weights of its own and small outgoing ones. All candidates are there at once, which costs about three times
   the network alone: the two halves of a split have the same outgoing weights, so that a layer may take their mean for
   both. Behind every ReLU there may be a *new layer*, the identity and a small change of it. A factor for each
   candidate, its *path*, leads from the network as it is, 0, to the candidate, 1;
2. all directions are tuned together on the images of the stage, the network itself left as it is;
3. a candidate's score is the change of the loss along its path, from the gradient at the middle of it. At its start
   the gradient of a split is 0, as its two halves cancel each other: what it gains is of second order;
4. the best candidates over all layers are kept, until the asked number of parameters is added (`select_candidates`),
   or of neurons, as in the paper's released code (`select_neurons`). The channels of a grown layer are the old ones,
   then the second halves of those that were split, then the new ones. New layers begin as the identity itself: unlike
   those of a channel, copies of one another, their weights all have gradients of their own.

Every step adds the same share of the *first* size, so that a network grows linearly: "at every growth phase, we add
approximately a quarter of the initial number of parameters" (paper v5, Appendix B.1; section 4 calls this learner FF).

Letters: B images, I input and O output channels of a layer, P and Q new channels of the layer before and of this one,
T and S channels that are split there and here, H and W height and width, K classes.
"""

import math
from functools import partial
from typing import Callable, Iterable, Iterator, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.checkpoints.model_options import LAYERS
from fairseq_alma.errors import AlmaError
from fairseq_alma.images.networks import (
    BATCH_NORM_EPS,
    NUM_CONVOLUTIONS,
    SMALLEST_IMAGE,
    VGG,
    ConvBlock,
    MemberBatchNorm2d,
    MemberLinear,
    count_flops,
    deepen_vgg,
)
from fairseq_alma.images.stage_training import batch_sizes


class LayerScores(NamedTuple):
    """The candidates of one layer, each with the change of the loss that it promises; lower is better.

    Attributes:
        split: of each channel of the layer, which may become two.
        new: of each new channel that the layer may get.
        behind: of a new layer behind it; empty if there may be none.
    """

    split: Sequence[float]
    new: Sequence[float]
    behind: Sequence[float] = ()


class KeptCandidates(NamedTuple):
    """The candidates of one layer that are kept.

    Attributes:
        split: channels that become two, in ascending order.
        new: numbers of new channels, in ascending order.
        has_behind: whether there is a new layer behind it.
    """

    split: list[int]
    new: list[int]
    has_behind: bool = False


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


SizeOf = Callable[[Sequence[int]], int]
"""Returns the size of a chain of convolutions, of which it is given the channels."""


def size_of_chain(share_of: str, image_channels: int, num_classes: int) -> SizeOf:
    """Return what counts ``parameters`` or ``neurons``."""
    if share_of == "neurons":
        return sum
    return partial(num_chain_parameters, image_channels, num_classes=num_classes)


def select_candidates(
    scores: Sequence[LayerScores], channels: Sequence[int], size_of: SizeOf, num_added: float
) -> list[KeptCandidates]:
    """Take candidates in the order of their scores until the next channel would miss the asked size by more.

    Wu et al. 2020 choose in the same way ("greedy selection"), with a number of neurons as the limit. A new layer,
    which is many channels at once, counts by the part of its score that falls to what one of the layer before it costs;
    one that would miss the asked size by more is left out.

    Args:
        scores: of each layer.
        channels: of each layer.
        size_of: what counts.
        num_added: parameters or neurons to add, as nearly as whole channels and layers allow.

    Returns:
        What to keep in each layer; nothing at all if every candidate is more than twice what is asked.
    """
    kept: list[tuple[list[int], list[int], list[int]]] = [([], [], []) for _ in scores]
    size = size_of(channels)
    goal = size + num_added
    for _, layer, kind, index in sorted(_ranked(scores, channels, size_of)):
        kept[layer][kind].append(index)
        next_size = size_of(
            [
                old + len(split) + len(new)
                for old, (split, new, behind) in zip(channels, kept, strict=True)
                for _ in range(1 + len(behind))
            ]
        )
        if next_size - goal <= goal - size:
            size = next_size
            continue
        kept[layer][kind].pop()
        if kind != _BEHIND:
            break
    return [KeptCandidates(sorted(split), sorted(new), bool(behind)) for split, new, behind in kept]


_BEHIND = LayerScores._fields.index("behind")


def _ranked(
    scores: Sequence[LayerScores], channels: Sequence[int], size_of: SizeOf
) -> Iterator[tuple[float, int, int, int]]:
    """Yield score, layer, kind and index of all candidates, comparable scores."""
    first = size_of(channels)
    for layer, of_layer in enumerate(scores):
        below, here, above = channels[:layer], channels[layer], channels[layer + 1 :]
        wider, deeper = size_of([*below, here + 1, *above]), size_of([*below, here, here, *above])
        for kind, of_kind in enumerate(of_layer):
            part = (wider - first) / (deeper - first) if kind == _BEHIND else 1
            yield from ((part * score, layer, kind, index) for index, score in enumerate(of_kind))


TUNING_RATE = 0.1
FEWEST_NEW = 4  # candidates for a layer's new channels, however narrow it is
NUM_PASSES = 2  # forward and backward of the candidates over the images: one tunes directions, one scores

Batches = Iterable[tuple[Tensor, Tensor]]
_NOTHING = KeptCandidates([], [])


class Steps(NamedTuple):
    """How far candidates lead away from the network; small, so that it computes nearly the same with them.

    Attributes:
        split: length of a split's change d, and of a new layer's change of the identity, as a part of the length of the
            channel's weights w, which the identity has of length 1.
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
        kinds: which candidates there are.
        steps: how large candidates are.
        generator: of the first directions, on the CPU.
    """

    def __init__(
        self, block: ConvBlock, num_new_before: int, num_new: int, kinds: "Kinds", steps: Steps, generator: Generator
    ) -> None:
        super().__init__(block.conv.weight.detach()[0], steps)
        out_channels, in_channels = self.weight.shape[:2]
        self.norm_weight, self.norm_bias = block.norm.weight.detach()[0], block.norm.bias.detach()[0]
        self.new_norm = nn.BatchNorm2d(num_new, affine=False, momentum=None).to(self.weight)
        self.output = nn.BatchNorm2d(out_channels + num_new, affine=False, momentum=None).to(self.weight)
        lengths = self.weight.flatten(1).norm(dim=1)
        num_splits = out_channels if kinds.in_width else 0
        self.split_lengths = steps.split * lengths[:num_splits].view(-1, 1, 1, 1)
        self.new_length = lengths.square().mean().sqrt()
        kernel = self.weight.shape[2:]
        self.split = random_directions((num_splits, in_channels, *kernel), self.weight, generator)
        self.new = random_directions((num_new, in_channels, *kernel), self.weight, generator)
        self.outgoing = random_directions((num_new_before, out_channels, *kernel), self.weight, generator)
        num_behind = out_channels if kinds.in_depth else 0
        self.behind = random_directions((num_behind, out_channels, *kernel), self.weight, generator)
        self.behind_length = steps.split
        self.set_path(1.0)

    def set_path(self, position: float) -> tuple[Tensor, Tensor, Tensor]:
        """Put all candidates at one position of their paths.

        Returns:
            The positions: (O) of splits, (Q) of new ones, (O) of the channels of a layer behind; (0) where there are
            no such candidates.
        """
        directions = (self.split, self.new, self.behind)
        paths = [torch.full_like(each[:, 0, 0, 0], position, requires_grad=True) for each in directions]
        self.split_path, self.new_path, self.behind_path = paths
        return self.split_path, self.new_path, self.behind_path

    def split_change(self) -> Tensor:
        """Return d of every channel that may be split, (O, I, 3, 3)."""
        return self.split * self.split_lengths

    def new_weight(self) -> Tensor:
        """Return incoming weights of the new channels, (Q, I, 3, 3); batch norm makes their length immaterial."""
        return self.new * self.new_length

    def forward(self, x: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        """Map images, (B, I, H, W), or what the block before returns, (B, 2 I + P, H, W), to (B, 2 O + Q, H, W).

        Where nothing may be split, there are no halves: I and O channels of old ones.
        """
        out_channels, in_channels = self.weight.shape[:2]
        weights = torch.cat([self.weight, self.split_change(), self.new_weight()])
        heard, new_before = join_halves(x, in_channels)
        sizes = [out_channels, len(self.split), len(self.new)]
        old, change, new = F.conv2d(heard, weights, padding=1).split(sizes, dim=1)
        if len(self.outgoing):
            old = old + F.conv2d(new_before, self.outgoing_weight(), padding=1)
        halves = [old]
        if len(self.split):
            change = change * self.split_path[:, None, None]
            halves = [old + change, old - change]
        halves = [F.relu(self._norm(half)) for half in halves]
        new = F.relu(self.new_norm(new)) if len(self.new) else new
        if len(self.behind):
            self.output(torch.cat([halves[0], new], dim=1).detach())
            halves = self._through_layer_behind(halves)
        return torch.cat([*halves, new * self.new_path[:, None, None]], dim=1)

    def _through_layer_behind(self, halves: Sequence[Tensor]) -> list[Tensor]:
        """Return what a layer behind makes of both halves, or of what is not split; new channels pass it unchanged.

        Its batch norm takes out what it brings in mean and length, as that of the layer will in training.
        """
        weight = self.behind * self.behind_length
        change = F.conv2d(torch.stack(tuple(halves)).mean(dim=0), weight, padding=1) * self.behind_path[:, None, None]
        changed = []
        for half in halves:
            variance, mean = torch.var_mean(half, dim=(0, 2, 3), correction=0)
            scale = (variance + BATCH_NORM_EPS).sqrt()
            out = F.batch_norm(half + change, None, None, scale, mean, training=True, eps=BATCH_NORM_EPS)
            changed.append(F.relu(out))
        return changed

    def _norm(self, x: Tensor) -> Tensor:
        """Normalise by the batch, as in training: a constant shift that training takes out again is no gain."""
        return F.batch_norm(x, None, None, self.norm_weight, self.norm_bias, training=True, eps=BATCH_NORM_EPS)


class Kinds(NamedTuple):
    """Which candidates there are: splits and new channels, new layers, or all of them."""

    in_width: bool
    in_depth: bool


KINDS = {"width": Kinds(True, False), "depth": Kinds(False, True), "both": Kinds(True, True)}
"""By what a step adds."""


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
        grow_in: what candidates there are: in ``width``, in ``depth`` or in ``both``.
    """

    def __init__(
        self, network: VGG, num_new: Sequence[int], steps: Steps, generator: Generator, grow_in: str = "width"
    ) -> None:
        old = conv_blocks(network)
        super().__init__(
            *outer_sizes(network),
            [block.conv.weight.size(1) for block in old],
            make_block=lambda layer, _before, _after: CandidateBlock(
                old[layer], num_new[layer - 1] if layer else 0, num_new[layer], KINDS[grow_in], steps, generator
            ),
            variant=network.variant,
            groups=network.groups,
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
    grown = VGG(*outer_sizes(network), channels, variant=network.variant, groups=network.groups)
    grown.to(network.classifier.weight)
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


def _measured_output(block: CandidateBlock, kept: KeptCandidates) -> tuple[Tensor, Tensor]:
    """Return mean and variance of what the O + S + Q channels of a layer send on, from the last pass."""
    measured = block.output
    assert measured.running_mean is not None and measured.running_var is not None
    num_old = len(block.weight)
    rows = [*range(num_old), *kept.split, *(num_old + each for each in kept.new)]
    return measured.running_mean[rows], measured.running_var[rows]


def _rows(indices: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(indices, dtype=torch.int64, device=like.device)


def grow_firefly(
    network: VGG,
    batches: Batches,
    first_channels: int,
    share: float,
    generator: Generator,
    steps: Steps = DEFAULT_STEPS,
    share_of: str = "parameters",
    grow_in: str = "width",
) -> VGG:
    """Return a larger network that computes nearly the same, in depth alone the same.

    Args:
        network: of `ConvBlock`s and one member, trained; stays as it is.
        batches: images, (B, C, H, W) or (1, B, C, H, W), normalised, and their labels, (B) or (1, B) int64, on the
            network's device. They are gone through twice, so a list will do and a generator will not.
        first_channels: of each of the sixteen convolutions, before any growth.
        share: parameters or neurons to add, as a part of those of the network before any growth; the paper: 0.25.
        generator: of the first directions, on the CPU.
        steps: how large candidates are.
        share_of: what ``share`` counts, ``parameters`` or ``neurons``.
        grow_in: what is added: neurons (``width``), layers (``depth``) or ``both``.

    Returns:
        The grown network, on the same device, in the same mode. Its parameters are new ones: it needs a new optimizer.

    Raises:
        AlmaError: the share is not above 0 or less than a channel, or the network's loss is not a number.
    """
    (image_channels, *_), num_classes = outer_sizes(network)
    num_added = amount_to_add(image_channels, first_channels, num_classes, share, share_of, grow_in)
    candidates = candidates_of(network, first_channels, share, generator, steps, grow_in)
    tune_directions(candidates, batches)
    scores = score_candidates(candidates, batches)
    channels = [len(block.weight) for block in candidates.layers()]
    size_of = size_of_chain(share_of, image_channels, num_classes)
    growth = select_candidates(scores, channels, size_of, num_added)
    if not any(kept.split or kept.new or kept.has_behind for kept in growth):
        raise _too_small(share, num_added, share_of, grow_in)
    num_layers = len(growth) + sum(kept.has_behind for kept in growth)
    if num_layers > LAYERS.most:
        raise AlmaError(
            f"--grow-share {share} --grow-in {grow_in}: {num_layers} layers, at most {LAYERS.most} are possible; give "
            "a smaller share, or grow less often (--grow-every)"
        )
    wide = widen_vgg(network, candidates, growth)
    measured = {
        number: _measured_output(block, kept)
        for number, (block, kept) in enumerate(zip(candidates.layers(), growth, strict=True))
        if kept.has_behind
    }
    return deepen_vgg(wide, measured) if measured else wide


def amount_to_add(
    image_channels: int,
    first_channels: int,
    num_classes: int,
    share: float,
    share_of: str = "parameters",
    grow_in: str = "width",
) -> float:
    """Return how many parameters or neurons a share is, for images of C channels and K classes; see `grow_firefly`.

    Raises:
        AlmaError: the share is not above 0, or too small for any channel, or layer, of the network before its growth.
    """
    if not 0 < share < math.inf:
        raise AlmaError(f"--grow-share {share}: a number above 0 is needed; the paper: 0.25")
    first = [first_channels] * NUM_CONVOLUTIONS
    size_of = size_of_chain(share_of, image_channels, num_classes)
    first_size = size_of(first)
    num_added: float = share * first_size
    if share_of == "neurons":
        num_added = round(num_added)
    larger = [[first_channels + 1, *first[1:]], [*first[:-1], first_channels + 1]] if KINDS[grow_in].in_width else []
    larger += [[*first, first_channels]] if KINDS[grow_in].in_depth else []
    if min(map(size_of, larger)) - first_size > 2 * num_added:  # nothing would be nearer to what is asked
        raise _too_small(share, num_added, share_of, grow_in)
    return num_added


def candidates_of(
    network: VGG,
    first_channels: int,
    share: float,
    generator: Generator,
    steps: Steps = DEFAULT_STEPS,
    grow_in: str = "width",
) -> CandidateVGG:
    """Return the network with all candidates of one step; see `grow_firefly`."""
    num_new = max(FEWEST_NEW, math.ceil(share * first_channels)) if KINDS[grow_in].in_width else 0
    return CandidateVGG(network, [num_new] * len(network.blocks), steps, generator, grow_in)


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
    channels' batch norms, and of what layers send on, are measured.

    Raises:
        AlmaError: the loss is not a number.
    """
    paths: list[Tensor] = []
    for layer in candidates.layers():
        layer.new_norm.reset_running_stats()
        layer.output.reset_running_stats()
        paths += layer.set_path(0.5)
    totals, num_images = [torch.zeros_like(path) for path in paths], 0
    for images, labels in batches:
        gradients = torch.autograd.grad(_loss(candidates, images, labels), paths, materialize_grads=True)
        for total, gradient in zip(totals, gradients, strict=True):
            total += gradient * labels.numel()
        num_images += labels.numel()
    if not num_images:
        raise ValueError("no images to score candidates with; batches must be something that one can go through twice")
    scores: list[list[float]] = [(total / num_images).tolist() for total in totals]
    if not all(math.isfinite(score) for of_path in scores for score in of_path):
        raise AlmaError("growth: the network's loss is not a number, so it cannot grow; train with a lower --lr")
    each = zip(scores[::3], scores[1::3], scores[2::3], strict=True)
    return [LayerScores(split, new, [sum(behind)] if behind else ()) for split, new, behind in each]


def _loss(candidates: CandidateVGG, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(candidates(images)[0], labels.flatten())


def _too_small(share: float, num_added: float, share_of: str, grow_in: str) -> AlmaError:
    smallest = "channel" if KINDS[grow_in].in_width else "layer"
    return AlmaError(
        f"--grow-share {share}: {num_added:.0f} {share_of} to add, less than one {smallest} has; give a larger share; "
        "the paper: 0.25"
    )


def grow_on_images(
    network: VGG,
    images: Tensor,
    labels: Tensor,
    batch_size: int,
    first_channels: int,
    share: float,
    generator: Generator,
    share_of: str = "parameters",
    grow_in: str = "width",
) -> tuple[VGG, int]:
    """Return a larger network, grown on so many normalised images at a time, and the operations that this took.

    See `grow_firefly` for what the other arguments mean.
    """
    flops = growth_flops(network, first_channels, share, len(images), images.shape[1:], grow_in)
    sizes = batch_sizes(len(images), batch_size)
    batches = list(zip(images.split(sizes), labels.split(sizes), strict=True))
    return grow_firefly(network, batches, first_channels, share, generator, share_of=share_of, grow_in=grow_in), flops


def growth_flops(
    network: VGG,
    first_channels: int,
    share: float,
    num_images: int,
    image_shape: Sequence[int],
    grow_in: str = "width",
) -> int:
    """Count the operations of one growth step: it goes over its images as training does, with all candidates.

    Each pass is a forward and a backward pass of the network with its candidates, counted as `NetworkFlops.train` is.
    What growing a mixture looks at, the validation loss, counts as little as other validation.
    """
    candidates = candidates_of(network, first_channels, share, torch.Generator().manual_seed(0), grow_in=grow_in)
    return NUM_PASSES * num_images * count_flops(candidates, image_shape).train
