"""Export and import models in the format of Hugging Face transformers (Qwen3 and Qwen3-MoE)."""

from fairseq_alma.errors import AlmaError

ARCHITECTURE = "alma_transformer_lm"


def refuse_model(where: str, arch: str, has_gate_trees: bool = False, eval_capacity_factor: float = 0.0) -> None:
    """Raise AlmaError if transformers has no architecture equivalent to the model.

    Args:
        where: file or option at the start of the message.
        arch: architecture of the model.
        has_gate_trees: whether the gates of the model are trees (``--method split``).
        eval_capacity_factor: capacity factor in evaluation; 0: no token is dropped.
    """
    for is_unfit, fault in (
        (arch == "alma_ensemble", "has no architecture for an ensemble; export a member of the ensemble"),
        (not arch.startswith(ARCHITECTURE), f"has no architecture for {arch}; export a model of {ARCHITECTURE}"),
        (has_gate_trees, "has no architecture for the gate trees of --method split; grow with --method copy"),
        (
            eval_capacity_factor > 0,
            f"cannot drop tokens as --eval-capacity-factor {eval_capacity_factor:g} does; train with "
            "--eval-capacity-factor 0",
        ),
    ):
        if is_unfit:
            raise AlmaError(
                f"{where}: transformers {fault}, or evaluate the checkpoint with recipes/lm_eval/evaluate.py "
                "(text only)"
            )
