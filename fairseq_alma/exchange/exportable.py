"""Check from options alone whether a language model can be exported. No torch, no fairseq."""

from fairseq_alma.errors import AlmaError

ARCHITECTURE, ENSEMBLE = "alma_transformer_lm", "alma_ensemble"
_EVALUATE = "evaluate the checkpoint itself (recipes/lm_eval/evaluate.py)"


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
