"""Parameters of which each process has a part, loaded from and saved to checkpoints that hold the whole."""

from typing import Any, Iterator, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fairseq_alma.errors import AlmaError


class Spread:
    """How a parameter is spread over the processes that train together.

    Attributes:
        parameter: the part of this process.
        sums_gradients: its gradient is the sum over the processes rather than their mean.
        whole: what `gather` found last, as long as it is needed for a checkpoint.
    """

    sums_gradients = False

    def __init__(self, parameter: Any) -> None:
        self.parameter: nn.Parameter = parameter
        self.whole: Optional[Tensor] = None
        parameter.spread = self
        parameter.expert = True  # fairseq's word for what it must not reduce

    def part_of(self, whole: Tensor) -> Tensor:
        """Return this process's part of a tensor of the whole parameter's shape."""
        raise NotImplementedError

    def gather(self, part: Tensor) -> Optional[Tensor]:
        """Return the whole of a tensor on the CPU of the first process, None in the others; all must call this."""
        raise NotImplementedError

    def own(self, part: Tensor) -> Tensor:
        """Return the numbers of a tensor that are here, of any shape."""
        return part


class Slice(Spread):
    """A slice along the first dimension, as long as those of the others: experts.

    Args:
        whole: the parameter, the same in every process.
        group: the processes; None: all.
    """

    sums_gradients = True  # of the tokens of all processes, which come to where the expert is

    def __init__(self, whole: Tensor, group: Optional[dist.ProcessGroup] = None) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        super().__init__(nn.Parameter(self.part_of(whole.detach())))

    def part_of(self, whole: Tensor) -> Tensor:
        """Return rows r x N / R to (r + 1) x N / R of N, in process r of R."""
        return whole.chunk(self.size)[self.rank].clone()

    def gather(self, part: Tensor) -> Optional[Tensor]:
        """Put the slices behind each other."""
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(part.contiguous(), parts, group=self.group, group_dst=0)
        return None if parts is None else torch.cat([each.cpu() for each in parts])


class Sharded(Spread):
    """A parameter that torch's ``fully_shard`` has made a `DTensor`."""

    def part_of(self, whole: Tensor) -> Tensor:
        """Return the shard, without a word to the other processes."""
        likeness: Any = self.parameter
        whole = whole.detach().to(likeness.device)
        return distribute_tensor(whole, likeness.device_mesh, likeness.placements, src_data_rank=None)

    def gather(self, part: Tensor) -> Optional[Tensor]:
        """Gather the shards in all processes, and keep the whole in the first."""
        assert isinstance(part, DTensor)
        whole = part.full_tensor()
        return whole.detach().cpu() if dist.get_rank() == 0 else None

    def own(self, part: Tensor) -> Tensor:
        """Return the shard as a plain tensor."""
        assert isinstance(part, DTensor)
        return part.to_local()


def spread_of(parameter: Any) -> Optional[Spread]:
    """Return how a parameter is spread, or None if each process has all of it."""
    if isinstance(parameter, DTensor) and not hasattr(parameter, "spread"):
        Sharded(parameter)  # only now: a model that is moved to its device has new parameters
    return getattr(parameter, "spread", None)


def keep_checkpoints_whole(model: nn.Module) -> None:
    """Let a model load weights from whole tensors, and show those that were gathered as its state."""

    def spread() -> Iterator[tuple[str, Spread]]:
        found = ((name, spread_of(each)) for name, each in model.named_parameters(remove_duplicate=False))
        return ((name, each) for name, each in found if each is not None)

    def take_parts(_: Any, state: dict[str, Tensor], prefix: str, *others: Any) -> None:
        for name, each in spread():
            if prefix + name in state:
                state[prefix + name] = each.part_of(state[prefix + name])

    def put_wholes(_: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
        wholes = {prefix + name: each.whole for name, each in spread()}
        if any(each is None for each in wholes.values()):
            raise AlmaError(
                "--no-save-optimizer-state: a model that is spread over processes is put together with its optimizer's "
                "state; leave the option out"
            )
        state.update(wholes)

    model.register_load_state_dict_pre_hook(take_parts)
    model.register_state_dict_post_hook(put_wholes)
