"""Losses and gradients of every kind of gate, as the version before computed them: ``golden_losses.json``.

Models are built as fairseq-train builds them, from the registered names of architectures and their options, or loaded
from a checkpoint as fairseq-eval-lm does; nothing here names a module of the package that could move. Made anew by
``python -m tests.compatibility.golden_losses``, from the root of the checkout.
"""

import json
import shlex
import tempfile
from pathlib import Path
from typing import Any, Callable

import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import fairseq_alma
from fairseq_alma.cli.grow import main as alma_grow
from tests.compatibility.archives import HERE, machine, sha256_of, stream_of, unpack

fairseq_alma.register()

GOLDEN = HERE / "golden_losses.json"
BATCH_SIZE = {"text": 6, "images": 12}
TASK = {
    "text": "--task alma_lm --criterion alma_switch_cross_entropy --tokens-per-sample 24",
    "images": "--task alma_image_classification --criterion alma_image_cross_entropy",
}
SWITCH = (
    "--arch alma_switch_lm_tiny --decoder-layers 4 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 "
    "--decoder-attention-heads 2"
)
TEXT = {
    "dense": "--moe-freq 0",
    "flat": "--num-experts 4",
    "flat, tight": "--num-experts 4 --capacity-factor 0.5 --eval-capacity-factor 0.75 --moe-freq 1",
    "one expert": "--num-experts 1",
    "tree": "--num-experts 4 --gate-trees '[[0,[1,3],2],[0,1,2,3]]'",
    "nested tree": "--num-experts 6 --gate-trees '[[[0,[2,[4,5]]],[1,3]],[0,[1,[2,3,4]],5]]'",
}
GROWN = {
    # checkpoint in the archive, and the steps of growth: method, number of experts, further options
    "as trained": ("gmoe-split", []),
    "copy": ("sm", [("copy", 2, "")]),
    "copy twice, noise": ("sm", [("copy", 1, ""), ("copy", 3, "--noise 0.1")]),
    "split": ("sm", [("split", 1, "")]),
    "split twice": ("sm", [("split", 2, ""), ("split", 3, "--select usage")]),
    "split, then copy": ("gmoe-split", [("split", 2, "--select random"), ("copy", 2, "")]),
    "scratch": ("gmoe-copy", [("scratch", 2, "")]),
}
IMAGES = {
    "mlp": "--arch alma_mlp --width 6",
    "vgg": "--arch alma_vgg --channels 3",
    **{
        f"moe {network}, {gate}, {tree}": f"--arch alma_moe_{network} {size} --gate {gate} --num-experts {num}{trees}"
        for network, size, num_mixtures in (("mlp", "--width 6", 2), ("vgg", "--channels 3", 16))
        for gate in ("soft", "hard")
        for tree, num, trees in (
            ("flat", 4, ""),
            ("one expert", 1, ""),
            ("tree", 4, f" --gate-trees [{','.join(['[0,[1,3],2]'] * num_mixtures)}]"),
            ("nested tree", 5, f" --gate-trees [{','.join(['[[0,[2,[3,4]]],1]'] * num_mixtures)}]"),
        )
    },
}

Loss = dict[str, str]


def all_losses(archives: dict[str, Path], folder: Path) -> dict[str, Loss]:
    """Compute everything.

    Args:
        archives: of each kind, unpacked.
        folder: for grown checkpoints.

    Returns:
        By the name of the case.
    """
    found = {f"text, {name}": losses(archives["text"], "text", f"{SWITCH} {words}") for name, words in TEXT.items()}
    for name, (run, steps) in GROWN.items():
        found[f"text, grown: {name}"] = grown_losses(archives["text"], folder / name, run, steps)
    found |= {f"images, {name}": losses(archives["images"], "images", words) for name, words in IMAGES.items()}
    return found


def losses(root: Path, kind: str, words: str) -> Loss:
    """Compute those of an untrained model."""
    parser = options.get_training_parser()
    command = [str(root / stream_of(kind)), "--megabatch", "1", "--cpu", *shlex.split(f"{TASK[kind]} {words}")]
    config = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, command))
    task = tasks.setup_task(config.task)
    criterion = task.build_criterion(config.criterion)
    torch.manual_seed(1)
    model = task.build_model(config.model)
    found = {"weights": sha256_of(model.parameters())}
    return found | both_modes(model, task, criterion, BATCH_SIZE[kind])


def grown_losses(root: Path, folder: Path, run: str, steps: list[tuple[str, int, str]]) -> Loss:
    """Compute those of a checkpoint that has grown."""
    (path,) = (root / "finished" / run).glob("stage-002/member-0/checkpoint_last.pt")
    folder.mkdir(parents=True)
    for number, (method, experts, words) in enumerate(steps):
        out = folder / f"{number}.pt"
        command = ["--path", str(path), "--out", str(out), "--method", method, "--experts", str(experts), "--cpu"]
        if method != "scratch":
            command += ["--stream", str(root / stream_of("text"))]
        assert alma_grow([*command, *shlex.split(words)]) == 0
        path = out
    overrides = {"data": str(root / stream_of("text")), "megabatch": 1}
    (model,), config, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], arg_overrides=overrides)
    found = {"weights": sha256_of(model.parameters())}
    return found | both_modes(model, task, task.build_criterion(config.criterion), BATCH_SIZE["text"])


def both_modes(model: torch.nn.Module, task: Any, criterion: Any, batch_size: int) -> Loss:
    """Compute loss and gradient of the first batch, as in training and as at test.

    Returns:
        For each mode the loss and the gradient's norm as hexadecimal numbers, and the sha256 of the gradient.
    """
    task.load_dataset("train")
    batches = task.get_batch_iterator(task.dataset("train"), max_sentences=batch_size, seed=1)
    sample = next(iter(batches.next_epoch_itr(shuffle=True)))
    found = {}
    modes: dict[str, Callable[[], Any]] = {"train": model.train, "eval": model.eval}
    for mode, set_mode in modes.items():
        set_mode()
        model.zero_grad(set_to_none=True)
        torch.manual_seed(2)
        loss, _, _ = criterion(model, utils.apply_to_sample(torch.clone, sample))
        loss.backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        norm = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()
        found[f"{mode} loss"] = loss.item().hex()
        found[f"{mode} gradient's norm"] = norm.item().hex()
        found[f"{mode} gradient"] = sha256_of(gradients)
    return found


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        archives = {kind: unpack(kind, Path(folder) / kind) for kind in TASK}
        found = all_losses(archives, Path(folder) / "grown")
    GOLDEN.write_text(json.dumps({"machine": machine(), "losses": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
