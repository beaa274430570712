"""Any JSON in any place of any record is a record or one AlmaError, never another exception."""

import json
import math
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairseq_alma.data.image_stream import ImageSet, ImageStream, write_image_stream
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import parse_gate_trees
from fairseq_alma.runs.run_folder import RunFolder
from tests.runs.fakes import write_manifest
from tests.runs.runs import COUNTS, RUN, stage_record

ACCEPTED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
ALL = settings(derandomize=True, database=None, deadline=None, max_examples=60, suppress_health_check=ACCEPTED)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    | st.sampled_from([-1, 0, 10**30, 2**63, 1e308, math.inf, "NaN", "../x", "/etc/passwd", "\ud800", "\x1b[31m", ""])
)  # fmt: skip
ANY_JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)

STAGE = stage_record(0, [0], after_growth={"valid": {"loss": 3.0, "ppl": 8.0}}, gate_trees=[[[0, 1], 2]])
IMAGE_STAGE = {
    **{name: value for name, value in STAGE.items() if "token" not in name},
    "train_images": 1000, "test_flops_per_image": 3, "valid": {"loss": math.inf, "error": 0.9},
    "test": {"loss": math.nan, "error": 0.9}, "after_growth": {"valid": {"loss": -1e-8, "error": 0.0}},
}  # fmt: skip
IMAGES = {**RUN["stream"], "kind": "images", "dataset": "mnist", "num_classes": 10, "test": COUNTS}
IMAGES_RUN = {**RUN, "stream": IMAGES}


def read_run(folder: Path) -> Any:
    return RunFolder(folder).read_run()


def read_stage(folder: Path) -> Any:
    return RunFolder(folder).read_stage(0)


def text_manifest(folder: Path) -> Any:
    write_manifest(folder, num_megabatches=2)
    return json.loads((folder / "stream.json").read_text())


def image_manifest(folder: Path) -> Any:
    images = ImageSet("tiny", np.zeros((12, 1, 2, 2), np.uint8), np.arange(12) % 3, 10, 3)
    write_image_stream(folder, images, 2, 1)
    return json.loads((folder / "stream.json").read_text())


RECORDS: dict[str, tuple[str, Callable[[Path], Any], Callable[[Path], Any]]] = {
    "run": ("run.json", read_run, lambda folder: RUN),
    "run on images": ("run.json", read_run, lambda folder: IMAGES_RUN),
    "stage": ("stage-000/stage.json", read_stage, lambda folder: STAGE),
    "stage on images": ("stage-000/stage.json", read_stage, lambda folder: IMAGE_STAGE),
    "stream": ("stream.json", Stream.open, text_manifest),
    "stream of images": ("stream.json", ImageStream.open, image_manifest),
}
"""File -> what reads it, and the content of a good one, after the files next to it were written."""


def places(content: Any, place: tuple = ()) -> list[tuple]:
    """Return where a JSON value has values: ``("test", "ppl")``, ``("megabatches", 0)``, …"""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [place, *(each for key, value in inner for each in places(value, (*place, key)))]


def with_value(content: Any, place: tuple, value: Any) -> Any:
    """Return the same JSON value with something else in one place."""
    if not place:
        return value
    copy = content.copy()
    copy[place[0]] = with_value(content[place[0]], place[1:], value)
    return copy


def one_line_or_a_value(read: Callable[[], Any]) -> None:
    try:
        read()
    except AlmaError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        str(error).encode()


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, tuple[Path, Any]]:
    """Folder and content of a good record of each kind."""
    found = {}
    for name, (file, _, make) in RECORDS.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "-")) / "S"
        content = make(folder)
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        found[name] = folder, content
    return found


@pytest.mark.parametrize("name", RECORDS)
@ALL
@given(data=st.data())
def test_any_json_in_any_place_of_a_record_and_any_bytes_are_one_line_or_a_record(name: str, data: Any, good) -> None:
    (file, read, _), (folder, content) = RECORDS[name], good[name]
    if data.draw(st.integers(0, 3)):
        altered = with_value(content, data.draw(st.sampled_from(places(content))), data.draw(ANY_JSON))
        (folder / file).write_text(json.dumps(altered))
    else:
        odd = st.sampled_from([b"[" * 10**5, b'{"a":' * 10**5, b"9" * 10**5])
        (folder / file).write_bytes(data.draw(st.binary() | odd))
    one_line_or_a_value(lambda: read(folder))


@pytest.mark.parametrize(
    ("place", "value", "line"),
    [
        (("test", "ppl"), "4", "$.test.ppl: Expected float, got str"),
        (("num_updates",), -1, "$.num_updates: Expected int >= 0"),
        (("megabatches",), [0, 10_000], "$.megabatches[1]: Expected int <= 9999"),
        (("valid",), {"loss": 1.0}, "$.valid: Object missing required field ppl"),
        (("stage",), 7, "expected stage 0, found stage 7"),
    ],
)
def test_what_is_wrong_in_a_record_is_named_with_its_place_and_what_to_do(place, value, line, tmp_path: Path) -> None:
    (tmp_path / "stage-000").mkdir()
    (tmp_path / "stage-000/stage.json").write_text(json.dumps(with_value(STAGE, place, value)))
    with pytest.raises(AlmaError) as raised:
        read_stage(tmp_path)
    assert f"stage-000/stage.json: damaged, {line}" in str(raised.value)
    assert str(raised.value).endswith("; remove the file and repeat the training, which runs this stage again")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda manifest: manifest["images"].update(files=[]), "images: expected files images.npy, labels.npy,"),
        (lambda manifest: manifest["splits"].pop(-2), "no split valid"),
        (
            lambda manifest: manifest["splits"].reverse(),
            "expected 6 splits, from megabatch-000/train to test in order, found 6 splits, out of order or with extra",
        ),
        (lambda manifest: manifest["splits"][0]["files"][0].update(path="../t.npy"), "expected a path "),
        (lambda manifest: manifest["images"].update(num_classes=0), "$.images.num_classes: Expected int >= 1"),
    ],
)
def test_a_manifest_that_leaves_something_out_or_leads_elsewhere_is_refused(change, line: str, tmp_path: Path) -> None:
    manifest = image_manifest(tmp_path / "S")
    change(manifest)
    (tmp_path / "S/stream.json").write_text(json.dumps(manifest))
    with pytest.raises(AlmaError) as raised:
        ImageStream.open(tmp_path / "S")
    assert f"stream.json: damaged, {line}" in str(raised.value).replace("$.splits[0].files[0]: ", "")
    assert "prepare the stream again" in str(raised.value)


@ALL
@given(text=st.text(alphabet="[]0123456789, -x", max_size=60) | st.sampled_from(["[" * 10**5, "[[" + "0," * 10**5]))
def test_any_text_as_gate_trees_is_one_line_or_trees(text: str) -> None:
    one_line_or_a_value(lambda: parse_gate_trees(text, 2, 3))
