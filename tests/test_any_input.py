"""Any JSON as any record, any bytes as any file of a stream: a value or one AlmaError, never another exception."""

import json
import math
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairseq_alma.data.image_stream import ImageStream, read_npy, write_image_stream
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import TokenFile, TokenFileWriter
from fairseq_alma.errors import AlmaError
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.watch.progress import read_clock
from tests.runs.fakes import write_manifest
from tests.runs.runs import COUNTS, RUN, stage_record

IN_A_FOLDER = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
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
IMAGES_RUN = {
    **RUN,
    "stream": {**RUN["stream"], "kind": "images", "dataset": "mnist", "num_classes": 10, "test": COUNTS},
}


def read_run(folder: Path) -> Any:
    return RunFolder(folder).read_run()


def read_stage(folder: Path) -> Any:
    return RunFolder(folder).read_stage(0)


def read_clock_of(folder: Path) -> Any:
    return read_clock(folder / "clock.json")


RECORDS: dict[str, tuple[str, Callable[[Path], Any], Any]] = {
    "run": ("run.json", read_run, RUN),
    "run on images": ("run.json", read_run, IMAGES_RUN),
    "stage": ("stage-000/stage.json", read_stage, STAGE),
    "stage on images": ("stage-000/stage.json", read_stage, IMAGE_STAGE),
    "clock": ("clock.json", read_clock_of, {"spent": 5.5, "started": None}),
    "clock that runs": ("clock.json", read_clock_of, {"spent": 5, "started": 1e9}),
}


def places(content: Any, place: tuple = ()) -> list[tuple]:
    """Where a JSON value has values: ``("test", "ppl")``, ``("megabatches", 0)``, …"""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [place, *(each for key, value in inner for each in places(value, (*place, key)))]


def with_value(content: Any, place: tuple, value: Any) -> Any:
    """The same JSON value with something else in one place."""
    if not place:
        return value
    copy = content.copy()
    copy[place[0]] = with_value(content[place[0]], place[1:], value)
    return copy


def one_line_or_a_value(read: Callable[[Path], Any], folder: Path) -> None:
    try:
        read(folder)
    except AlmaError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 2000
        str(error).encode()


@pytest.mark.parametrize("record", RECORDS)
def test_a_whole_record_is_read_as_it_is_with_keys_of_a_version_to_come(record: str, tmp_path: Path) -> None:
    name, read, content = RECORDS[record]
    content = {**content, "of a version to come": {"x": [1]}}
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(json.dumps(content))
    found = read(tmp_path)
    if isinstance(found, dict):
        assert json.dumps(found) == json.dumps(content)


@pytest.mark.parametrize("record", RECORDS)
@IN_A_FOLDER
@given(data=st.data())
def test_any_json_in_any_place_of_a_record_is_one_line_or_a_record(record: str, data: Any, tmp_path: Path) -> None:
    name, read, content = RECORDS[record]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    altered = with_value(content, data.draw(st.sampled_from(places(content))), data.draw(ANY_JSON))
    (tmp_path / name).write_text(json.dumps(altered))
    one_line_or_a_value(read, tmp_path)


@pytest.mark.parametrize("record", RECORDS)
@IN_A_FOLDER
@given(
    content=st.binary() | st.text().map(str.encode) | st.sampled_from([b"[" * 10**5, b'{"a":' * 10**5, b"9" * 10**5])
)
def test_any_bytes_as_a_record_are_one_line(record: str, content: bytes, tmp_path: Path) -> None:
    name, read, _ = RECORDS[record]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    one_line_or_a_value(read, tmp_path)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("test", "ppl"), "4", "$.test.ppl is '4', float is needed"),
        (("test", "ppl"), -1, "$.test: -1.0 found, a number of at least 0 is needed"),
        (("num_updates",), -1, "$.num_updates is -1, int >= 0 is needed"),
        (("num_updates",), 2.5, "$.num_updates is 2.5, int is needed"),
        (("wall_seconds",), math.inf, "$.wall_seconds is inf, "),
        (("train_flops",), math.nan, "$.train_flops is nan, "),
        (("megabatches",), [0, 10_000], "$.megabatches[1] is 10000, int <= 9999 is needed"),
        (("megabatches",), [], "$.megabatches is a list of 0, "),
        (("valid",), {"loss": 1.0}, "no ppl in $.valid"),
        (("stage",), 7, "it is the record of stage 7"),
    ],
)
def test_what_is_wrong_in_a_record_is_said_with_its_place_and_what_to_do(place, value, said, tmp_path: Path) -> None:
    (tmp_path / "stage-000").mkdir()
    (tmp_path / "stage-000/stage.json").write_text(json.dumps(with_value(STAGE, place, value)))
    with pytest.raises(AlmaError) as raised:
        read_stage(tmp_path)
    assert f"stage-000/stage.json: damaged, {said}" in str(raised.value)
    assert str(raised.value).endswith("; remove the file, and the same alma-stream command runs the stage again")


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("images") / "S"
    write_image_stream(root, np.zeros((12, 1, 2, 2), np.uint8), np.arange(12) % 3, 10, "tiny", 3, 2, 1)
    return root


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("text") / "S"
    write_manifest(root, num_megabatches=2)
    return root


@pytest.mark.parametrize("kind", ["text", "images"])
@IN_A_FOLDER
@given(data=st.data())
def test_any_json_in_any_place_of_a_manifest_is_one_line_or_a_stream(kind: str, data: Any, request) -> None:
    root = request.getfixturevalue(kind)
    manifest = root / "stream.json"
    whole = manifest.read_text()
    try:
        content = json.loads(whole)
        altered = with_value(content, data.draw(st.sampled_from(places(content))), data.draw(ANY_JSON))
        manifest.write_text(json.dumps(altered))
        one_line_or_a_value(Stream.open if kind == "text" else ImageStream.open, root)
    finally:
        manifest.write_text(whole)


