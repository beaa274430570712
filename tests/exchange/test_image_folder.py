"""Models of images of a run: exported as safetensors, given back by the loader, joined, tested by the stock command."""

import json
import os
import re

import pytest
import torch

import fairseq_alma
from fairseq_alma.checkpoints.checkpoint_file import write_checkpoint
from fairseq_alma.checkpoints.ensemble_file import join_checkpoints
from fairseq_alma.cli.ensemble import main as ensemble
from fairseq_alma.cli.export import main
from fairseq_alma.cli.stream import main as stream_command
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.images.image_classifier import load_exported_images
from tests.images.image_streams import make_stream
from tests.scripts import run_script


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    make_stream(folder / "S", num_megabatches=2)
    words = [
        "--learner",
        "ens",
        "--num-members",
        "2",
        "--keep-checkpoints",
        "--",
        "--width",
        "6",
        "--max-epoch",
        "6",
        "--cpu",
    ]
    assert stream_command(["--stream", str(folder / "S"), "--run", str(folder / "R"), *words]) == 0
    return folder


def members_of(run, stage):
    return [run / f"R/stage-{stage:03d}/member-{member}/checkpoint_last.pt" for member in range(2)]


def test_the_model_of_an_arrival_of_a_run_is_exported_if_it_was_kept(tmp_path, capsys):
    make_stream(tmp_path / "S", num_megabatches=2)
    for name, keep in (("plain", []), ("kept", ["--keep", "0"])):
        words = ["--stream", str(tmp_path / "S"), "--run", str(tmp_path / name), *keep, "--", "--width", "4", "--cpu"]
        assert stream_command([*words, "--max-epoch", "1"]) == 0
        assert ("only weights stay that" in capsys.readouterr().err) == (not keep)
        assert main([str(tmp_path / name), "--out", str(tmp_path / f"{name}-newest")]) == 0
    first = ["--arrival", "0", "--out", str(tmp_path / "first")]
    with pytest.raises(AlmaError, match="weights of stage 0 are not kept; alma-stream --keep ARRIVAL keeps those"):
        main([str(tmp_path / "plain"), *first])
    assert main([str(tmp_path / "kept"), *first]) == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "kept-newest")]
    assert weights[0] != weights[1] == (tmp_path / "plain-newest/model.safetensors").read_bytes()


def test_an_ensemble_of_image_models_predicts_what_its_record_says(run, tmp_path):
    members = members_of(run, 0)
    write_checkpoint(join_checkpoints(members, [1.0, 1.0], tmp_path / "E.pt", False), tmp_path / "E.pt")
    assert main([str(tmp_path / "E.pt"), "--out", str(tmp_path / "out")]) == 0
    (tmp_path / "E.pt").unlink()
    model, images = load_exported_images(tmp_path / "out")
    stream = Stream.open(run / "S")
    pixels, labels = test_set(stream)
    mean, std = (torch.tensor(each)[:, None, None] for each in (images.mean, images.std))
    with torch.no_grad():
        error = (model((pixels / 255 - mean) / std).argmax(dim=1) != labels).float().mean().item()
    record = json.loads((run / "R/stage-000/stage.json").read_text())
    assert error == pytest.approx(record["test"]["error"], abs=1e-6) and record["test"]["error"] < 0.7


def test_set(stream):
    """Return the pixels and labels of the test set."""
    import numpy as np

    rows = np.load(stream.root / "test.npy")
    pixels, labels = (np.load(stream.root / name)[rows] for name in ("images.npy", "labels.npy"))
    return torch.from_numpy(pixels).float(), torch.from_numpy(labels)


test_set.__test__ = False


def test_a_folder_that_is_none_is_one_line(run, tmp_path):
    with pytest.raises(AlmaError, match="there is no config"):
        load_exported_images(tmp_path)
    main([str(run / "R/stage-000/member-0/checkpoint_last.pt"), "--out", str(tmp_path / "out")])
    (tmp_path / "out/model.safetensors").open("ab").write(b"x")
    with pytest.raises(AlmaError, match=r"model\.safetensors: damaged or changed"):
        load_exported_images(tmp_path / "out")
    (tmp_path / "out/SHA256SUMS").unlink()
    main([str(run / "R/stage-000/member-0/checkpoint_last.pt"), "--out", str(tmp_path / "again")])
    (tmp_path / "again/model.safetensors").rename(tmp_path / "out/model.safetensors")
    config = json.loads((tmp_path / "out/config.json").read_text())
    config["model"]["width"] = 7
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    with pytest.raises(AlmaError, match="no weight has that size"):
        load_exported_images(tmp_path / "out")
    (tmp_path / "out/config.json").write_text('{"format": "another"}')
    with pytest.raises(AlmaError, match="format 'another' found"):
        load_exported_images(tmp_path / "out")


def validate(stream, path):
    """Return loss and error that the stock command prints for the test set."""
    words = ["fairseq-validate", str(stream), "--user-dir", os.path.dirname(fairseq_alma.__file__)]
    words += ["--task", "alma_image_classification", "--path", str(path), "--valid-subset", "test"]
    done = run_script([*words, "--batch-size", "30", "--cpu", "--num-workers", "0"])
    assert done.returncode == 0, done.stderr
    line = next(line for line in (done.stdout + done.stderr).splitlines() if "valid on 'test' subset" in line)
    return {name: float(re.search(rf"\b{name} ([\d.]+)", line)[1]) for name in ("loss", "error")}


def test_the_ensemble_of_a_stages_members_has_the_loss_and_error_of_its_record(run, tmp_path):
    record = json.loads((run / "R/stage-001/stage.json").read_text())
    assert record["num_members"] == 2
    assert ensemble([*map(str, members_of(run, 1)), "--out", str(tmp_path / "E.pt")]) == 0
    found = validate(run / "S", tmp_path / "E.pt")
    assert found["error"] == pytest.approx(record["test"]["error"], abs=1e-4)
    assert found["loss"] == pytest.approx(record["test"]["loss"], abs=2e-3)


def test_members_of_all_stages_are_kept_when_asked(run):
    assert all(path.is_file() for stage in (0, 1) for path in members_of(run, stage))


def test_models_of_other_images_do_not_make_an_ensemble(run, tmp_path):
    other = make_stream(tmp_path / "S", num_megabatches=1, num_train=40, shape=(1, 4, 4))
    words = ["--", "--width", "6", "--max-epoch", "1", "--cpu"]
    assert stream_command(["--stream", str(other), "--run", str(tmp_path / "R"), *words]) == 0
    stranger = str(tmp_path / "R/stage-000/member-0/checkpoint_last.pt")
    with pytest.raises(AlmaError, match=r"images of 16 pixels in all channels, .* has images of 64 pixels"):
        ensemble([str(members_of(run, 1)[0]), stranger, "--out", str(tmp_path / "E.pt")])
    assert not (tmp_path / "E.pt").exists()
