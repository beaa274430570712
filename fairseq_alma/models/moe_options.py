"""Options that the image models with mixtures of experts share."""

from dataclasses import dataclass, field
from typing import Any, Mapping

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from fairseq_alma.growth.gate_tree import GateTree, format_gate_trees, parse_gate_trees
from fairseq_alma.models.alma_mlp import require_positive
from fairseq_alma.modules.images.image_network import ImageNetwork
from fairseq_alma.modules.moe.image_mixtures import mixture_blocks
from fairseq_alma.modules.moe.mixture_block import GATES


@dataclass
class MixtureConfig(FairseqDataclass):
    """Options of mixtures of experts in the layers of an image model."""

    num_experts: int = field(default=1, metadata={"help": "experts in each mixture, of a model that has not grown"})
    gate: ChoiceEnum(GATES) = field(  # type: ignore[valid-type]
        default="soft",
        metadata={"help": "soft: mean of all experts, weighted; hard: one is drawn in training, the best one at test"},
    )
    gate_trees: str = field(
        default="", metadata={"help": "the choices of each mixture as nested lists of expert numbers; growth writes it"}
    )


def trees_of(cfg: MixtureConfig, num_layers: int) -> list[GateTree]:
    """Return the tree of each mixture. Raises AlmaError if the options do not go together."""
    require_positive("--num-experts", cfg.num_experts)
    return parse_gate_trees(cfg.gate_trees, num_layers, cfg.num_experts)


def mixture_options(network: ImageNetwork) -> Mapping[str, Any]:
    """Return the options of `MixtureConfig` that growth has changed."""
    trees = [block.gate.tree for block in mixture_blocks(network)]
    return {"num_experts": trees[0].num_experts, "gate_trees": format_gate_trees(trees)}
