"""The models that are built from a checkpoint, by name: other architectures are refused, and unsafe options.

Stock fairseq hands strings in the options of many architectures to Python's ``eval``; of ``transformer_lm`` these
options are refused. Shapes are compared where a model is built, by `refuse_other_shapes`. No fairseq here.
"""

import re
from types import SimpleNamespace
from typing import Any, Mapping

from torch import Tensor, nn

from fairseq_alma.checkpoints import JOINT_MODEL, UnfitCheckpoint
from fairseq_alma.checkpoints.model_options import SWITCH_SIZES, TRANSFORMER_SIZES
from fairseq_alma.errors import AlmaError

ENSEMBLE_ARCH = "alma_ensemble"
IMAGE_ARCHITECTURES = ("alma_mlp", "alma_vgg", "alma_moe_mlp", "alma_moe_vgg", "alma_firefly_vgg")
_STOCK_SIZES = (
    "big wiki103 baevski_wiki103 gbw baevski_gbw gpt gpt2_small gpt2_tiny gpt2_medium gpt2_big gpt2_big_wide "
    "gpt2_bigger gpt3_small gpt3_medium gpt3_large gpt3_xl gpt3_2_7 gpt3_6_7 gpt3_13 gpt3_175"
)
TRANSFORMER_LMS = ("transformer_lm", *(f"transformer_lm_{size}" for size in _STOCK_SIZES.split()))
SINGLE_MODELS = (*SWITCH_SIZES, *TRANSFORMER_SIZES, *TRANSFORMER_LMS, *IMAGE_ARCHITECTURES)
_CUTOFFS = re.compile(r"\d{1,9}(,\d{1,9})*")
_LEFT_OUT = (".embed_positions._float_tensor", ".embed_positions.weights", "decoder.version")  # by fairseq too
Weights = Mapping[str, Tensor]


def check_config(config: Any) -> None:
    """Raise UnfitCheckpoint unless ``cfg.model`` is one of a model that may be built, with all its members."""
    name = config.get("_name") if isinstance(config, dict) else None
    if name == ENSEMBLE_ARCH:
        for entry in config["members"]:
            if "config" in entry:
                _check_member(entry["config"])
    elif name == JOINT_MODEL:
        if config.get("member_arch") not in IMAGE_ARCHITECTURES:
            raise UnfitCheckpoint(f"members of architecture {config.get('member_arch')!r}, which cannot be members")
    else:
        _check_single(config, name)


def _check_member(config: Any) -> None:
    if isinstance(config, dict) and config.get("_name") == ENSEMBLE_ARCH:
        raise UnfitCheckpoint("an ensemble of ensembles, as version 0.2.0 wrote them; join its members anew")
    check_config(config)


def _check_single(config: Any, name: Any) -> None:
    if name not in SINGLE_MODELS:
        raise UnfitCheckpoint(
            f"architecture {str(name)[:60]}, but models here are alma_… or transformer_lm…: {str(name)[:60]!r} cannot "
            "grow, and is not built from a file"
        )
    if config.get("mup"):
        raise UnfitCheckpoint("trained with --mup by version 0.2.0, which this version does not compute; train it anew")
    if name in TRANSFORMER_LMS:
        cutoffs = [config.get(f"adaptive_{part}_cutoff") for part in ("input", "softmax")]
        if config.get("character_embeddings") or config.get("decoder_xformers_att_config") is not None:
            raise UnfitCheckpoint("character embeddings and xformers are not built from a file")
        if any(each is not None and not _CUTOFFS.fullmatch(str(each)) for each in cutoffs):
            raise UnfitCheckpoint(f"adaptive cutoffs {str(cutoffs)[:60]}, whole numbers with commas are needed")


def read_options(config: Mapping[str, Any]) -> SimpleNamespace:
    """Return ``cfg.model`` as attributes."""
    return SimpleNamespace(**config)


def other_shapes(found: Mapping[str, Any], needed: Mapping[str, Any]) -> str:
    """Describe how the shapes of a checkpoint's tensors differ from those of its model; empty if they do not.

    This is the one comparison: of a file that is read, of a model that loads it, of one that is trained on or grows.
    """
    found = {name: shape for name, shape in found.items() if name in needed or not name.endswith(_LEFT_OUT)}
    missing, left_over = sorted(needed.keys() - found.keys()), sorted(found.keys() - needed.keys())
    wrong = sorted(name for name in needed.keys() & found.keys() if tuple(needed[name]) != tuple(found[name]))
    for problem, names in (("lacks", missing), ("has beyond its configuration", left_over), ("has misshapen", wrong)):
        if names:
            shapes = f" ({tuple(found[names[0]])}, not {tuple(needed[names[0]])})" if names is wrong else ""
            return f"the checkpoint {problem} {len(names)} tensor(s), {names[0]} the first{shapes}"
    return ""


def refuse_other_shapes(weights: Weights, model: nn.Module, path: str, remedy: str) -> None:
    """Raise AlmaError unless weights have exactly the names and shapes of a model's, which may be on ``meta``."""
    shapes = ({name: tensor.shape for name, tensor in each.items()} for each in (weights, model.state_dict()))
    if differing := other_shapes(*shapes):
        raise AlmaError(f"{path}: {differing}; {remedy}")
