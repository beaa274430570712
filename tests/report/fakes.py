"""Run folders with given results, for text and images."""

import json
import math
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

from fairseq_alma.learners.learner import stages

VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "fairseq": "0.12.3", "fairseq_alma": "0.1.0"}
OPTIONS = {"wait": 1, "replay": False, "drop_rest": False, "iid": None, "init": "previous", "num_members": None}


def text_stream(num_megabatches: int = 4, fingerprint: str = "a" * 64, vocab_size: int = 50) -> dict[str, Any]:
    """Return the record of a stream of text in run.json."""
    counts = {"num_tokens": 100, "num_bytes": 400, "num_images": 0}
    return {
        "path": "streams/text", "fingerprint": fingerprint, "kind": "text", "num_megabatches": num_megabatches,
        "vocab_size": vocab_size, "valid": counts, "test": counts,
    }  # fmt: skip


def image_stream(
    num_megabatches: int = 10, seed: int = 1, dataset: str = "digits", num_classes: int = 10
) -> dict[str, Any]:
    """Return the record of a stream of images in run.json; the seed decides the order of the images."""
    counts = {"num_tokens": 0, "num_bytes": 0, "num_images": 300}
    return {
        "path": f"streams/{dataset}-{seed}", "fingerprint": f"{seed:064d}", "source": f"source of {dataset}",
        "seed": seed, "kind": "images", "dataset": dataset, "num_classes": num_classes,
        "num_megabatches": num_megabatches, "vocab_size": None, "valid": counts, "test": counts,
    }  # fmt: skip


def write_run(
    root: Path,
    values: Optional[Sequence[float]] = None,
    learner: str = "sm",
    stream: Optional[Mapping[str, Any]] = None,
    seed: int = 1,
    num_params: Sequence[int] = (1000,),
    num_experts: Sequence[int] = (4,),
    num_members: Sequence[int] = (1,),
    train_flops: float = 1e12,
    train_options: Optional[Mapping[str, str]] = None,
    num_stages: Optional[int] = None,
    stage_extras: Optional[Sequence[Mapping[str, Any]]] = None,
    recipe: Optional[Mapping[str, Any]] = None,
    **options: Any,
) -> Path:
    """Write run.json and stage.json of a run.

    Args:
        root: folder of the run.
        values: test perplexity, or error from 0 to 1, after each stage; None: it falls smoothly.
        learner: name of the learner.
        stream: record of the stream, see `text_stream` and `image_stream`.
        seed: seed of the run.
        num_params: parameters of the predicting models after each stage; the last number counts for later stages.
        num_experts: experts after each stage, in the same way; a stage with more experts has a record of growth.
        num_members: predicting models after each stage, in the same way.
        train_flops: operations of a stage for each of its mega-batches.
        train_options: options after ``--``.
        num_stages: number of complete stages; None: the number of values, or all.
        stage_extras: further content of each stage.json.
        recipe: options that alma-stream chose.
        options: options of alma-stream.
    """
    stream = dict(stream or text_stream())
    is_text = stream["kind"] == "text"
    chosen = {**OPTIONS, **({"init": "scratch"} if learner == "gens" else {}), **options}
    if learner in ("ens", "bagging", "umix", "gens"):
        chosen["num_members"] = num_members[0]
    planned = stages(stream["num_megabatches"], chosen["wait"], chosen["replay"], chosen["drop_rest"])
    if chosen["iid"] is not None:
        planned = stages(stream["num_megabatches"], chosen["iid"])[:1]
    if train_options is None:
        train_options = {"--arch": "alma_switch_lm_tiny" if is_text else "alma_mlp"}
    root.mkdir(parents=True)
    run = {
        "learner": learner, "seed": seed, "options": chosen, "train_options": dict(train_options), "stream": stream,
        "versions": VERSIONS, "command": "alma-stream",
    }  # fmt: skip
    (root / "run.json").write_text(json.dumps(run | ({} if recipe is None else {"recipe": recipe}), indent=2))
    if values is None:
        start, floor = (40.0, 20.0) if is_text else (0.5, 0.1)
        values = [floor + (start - floor) * math.exp(-stage.arrivals[-1] / 5) for stage in planned]
    for stage, value in list(zip(planned, values, strict=False))[:num_stages]:
        index = stage.index
        experts = _at(num_experts, index)
        record: dict[str, Any] = {
            "stage": index, "megabatches": list(stage.megabatches), "num_updates": 10,
            "train_tokens" if is_text else "train_images": 1000 * len(stage.megabatches),
            "train_flops": train_flops * len(stage.megabatches) * _at(num_members, index),
            "num_params": _at(num_params, index), "num_experts": experts, "num_members": _at(num_members, index),
            f"test_flops_per_{'token' if is_text else 'image'}": 2 * _at(num_params, index),
            "valid": result(value * 1.05, is_text), "test": result(value, is_text), "wall_seconds": 12.5,
        }  # fmt: skip
        if index and experts > _at(num_experts, index - 1):
            record["after_growth"] = {"valid": result(value * 1.25, is_text)}
            if not is_text:  # their validation set is another one at each stage
                record["before_growth"] = {"valid": result(value * 1.2, is_text)}
        if stage_extras is not None and index < len(stage_extras):
            record.update(stage_extras[index])
        folder = root / f"stage-{index:03d}"
        folder.mkdir()
        (folder / "stage.json").write_text(json.dumps(record, indent=2))
    return root


def result(value: float, is_text: bool) -> dict[str, float]:
    """Return the record of a test in stage.json: loss and perplexity, or loss and error."""
    if is_text:
        return {"loss": math.log2(value), "ppl": value, "bits_per_byte": math.log2(value) / 4}
    return {"loss": -math.log(1 - min(value, 0.999)), "error": value}


def _at(values: Sequence[int], index: int) -> int:
    return values[min(index, len(values) - 1)]
