"""Checkpoints that nobody should have to open: damaged, altered, or made to run code.

    python tests/checkpoints/hostile.py CHECKPOINT FOLDER

takes a checkpoint of a Switch language model and writes one file of each kind into the folder. Whatever would run makes
a file ``canary`` there. Each kind is a function of the good checkpoint's content, or of its path and the path to write.
"""

import os
import shutil
import sys
import zipfile
from argparse import Namespace
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch

CANARY = "canary"
EXPERTS = "decoder.layers.1.switch.experts.fc1_weight"
EMBEDDINGS = "decoder.embed_tokens.weight"
ELSEWHERE = {"path": "/etc/passwd", "absolute_path": "/etc/passwd"}


class Calls:
    """Pickles to the call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def code(folder):
    """Return an expression that makes the canary."""
    return f"open({str(folder / CANARY)!r}, 'w').close() or [(8, 1)]"


def model(name, value, checkpoint, folder):
    checkpoint["cfg"]["model"][name] = value


def weight(name, change, checkpoint, folder):
    checkpoint["model"][name] = change(checkpoint["model"][name])


def without(part, name, checkpoint, folder):
    del (checkpoint if part is None else checkpoint[part])[name]


def replaced(part, value, checkpoint, folder):
    checkpoint[part] = value


def stock(arch, options, checkpoint, folder):
    """Name a stock architecture, of which fairseq evaluates an option: ``CODE`` in the options given."""
    sizes = {"decoder_layers": 2, "decoder_input_dim": 16, "decoder_output_dim": 16}
    given = {name: code(folder) if value == "CODE" else value for name, value in options.items()}
    checkpoint["cfg"]["model"] = {**checkpoint["cfg"]["model"], **sizes, "_name": arch, **given}


def options_namespace(checkpoint, folder):
    options = {**checkpoint["cfg"]["model"], "task": "alma_lm", "arch": "fconv_lm", "decoder_layers": code(folder)}
    checkpoint["args"] = Namespace(**options)


def joined(members, checkpoint, folder):
    """Make an ensemble of it; ``members`` are its entries beside what all have."""
    entries = [{"weight": 1 / len(members), "sha256": "0" * 64, **entry} for entry in members]
    num_tokens = next(len(tensor) for name, tensor in checkpoint["model"].items() if name.endswith(EMBEDDINGS))
    checkpoint["cfg"]["model"] = {"_name": "alma_ensemble", "vocab_size": num_tokens, "members": entries}


def embedded(change, checkpoint, folder, depth=1):
    """Make an ensemble, within ensembles, of a member that is altered itself."""
    change(checkpoint, folder)
    for _ in range(depth):
        config, weights = checkpoint["cfg"]["model"], checkpoint["model"]
        joined([{"origin": "m.pt", "config": config}], checkpoint, folder)
        checkpoint["model"] = {f"decoder.members.0.{name}": tensor for name, tensor in weights.items()}


def weighted(weights, checkpoint, folder):
    joined([{**ELSEWHERE, "weight": each} for each in weights], checkpoint, folder)


def umix(changes, checkpoint, folder):
    options = {"num_members": 1, "member_arch": "alma_switch_lm_tiny", "tokens_per_sample": 32, **changes}
    embedded(lambda *_: None, checkpoint, folder)
    checkpoint["cfg"]["model"] = {"_name": "alma_umix", **options}


def config_part(part, value, checkpoint, folder):
    checkpoint["cfg"][part] = {name: code(folder) if each == "CODE" else each for name, each in value.items()}


def circle(checkpoint, folder):
    checkpoint["extra_state"]["circle"] = circle = []
    circle.append(circle)
    checkpoint["cfg"]["circle"] = circle


def many_times(checkpoint, folder):
    """Nest lists so that a kilobyte has 10^9 values."""
    value = ["ha"] * 10
    for _ in range(8):
        value = [value] * 10
    checkpoint["cfg"]["laughs"] = value


def many_names(checkpoint, folder):
    big = torch.zeros(1 << 18)
    checkpoint["model"].update({f"decoder.layers.{index}.big": big for index in range(5000)})


def other_meter(checkpoint, folder):
    checkpoint["extra_state"]["metrics"] = {"default": [(10, "loss", "MetersDict", {"val": 1})]}


def deep_tree(checkpoint, folder):
    model("gate_trees", "[" * 100_000 + "]" * 100_000, checkpoint, folder)


def wide_tree(checkpoint, folder):
    model("gate_trees", f"[{list(range(300_000))}]", checkpoint, folder)


CONTENTS = {
    # code
    "calls": lambda checkpoint, folder: replaced("x", Calls(os.mkdir, str(folder / CANARY)), checkpoint, folder),
    "calls eval": lambda checkpoint, folder: replaced("x", Calls(eval, code(folder)), checkpoint, folder),
    "args": options_namespace,
    "fconv_lm": partial(stock, "fconv_lm", {"decoder_layers": "CODE", "decoder_attention": "CODE"}),
    "character_filters": partial(
        stock, "transformer_lm", {"character_embeddings": True, "character_filters": "CODE", "activation_fn": "relu"}
    ),
    "adaptive_input": partial(stock, "transformer_lm_gpt", {"adaptive_input": True, "adaptive_input_cutoff": "CODE"}),
    "adaptive_softmax": partial(stock, "transformer_lm", {"adaptive_softmax_cutoff": "CODE"}),
    "xformers": partial(stock, "transformer_lm", {"decoder_xformers_att_config": "CODE"}),
    "lightconv_lm": partial(stock, "lightconv_lm", {"character_filters": "CODE", "character_embeddings": True}),
    "wav2vec": partial(stock, "wav2vec2", {"conv_feature_layers": "CODE"}),
    "member fconv_lm": partial(embedded, partial(stock, "fconv_lm", {"decoder_layers": "CODE"})),
    "member character_filters": partial(
        embedded,
        partial(stock, "transformer_lm", {"character_embeddings": True, "character_filters": "CODE"}),
        depth=3,
    ),
    "umix of fconv_lm": partial(umix, {"member_arch": "fconv_lm", "member_options": "--decoder-layers 1"}),
    "meter": other_meter,
    # looked up elsewhere
    "environment": partial(model, "restore_file", "${oc.env:HOME}"),
    "environment of the task": partial(config_part, "task", {"_name": "alma_lm", "data": "${oc.env:HOME}"}),
    "missing value": partial(model, "dropout", "???"),
    "environment of a member": partial(
        joined, [{"path": "${oc.env:HOME}/m.pt", "absolute_path": "${oc.env:HOME}/m.pt"}]
    ),
    # sizes
    "layers": partial(model, "decoder_layers", 10_000_000),
    "few layers more": partial(model, "decoder_layers", 9_999),
    "experts": partial(model, "num_experts", 1 << 24),
    "dimensions": partial(model, "decoder_embed_dim", 1 << 24),
    "positions": partial(model, "tokens_per_sample", 1 << 24),
    "layers to keep": lambda c, f: c["cfg"]["model"].update(decoder_layers_to_keep="x"),
    "computed positions": lambda c, f: c["cfg"]["model"].update(decoder_sinusoidal_pos=True, tokens_per_sample=1 << 24),
    "deep tree": deep_tree,
    "wide tree": wide_tree,
    "members": partial(umix, {"num_members": 10**9}),
    "layers of members": partial(umix, {"member_options": "--decoder-layers 9999"}),
    "members of members": partial(embedded, lambda *_: None, depth=40),
    "huge number": partial(model, "moe_freq", 10**100_000),
    "circle": circle,
    "many values": many_times,
    "announced": partial(weight, EMBEDDINGS, lambda old: torch.zeros(1).expand(1 << 20, 1 << 20)),
    "many names": many_names,
    # weights
    "nan": partial(weight, EXPERTS, lambda old: old * float("nan")),
    "infinite": partial(weight, EMBEDDINGS, lambda old: old.index_fill(0, torch.tensor([5]), float("inf"))),
    "whole numbers": partial(weight, EXPERTS, lambda old: old.int()),
    "complex": partial(weight, EXPERTS, lambda old: old.to(torch.complex64)),
    "meta": partial(weight, EXPERTS, lambda old: old.to("meta")),
    "sparse": partial(weight, EMBEDDINGS, lambda old: old.to_sparse()),
    "no tensor": partial(weight, EXPERTS, lambda old: old.tolist()),
    "shape": partial(weight, EXPERTS, lambda old: old.flatten()),
    "missing expert": partial(weight, EXPERTS, lambda old: old[:-1].clone()),
    "missing weight": partial(without, "model", EXPERTS),
    "weight too many": lambda checkpoint, folder: checkpoint["model"].update(extra=torch.ones(1)),
    # keys
    "no model": partial(without, None, "model"),
    "no configuration": partial(without, None, "cfg"),
    "no list": partial(replaced, "model", []),
    "no number of experts": lambda checkpoint, folder: checkpoint["cfg"]["model"].pop("num_experts"),
    "dropout": partial(model, "dropout", "much"),
    "activation": partial(model, "activation_fn", "os.system"),
    "history": partial(replaced, "optimizer_history", [{"num_updates": -1}]),
    "iterator": partial(replaced, "extra_state", {"train_iterator": {"epoch": 10**30}}),
    "moments": partial(replaced, "last_optimizer_state", {"state": [], "param_groups": "none"}),
    # ensembles
    "negative weight": partial(weighted, [1.5, -0.5]),
    "nan weight": partial(weighted, [float("nan"), 0.5]),
    "infinite weight": partial(weighted, [1e308, 1e308]),
    "weights of a half": partial(weighted, [0.25, 0.25]),
    "no members": partial(joined, [{}]),
    "too many weights": lambda checkpoint, folder: (
        joined([ELSEWHERE], checkpoint, folder) or checkpoint["model"].update({"decoder.members.3.x": torch.ones(1)})
    ),
}
"""Kinds that the content makes: each alters that of a good checkpoint, and knows the folder of the canary."""
REFERRING = {
    "elsewhere": partial(joined, [ELSEWHERE]),
    "device": partial(joined, [{"path": "/dev/zero", "absolute_path": "/dev/zero"}]),
    "up": partial(joined, [{"path": "../../../../../../../../etc/passwd", "absolute_path": "/nowhere"}]),
    "gone": partial(joined, [{"path": "gone.pt", "absolute_path": "/nowhere/gone.pt"}]),
    "of itself": partial(joined, [{"path": "of itself.pt", "absolute_path": "of itself.pt"}]),
}
"""Ensembles of members in other files; refused by all that looks at members."""
BUILT = {
    "criterion": partial(config_part, "criterion", {"_name": "ctc", "wer_args": "CODE"}),
    "other task": partial(config_part, "task", {"_name": "translation", "data": "x"}),
    "no history": partial(without, None, "optimizer_history"),
    "no state": partial(without, None, "extra_state"),
}
"""Refused where fairseq's commands would use it."""
COUNTS = {
    "no state": BUILT["no state"],
    "no position": partial(replaced, "extra_state", {"AlmaLMTask": {"train_tokens": 1}}),
    "no count": partial(replaced, "extra_state", {"train_iterator": {"epoch": 1}}),
    "text for a count": partial(
        replaced, "extra_state", {"train_iterator": {"epoch": 1}, "AlmaLMTask": {"train_tokens": "many"}}
    ),
}
"""Refused where a stage resumes."""


