"""Check by options whether a language model can be exported, without importing torch or fairseq."""

from fairseq_alma.errors import AlmaError

ARCHITECTURE, ENSEMBLE = "alma_transformer_lm", "alma_ensemble"


def refuse_model(where: str, arch: str, has_gate_trees: bool = False, eval_capacity_factor: float = 0.0) -> None:
    """Raise AlmaError if transformers has no architecture equivalent to the model.

    The message begins with ``where``, a file or an option.
    """
    if arch == ENSEMBLE:
        fault = "transformers has no architecture for an ensemble; export a member"
    elif not arch.startswith(ARCHITECTURE):
        fault = f"transformers has no architecture for {arch}; export a model of {ARCHITECTURE}"
    elif has_gate_trees:
        fault = "transformers has no architecture for the gate trees of --method split; grow with --method copy"
    elif eval_capacity_factor > 0:
        fault = f"--eval-capacity-factor {eval_capacity_factor:g} drops tokens, transformers does not; train with 0"
    else:
        return
    raise AlmaError(f"{where}: {fault}, or evaluate the checkpoint with recipes/lm_eval/evaluate.py")
