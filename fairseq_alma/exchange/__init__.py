"""Export and import models in the format of Hugging Face transformers (Qwen3 and Qwen3-MoE)."""

from fairseq_alma.errors import AlmaError

ARCHITECTURE, ENSEMBLE = "alma_transformer_lm", "alma_ensemble"


def refuse_model(where: str, arch: str, has_gate_trees: bool = False, eval_capacity_factor: float = 0.0) -> None:
    """Raise AlmaError if transformers has no architecture equivalent to the model.

    Args:
        where: file or option at the start of the message.
        arch: architecture of the model.
        has_gate_trees: whether the gates of the model are trees (``--method split``).
        eval_capacity_factor: capacity factor in evaluation; 0: no token is dropped.
    """
    if arch == ENSEMBLE:
        fault = "transformers has no architecture for an ensemble; export a member of the ensemble"
    elif not arch.startswith(ARCHITECTURE):
        fault = f"transformers has no architecture for {arch}; export a model of {ARCHITECTURE}"
    elif has_gate_trees:
        fault = "transformers has no architecture for the gate trees of --method split; grow with --method copy"
    elif eval_capacity_factor > 0:
        fault = (
            f"transformers cannot drop tokens as --eval-capacity-factor {eval_capacity_factor:g} does; train with "
            "--eval-capacity-factor 0"
        )
    else:
        return
    raise AlmaError(f"{where}: {fault}, or evaluate the checkpoint with recipes/lm_eval/evaluate.py (text only)")