def cut(good, out):
    out.write_bytes(good.read_bytes()[:-100])


def emptied(good, out):
    out.write_bytes(b"")


def flip(where, good, out):
    """Flip one bit of a file: of a tensor, of the pickle, or of the archive's directory."""
    content = bytearray(good.read_bytes())
    with zipfile.ZipFile(good) as archive:
        entry = max(archive.infolist(), key=lambda entry: (where in entry.filename, entry.file_size))
        place = content.rfind(b"PK\x01\x02") + 16 if where == "directory" else entry.header_offset + 200
    content[place] ^= 1
    out.write_bytes(content)


def packed(good, out, twice=False):
    """Compress all, so that a file of kilobytes takes gigabytes; or name one file twice."""
    method = zipfile.ZIP_STORED if twice else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(out, "w", method) as new:
        entries = old.infolist()
        for entry in [*entries, *(entries[-1:] if twice else [])]:
            new.writestr(entry.filename, old.read(entry))


def link_to_itself(good, out):
    out.symlink_to(out)


def pipe(good, out):
    os.mkfifo(out)


FILES = {
    "cut": cut,
    "emptied": emptied,
    "flipped in a tensor": partial(flip, "data/"),
    "flipped in the pickle": partial(flip, "data.pkl"),
    "flipped in the directory": partial(flip, "directory"),
    "compressed": packed,
    "twice": partial(packed, twice=True),
    "link": link_to_itself,
    "pipe": pipe,
    "folder": lambda good, out: out.mkdir(),
}
"""Kinds that the file itself makes."""


def make(kind, good, folder):
    """Write the checkpoint of one kind; return its path."""
    out = folder / f"{kind}.pt"
    if kind in FILES:
        FILES[kind](good, out)
        return out
    checkpoint = deepcopy(torch.load(good, weights_only=True))
    {**CONTENTS, **REFERRING, **BUILT, **COUNTS}[kind](checkpoint, folder)
    torch.save(checkpoint, out)
    return out


if __name__ == "__main__":
    folder = Path(sys.argv[2]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(sys.argv[1], folder / "good.pt")
    for each in (*CONTENTS, *REFERRING, *BUILT, *COUNTS, *FILES):
        print(make(each, folder / "good.pt", folder))
