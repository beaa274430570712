"""Check the architecture of a checkpoint against an allow-list, and compare tensor shapes. No fairseq imports.

For many architectures, fairseq passes option strings to Python's ``eval``. This module rejects these architectures, and
the options of ``transformer_lm`` for which fairseq calls ``eval``.
"""

import re
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
# fairseq also ignores these tensors in checkpoints.
_IGNORED = (".embed_positions._float_tensor", ".embed_positions.weights", "decoder.version")
Weights = Mapping[str, Tensor]


def check_config(config: Any, is_member: bool = False) -> None:
    """Raise UnfitCheckpoint if ``cfg.model`` or an ensemble member has an unsupported architecture or option."""
    name = config.get("_name") if isinstance(config, dict) else None
    if name == ENSEMBLE_ARCH:
        if is_member:
            raise UnfitCheckpoint("only version 0.2.0 supports ensembles of ensembles; join single models")
        for entry in config["members"]:
            if "config" in entry:
                check_config(entry["config"], is_member=True)
    elif name == JOINT_MODEL:
        if config.get("member_arch") not in IMAGE_ARCHITECTURES:
            expected = " or ".join(IMAGE_ARCHITECTURES)
            raise UnfitCheckpoint(f"expected member architecture {expected}, found {config.get('member_arch')!r}")
    elif name not in SINGLE_MODELS:
        raise UnfitCheckpoint(f"expected architecture alma_… or transformer_lm…, found {str(name)[:60]}")
    elif config.get("mup"):
        raise UnfitCheckpoint("trained with --mup, which only version 0.2.0 supports; train the model again")
    elif name in TRANSFORMER_LMS:
        cutoffs = [config.get(f"adaptive_{part}_cutoff") for part in ("input", "softmax")]
        if config.get("character_embeddings") or config.get("decoder_xformers_att_config") is not None:
            raise UnfitCheckpoint("models with character embeddings or xformers attention are not supported")
        if any(each is not None and not _CUTOFFS.fullmatch(str(each)) for each in cutoffs):
            raise UnfitCheckpoint(f"expected adaptive cutoffs such as 10000,50000, found {str(cutoffs)[:60]}")


def refuse_other_shapes(weights: Weights, model: nn.Module, path: str, remedy: str) -> None:
    """Raise AlmaError if ``weights`` and ``model`` differ in tensor names or shapes. The device may be ``meta``."""
    found, needed = ({name: tuple(each.shape) for name, each in part.items()} for part in (weights, model.state_dict()))
    found = {name: shape for name, shape in found.items() if name in needed or not name.endswith(_IGNORED)}
    wrong = sorted(name for name in needed.keys() & found.keys() if needed[name] != found[name])
    for problem, names in (
        ("lacks {} tensor(s)", sorted(needed.keys() - found.keys())),
        ("has {} unexpected tensor(s)", sorted(found.keys() - needed.keys())),
        ("has {} tensor(s) with a wrong shape", wrong),
    ):
        if names:
            first = f"first: {names[0]}"
            first += f", expected {needed[names[0]]}, found {found[names[0]]}" if names is wrong else ""
            raise AlmaError(f"{path}: the checkpoint {problem.format(len(names))} ({first}); {remedy}")