@IN_A_FOLDER
@given(content=st.binary() | st.sampled_from([b"{", b"[" * 10**5]))
def test_any_bytes_as_a_manifest_are_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "stream.json").write_bytes(content)
    one_line_or_a_value(Stream.open, tmp_path)


def altered_bytes(whole: bytes, data: Any) -> bytes:
    """Other bytes altogether, or the same with a few of them changed, left out or added."""
    if data.draw(st.booleans()):
        return data.draw(st.binary(max_size=200))
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(start + 30, len(whole))))
    return whole[:start] + data.draw(st.binary(max_size=30)) + whole[end:]


@IN_A_FOLDER
@given(data=st.data())
def test_any_bytes_as_a_token_file_are_one_line_or_tokens(data: Any, tmp_path: Path) -> None:
    with open(tmp_path / "t.bin", "wb") as tokens, open(tmp_path / "t.idx", "wb") as index:
        writer = TokenFileWriter(tokens, index, np.dtype("uint16"))
        writer.write(np.arange(4, 14, dtype=np.uint16), np.array([3, 7]))
        writer.close()
    path = tmp_path / data.draw(st.sampled_from(["t.idx", "t.bin"]))
    path.write_bytes(altered_bytes(path.read_bytes(), data))

    def read(folder: Path) -> None:
        assert TokenFile(folder / "t").ids.sum() >= 0

    one_line_or_a_value(read, tmp_path)


@settings(IN_A_FOLDER, max_examples=300)
@given(data=st.data())
def test_any_bytes_as_an_array_are_a_value_error_or_an_array(data: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(12).reshape(3, 4))
    whole = altered_bytes((tmp_path / "a.npy").read_bytes(), data)
    (tmp_path / "b.npy").write_bytes(whole)
    try:
        assert read_npy(tmp_path / "b.npy").nbytes <= len(whole)
    except ValueError as error:
        assert "trust" not in str(error)


@pytest.mark.parametrize(
    "shape", ["(9000000000000,)", "(" * 4000 + ")" * 4000, f"({10**400},)", "(-1,)", "((((1,),),),)", "('x',)"]
)
def test_a_header_that_announces_too_much_is_a_value_error(shape: str, tmp_path: Path) -> None:
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64))
    with pytest.raises(ValueError):
        read_npy(tmp_path / "a.npy")


@pytest.mark.parametrize("name", ["labels.npy", "test.npy", "megabatch-000/train.npy"])
def test_permuted_labels_and_indices_are_refused(name: str, tmp_path: Path) -> None:
    root = tmp_path / "S"
    write_image_stream(root, np.zeros((12, 1, 2, 2), np.uint8), np.arange(12) % 3, 6, "tiny", 3, 2, 1, 0.3)
    array = np.load(root / name)
    np.save(root / name, array[::-1])
    with pytest.raises(AlmaError, match=rf"{name}: sha256 .* found, stream\.json says"):
        ImageStream.open(root)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda manifest: manifest["images"].update(files=[]), "the files of images are none, images.npy, labels.npy"),
        (lambda manifest: manifest["splits"][0].update(files=[]), "the files of megabatch-000/train are none"),
        (lambda manifest: manifest["splits"].pop(-2), "no valid"),
        (lambda manifest: manifest["splits"].reverse(), "splits out of order"),
        (lambda manifest: manifest["splits"].append(manifest["splits"][0]), "2 mega-batches announced, 3 listed"),
        (lambda manifest: manifest["splits"][0]["files"][0].update(path="../t.npy"), "path '../t.npy' found, one "),
        (lambda manifest: manifest["splits"][0]["files"][0].update(path="/t.npy"), "path '/t.npy' found, one within"),
        (lambda manifest: manifest["images"].update(num_classes=0), "$.images.num_classes is 0, int >= 1 is needed"),
        (lambda manifest: manifest.update(seed=-1), "$.seed is -1, int >= 0 is needed"),
        (lambda manifest: manifest.update(history=[{"command": "create"}]), "no options in it"),
    ],
)  # fmt: skip
def test_a_manifest_that_leaves_something_out_or_leads_elsewhere_is_refused(change, said: str, tmp_path: Path) -> None:
    root = tmp_path / "S"
    write_image_stream(root, np.zeros((12, 1, 2, 2), np.uint8), np.arange(12) % 3, 10, "tiny", 3, 2, 1)
    manifest = json.loads((root / "stream.json").read_text())
    change(manifest)
    (root / "stream.json").write_text(json.dumps(manifest))
    with pytest.raises(AlmaError) as raised:
        ImageStream.open(root)
    assert f"stream.json: damaged, {said}" in str(raised.value).replace("$.splits[0].files[0]: ", "")
    assert "prepare the stream again" in str(raised.value)


def test_folders_of_other_names_are_no_stages_and_no_members(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name in ("stage-000/member-0", "stage-000/member-0.bak", "stage-000/member-01", "stage-000/member-x"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("stage-001.bak", "stage-1", "stage-0002", "stage-", "stage-١٢٣", "stage-1000"):
        (tmp_path / name).mkdir()
    (tmp_path / "stage-003").write_text("a file")
    (tmp_path / "stage-000/member-5").symlink_to(tmp_path)
    assert folder.stages() == [0, 1000]
    assert [model.member for model in folder.members(0)] == [0]
    assert folder.members(7) == []
    assert not folder.has_begun()
    folder.replace_run(RUN)
    assert folder.read_run() == RUN
