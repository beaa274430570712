"""What run.json says, and whether a command may resume the run that it describes."""

import platform
from importlib import metadata
from typing import Any, Mapping, Optional

from fairseq_alma.data.manifest import canonical_sha256
from fairseq_alma.data.stream import Split, Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.schedule import Stage, stages
from fairseq_alma.runs.study import FREE_OPTIONS

# They change the last digits: a run keeps to them, a report takes no notice.
ROUNDING_OPTIONS = ("jobs", "side_by_side")
OPTION_OF = {"best_every": "--save-every"}
"""Keys of run.json that are no option as they stand: where ``--save-every`` decides which weights are tested."""
_DISTRIBUTIONS = {"torch": ("torch",), "fairseq": ("ve-fairseq", "fairseq"), "fairseq_alma": ("fairseq-alma",)}


def describe_run(
    learner: str, seed: int, options: Mapping[str, Any], train_options: Mapping[str, Any], stream: Stream
) -> dict[str, Any]:
    """Return the content of run.json.

    Args:
        learner: its name in `strategy.LEARNERS`.
        seed: of the run.
        options: of alma-stream, by their names with underscores.
        train_options: what stands after ``--``: option and value.
        stream: what the run learns from.
    """
    return {
        "learner": learner,
        "seed": seed,
        "options": dict(options),
        "train_options": dict(train_options),
        "stream": {
            "path": str(stream.root),
            "fingerprint": stream.fingerprint,
            "kind": stream.kind,
            "num_megabatches": stream.num_megabatches,
            "vocab_size": stream.tokenizer.vocab_size if stream.tokenizer else None,
            **_describe_images(stream),
            "valid": _count(stream.split("valid")),
            "test": _count(stream.split("test")),
        },
        "versions": versions(),
    }


def planned_stages(record: Mapping[str, Any], num_megabatches: int) -> list[Stage]:
    """Return the stages of a run.

    Args:
        record: its run.json.
        num_megabatches: of its stream as it is now.
    """
    options = record["options"]
    if (iid := options.get("iid")) is not None:
        return stages(num_megabatches, iid)[:1]
    return stages(num_megabatches, options["wait"], options["replay"], options["drop_rest"])


def versions() -> dict[str, Optional[str]]:
    """Return the versions that results depend on, without importing anything heavy."""
    found: dict[str, Optional[str]] = {"python": platform.python_version()}
    for name, distributions in _DISTRIBUTIONS.items():
        found[name] = next((version for each in distributions if (version := _version(each)) is not None), None)
    return found


def require_same_run(path: str, before: Mapping[str, Any], now: Mapping[str, Any], stream: Stream) -> list[str]:
    """Check that a command may resume a run.

    Args:
        path: of run.json, for messages.
        before: its content, as `RunFolder.read_run` returns it.
        now: the content that the command would write.
        stream: as it is now; mega-batches may have been appended since the run began.

    Returns:
        Notes for the user: versions that differ.

    Raises:
        AlmaError: an option or the stream differs; names it.
    """
    differences = _differences(before, now)
    known = before["stream"]["num_megabatches"]
    fingerprint = before["stream"]["fingerprint"]
    then = before.get("versions", {})
    notes = [
        f"note: {path} was begun with {name} {then.get(name)}, this is {version}; the figures may differ in their last "
        "digits"
        for name, version in now["versions"].items()
        if then.get(name) != version
    ]
    if not differences and before.get("start") != now.get("start"):
        differences = [f"{now['options']['finetune_from_model']} was another file then"]
    if differences:
        raise AlmaError(
            f"{path}: the run was begun with other options ({'; '.join(differences)}); give the same options, "
            "or another --run"
        )
    if known > stream.num_megabatches or stream.fingerprint_of_first(known) != fingerprint:
        raise AlmaError(
            f"{path}: the run was begun on another stream than {stream.root} ({before['stream']['path']}, fingerprint "
            f"{fingerprint[:12]}); give that stream, or another --run"
        )
    return notes


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe each option that differs."""
    found = []
    for name in ("learner", "seed"):
        if before[name] != now[name]:
            found.append(f"--{name} {before[name]} then, {now[name]} now")
    for part, prefix in (("options", "--"), ("train_options", "")):
        for name in sorted({*before[part], *now[part]} - set(FREE_OPTIONS)):
            old, new = before[part].get(name), now[part].get(name)
            if name == "grow_schedule" and f"{new},".startswith(f"{old},"):
                continue  # the stream has more stages now
            if old != new:
                option = OPTION_OF.get(name, f"{prefix}{name.replace('_', '-')}")
                found.append(f"{option} {_spell(old)} then, {_spell(new)} now")
    return found


def _spell(value: Any) -> str:
    if value is None:
        return "not given"
    return str(value) if value != "" else "given"


def _describe_images(stream: Stream) -> dict[str, Any]:
    """Return what a report needs of a stream of images; streams of one ``source`` differ by their order alone."""
    if stream.images is None:
        return {}
    return {
        "dataset": stream.images.dataset,
        "num_classes": stream.images.num_classes,
        "source": canonical_sha256([file.sha256 for file in stream.images.files]),
        "seed": stream.seed,
    }


def _count(split: Split) -> dict[str, int]:
    return {"num_tokens": split.num_tokens, "num_bytes": split.num_bytes, "num_images": split.num_images}


def _version(distribution: str) -> Optional[str]:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
