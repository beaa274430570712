"""Check from options and tokenizer alone whether a language model can be exported. No torch, no fairseq.

``alma-export`` checks a checkpoint, ``alma-stream`` and ``alma-update`` what they are about to train.
"""

from pathlib import Path
from typing import Optional

from fairseq_alma.data.tokens import StreamTokenizer
from fairseq_alma.errors import AlmaError
from fairseq_alma.exchange.tokenizer_files import tokenizer_files

ARCHITECTURE, ENSEMBLE = "alma_transformer_lm", "alma_ensemble"
_EVALUATE = "evaluate the checkpoint itself (recipes/lm_eval/evaluate.py)"


def refuse_unexportable(
    stream: Optional[Path],
    arch: str,
    is_ensemble: bool = False,
    is_split: bool = False,
    eval_capacity_factor: float = 0.0,
) -> None:
    """Raise AlmaError if what a run will train, or its stream's tokenizer (None: not known yet), cannot be exported."""
    refuse_model("{export}", ENSEMBLE if is_ensemble else arch, is_split, eval_capacity_factor)
    if stream is not None:
        tokenizer_files(StreamTokenizer.open(stream), 1)


def refuse_model(where: str, arch: str, has_gate_trees: bool = False, eval_capacity_factor: float = 0.0) -> None:
    """Raise AlmaError unless a stock architecture of transformers computes what a model does.

    The message begins with ``where``, a file or an option.
    """
    if arch == ENSEMBLE:
        raise AlmaError(f"{where}: transformers has no architecture for an ensemble; export a member, or {_EVALUATE}")
    if not arch.startswith(ARCHITECTURE):
        raise AlmaError(
            f"{where}: transformers has no architecture for {arch}; export a model of {ARCHITECTURE}, or {_EVALUATE}"
        )
    if has_gate_trees:
        raise AlmaError(
            f"{where}: gates that grew by split are trees, for which transformers has no architecture; grow by copy, "
            f"or {_EVALUATE}"
        )
    if eval_capacity_factor > 0:
        raise AlmaError(
            f"{where}: --eval-capacity-factor {eval_capacity_factor:g} drops tokens at test, which no architecture of "
            "transformers does; train with 0, the default"
        )
