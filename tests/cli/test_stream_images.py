"""``alma-stream`` on images, with its files."""

import json
import os
import shlex
import shutil

import numpy as np
import pytest
import torch

from fairseq_alma import terminal
from fairseq_alma.cli.stream import ALMA_STREAM, main
from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.errors import AlmaError
from fairseq_alma.images import stage_trainer
from fairseq_alma.learners.learner import Learner, ModelId
from tests.engine import fork
from tests.images.image_streams import make_stream
from tests.runs.results import stage_records as records
from tests.scripts import usage_error

WORDS = ("--", "--width", "6", "--max-epoch", "4", "--cpu")
HARD_GATES = ("--", "--arch", "alma_moe_mlp", "--num-experts", "2", "--gate", "hard", "--max-epoch", "3", "--cpu")
GENS = ("--learner", "gens", "--num-members", "2", "--wait", "3")
CHANCE = 0.75  # four classes


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return make_stream(tmp_path_factory.mktemp("images") / "S")


def run(stream, folder, *options, words=WORDS):
    assert main(["--stream", str(stream), "--run", str(folder), *options, *words]) == 0
    return records(folder)


@pytest.mark.parametrize(
    ("options", "members"),
    [
        (["--learner", "moe"], 1),
        (["--learner", "ens", "--combine", "vote"], 5),
        (["--learner", "umix"], 5),
        (["--learner", "sm", "--replay", "--init", "scratch"], 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_learner_runs_on_a_stream_of_images(options, members, stream, tmp_path):
    found = run(stream, tmp_path / "R", "--wait", "3", *options, words=(*WORDS, "--max-epoch", "12"))
    assert len(found) == 2 and {record["num_members"] for record in found} == {members}
    for record in found:
        assert set(record["test"]) == set(record["valid"]) == {"loss", "error"}
    assert found[-1]["megabatches"][-1] == 5
    assert found[-1]["test"]["error"] < CHANCE - 0.1


@pytest.mark.parametrize(
    ("shape", "augment", "arch"),
    [((1, 32, 32), True, "mlp"), ((3, 16, 16), True, "vgg"), ((3, 16, 16), False, "vgg"), ((3, 8, 8), False, "mlp")],
)
def test_the_shape_decides_the_default_network_and_augmenting_does_not(shape, augment, arch, tmp_path, capsys):
    small = make_stream(tmp_path / "S", num_megabatches=2, num_train=40, shape=shape, augment=augment)
    assert main(["--stream", str(small), "--run", str(tmp_path / "R"), "--dry-run", "--seed", "1", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("\nalma-stream ") == out.count("\n# seed 1 2, stage ") == 2  # one process trains both seeds
    assert f"--arch alma_{arch} --optimizer {'sgd' if arch == 'vgg' else 'adadelta'} " in out


def test_a_growing_ensemble_keeps_its_models_and_the_papers_preset_changes_no_result(tmp_path):
    stream, words = make_stream(tmp_path / "S", shape=(1, 28, 28)), (*WORDS, "--width", "8")  # where rounding shows
    plain, paper, code = (
        run(stream, tmp_path / (preset or "plain"), *GENS, *preset and ("--preset", preset), words=words)
        for preset in ("", "paper", "released-code")
    )
    assert paper == plain != code
    for stage in ("0", "1"):
        by_stage = run(stream, tmp_path / "by stage", *GENS, "--preset", "released-code", "--stage", stage, words=words)
    assert [record["test"] for record in by_stage] == [record["test"] for record in code]
    assert [record["num_members"] for record in plain] == [2, 4]
    assert plain[1]["num_params"] == 2 * plain[0]["num_params"]
    kept = sorted(path.relative_to(tmp_path / "plain").as_posix() for path in tmp_path.glob("plain/*/member-*/*.pt"))
    assert kept == [f"stage-00{n // 2}/member-{n}/checkpoint_last.pt" for n in range(4)]
    first, second = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("plain", "paper"))
    assert second.pop("preset") == {"name": "paper", "overridden": []}
    assert " --preset paper " in second["command"] and first | {"command": ""} == second | {"command": ""}


def test_a_growing_mixture_adds_an_expert_per_layer_and_keeps_the_loss(stream, tmp_path):
    found = run(stream, tmp_path / "R", "--learner", "gmoe", "--grow-every", "2", words=(*WORDS, "--gate", "hard"))
    assert [record["num_experts"] for record in found] == [1, 1, 2, 2, 3, 3]
    grown = [record for record in found if "after_growth" in record]
    assert [record["stage"] for record in grown] == [2, 4]
    for record in grown:
        before, after = (record[name]["valid"] for name in ("before_growth", "after_growth"))
        assert after["loss"] == pytest.approx(before["loss"], rel=1e-6)
    assert [len(shares) for shares in found[-1]["expert_usage"]] == [3, 3]
    assert all(sum(shares) == pytest.approx(1, abs=1e-3) for shares in found[-1]["expert_usage"])
    assert len(found[-1]["gate_trees"]) == 2
    assert (tmp_path / "R" / "stage-005" / "test-experts.npz").is_file()


def test_an_option_takes_precedence_over_the_preset_and_run_json_records_it(stream, tmp_path, capsys):
    options = ("--learner", "umix", "--wait", "6", "--preset", "released-code", "--joint-logits", "mean")
    words = (*WORDS, "--patience", "2")
    run(stream, tmp_path / "R", *options, words=words)
    record = json.loads((tmp_path / "R" / "run.json").read_text())
    assert record["preset"] == {"name": "released-code", "overridden": ["--joint-logits", "--patience"]}
    assert (record["options"]["joint_logits"], record["train_options"]["--patience"]) == ("mean", "2")
    note = "note: the command line overrides --joint-logits, --patience of --preset released-code"
    assert note in capsys.readouterr().err
    # The same settings without the preset are the same run.
    run(stream, tmp_path / "R", "--learner", "umix", "--wait", "6", words=(*words, "--select", "accuracy"))
    assert "nothing to do" in capsys.readouterr().out


def test_a_stage_needs_validation_images(stream, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ImageStream, "indices", lambda self, part, megabatches: np.arange(2 in megabatches))
    message = usage_error(capsys, run, stream, tmp_path / "R", "--wait", "3")
    assert "S: stage 1 has no validation images to select" in message and "increase --wait" in message
    assert not (tmp_path / "R").exists()


def test_keep_checkpoints_keeps_the_experts_of_every_stage(stream, tmp_path):
    options = ("--learner", "gmoe", "--wait", "2", "--grow-every", "2", "--grow-method", "copy")
    found = run(stream, tmp_path / "R", *options, "--keep-checkpoints")
    assert [record["num_experts"] for record in found] == [1, 2, 3]
    assert found[-1]["gate_trees"] is None  # flat
    assert len([*(tmp_path / "R").glob("stage-*/test-experts.npz")]) == 3
    assert found == run(stream, tmp_path / "last", *options)
    assert len([*(tmp_path / "last").glob("stage-*/test-experts.npz")]) == 1


def test_the_members_of_an_ensemble_are_the_single_models_of_their_seeds(stream, tmp_path):
    run(stream, tmp_path / "sm", "--learner", "sm", "--wait", "3")
    run(stream, tmp_path / "ens", "--learner", "ens", "--num-members", "2", "--wait", "3")
    paths = (tmp_path / name / "stage-001/member-0/checkpoint_last.pt" for name in ("sm", "ens"))
    single, member = (torch.load(path, weights_only=True)["model"] for path in paths)
    assert single.keys() == member.keys()
    for name, tensor in single.items():
        torch.testing.assert_close(member[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("learner", "words"),
    [*(pytest.param(each, WORDS, marks=pytest.mark.slow) for each in ("bagging", "gens")), ("gens", HARD_GATES)],
)
def test_runs_of_several_seeds_equal_single_runs(learner, words, stream, tmp_path):
    options = ("--learner", learner, "--wait", "3")
    run(stream, tmp_path / "R", *options, "--seed", "1", "7", words=words)
    for seed in (1, 7):
        together = records(tmp_path / "R" / f"seed-{seed}")
        alone = run(stream, tmp_path / f"alone-{seed}", *options, "--seed", str(seed), words=words)
        assert len(together) == 2
        for ours, theirs in zip(together, alone, strict=True):
            assert ours["test"] == pytest.approx(theirs["test"], rel=1e-4 if words is WORDS else 1e-3)
            rounded = dict.fromkeys(("test", "valid", "expert_usage"))
            assert {**ours, **rounded} == {**theirs, **rounded}
    # Each is a run of its own: it resumes alone, and with other seeds.
    alone = run(stream, tmp_path / "R" / "seed-7", *options, "--seed", "7", words=words)
    assert records(tmp_path / "R" / "seed-7") == alone
    run(stream, tmp_path / "R", *options, "--seed", "7", "8", words=words)
    assert len(records(tmp_path / "R" / "seed-8")) == 2


@pytest.mark.slow
def test_an_unfinished_training_of_other_seeds_is_kept_or_restarted(stream, tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(stage_trainer.StageTraining, "finish", lambda self: 1 / 0)
        run(stream, tmp_path / "R", "--wait", "6", "--seed", "1", "2", "--save-every", "0.000001s")
    (unfinished,) = (tmp_path / "R").rglob(f"*{stage_trainer.UNFINISHED}")
    with pytest.raises(AlmaError, match="--max-epoch changed"):  # was written to run.json
        run(stream, tmp_path / "R", "--wait", "6", "--seed", "1", "2", words=(*WORDS, "--max-epoch", "9"))
    run(stream, tmp_path / "R", "--wait", "6", "--seed", "3", "4")
    assert unfinished.is_file()
    run(stream, tmp_path / "R", "--wait", "6", "--seed", "1", "2", "3")
    assert not unfinished.exists()
    alone = run(stream, tmp_path / "alone", "--wait", "6", "--seed", "1")
    assert records(tmp_path / "R/seed-1")[0]["test"] == pytest.approx(alone[0]["test"], rel=1e-4)


def test_a_vgg_needs_two_small_images_in_each_batch(tmp_path, capsys):
    small = make_stream(tmp_path / "S", num_megabatches=2, num_train=4, shape=(3, 16, 16))
    command = ["--stream", str(small), "--run", str(tmp_path / "R"), "--", "--channels", "2", "--max-epoch", "1"]
    assert "on a batch of 1 image below 32 x 32 pixels" in usage_error(capsys, main, command)
    assert main(["--wait", "2", *command]) == 0


def test_a_plan_that_one_network_cannot_train_is_refused(stream, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Learner, "starts_from", lambda _, stage, i: None if i or not stage.index else ModelId(0, 0))
    message = usage_error(capsys, run, stream, tmp_path / "R", "--learner", "ens")
    assert "--learner ens: on images, the models of a stage all start with random" in message


def test_a_damaged_stream_is_an_error_and_no_usage_error(stream, tmp_path):
    damaged = shutil.copytree(stream, tmp_path / "S")
    (damaged / "labels.npy").write_bytes(b"junk")
    with pytest.raises(AlmaError, match=r"labels\.npy"):
        run(damaged, tmp_path / "R")


def fork_stream(command, **options):
    """Start ``alma-stream`` like `subprocess.Popen`, as a fork that needs no imports."""

    def run():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return main(command[len(ALMA_STREAM) :])

    return fork(run)


@pytest.mark.slow
def test_members_trained_by_several_processes_or_calls_give_the_same_files(stream, tmp_path, monkeypatch):
    monkeypatch.setattr(terminal.subprocess, "Popen", fork_stream)
    bagging = ("--learner", "bagging", "--num-members", "3", "--wait", "3")
    run(stream, tmp_path / "one", *bagging, "--jobs", "1")
    assert main(["--stream", str(stream), "--run", str(tmp_path / "R"), *bagging, "--member", "1", *WORDS]) == 0
    run(stream, tmp_path / "R", *bagging, "--jobs", "2")
    assert contents(tmp_path / "R") == contents(tmp_path / "one")
    side_by_side = run(stream, tmp_path / "side by side", *bagging)
    for ours, theirs in zip(records(tmp_path / "R"), side_by_side, strict=True):
        assert ours["test"] == pytest.approx(theirs["test"], rel=1e-3)
    with pytest.raises(AlmaError, match="--jobs changed from 1 to not given"):
        run(stream, tmp_path / "R", *bagging)


def contents(run):
    """Return the content of all files of a run, without locks, wall times and the command."""
    files = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    return {
        path: {**json.loads(content), "wall_seconds": 0, "command": ""} if path.suffix == ".json" else content
        for path, content in files.items()
        if not path.name.startswith(".lock")
    }


def test_the_commands_of_a_dry_run_give_the_results_of_the_run(stream, tmp_path, capsys):
    options = ["--stream", str(stream), "--run", str(tmp_path / "R"), "--learner", "gmoe", "--wait", "3", "--dry-run"]
    for words, number in (([*options, "--stage", "1"], 1), (options, 2)):
        assert main([*words, *WORDS]) == 0
        said = capsys.readouterr().out
        commands = [line for line in said.splitlines() if not line.startswith("#")]
        assert "after growth (split)" in said and len(commands) == number
        assert all("--arch alma_moe_mlp" in each and "--optimizer adadelta --lr 1.0" in each for each in commands)
    assert not (tmp_path / "R").exists()
    for command in commands:
        program, *words = shlex.split(command)
        assert (program, main(words)) == ("alma-stream", 0)
    assert records(tmp_path / "R") == run(stream, tmp_path / "whole", "--learner", "gmoe", "--wait", "3")


@pytest.mark.parametrize(
    ("options", "words", "said"),
    [
        (["--learner", "firefly"], ["--arch", "alma_mlp"], "requires an architecture named alma_firefly"),
        (["--learner", "firefly", "--grow-share", "0"], [], "--grow-share 0: expected a number above 0"),
        (["--learner", "sm"], ["--fp16"], "--fp16 after --"),
        (["--learner", "sm"], ["--optimizer", "lamb", "--lr", "1"], "choose from adadelta, sgd, adam"),
        (["--learner", "sm"], ["--optimizer", "sgd"], "requires a learning rate; give --lr"),
        (["--learner", "sm", "--save-every", "5"], [], "--save-every 5: expected a time on images"),
        (["--learner", "sm", "--member", "0"], [], "--member requires --learner ens or bagging or gens, found sm"),
        (["--learner", "ens", "--jobs", "2", "--seed", "1", "2"], [], "--jobs requires one seed, found 2 seeds"),
        (["--learner", "ens", "--jobs", "2", "--member", "0"], [], "--jobs (all members) and --member"),
        (["--learner", "gmoe", "--seed", "1", "2"], [], "--seed: several seeds on images require --learner "),
        (["--seed", "3", "3"], [], "--seed 3 3: repeated seed; give each seed once"),
        (["--best-checkpoint"], [], "--best-checkpoint has no effect on images"),
        ([], ["--least-gain"], "--least-gain : expected a number"),
        ([], ["--width", "0"], "--width 0: expected a number of at least 1"),
        ([], ["--adadelta-rho", "2"], "the optimizer adadelta rejects its options"),
        ([], ["--arch", "alma_vgg"], "at least 16 x 16"),
        ([], ["--arch", "alma_vgg", "--last-pool", "max"], "at least 32 x 32 pixels, found 8 x 8; give an --arch"),
        ([], ["--arch", "alma_switch_lm"], "not an image model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_usage_errors_write_nothing(options, words, said, stream, tmp_path, capsys):
    for dry_run in ([], ["--dry-run"]):
        command = ["--stream", str(stream), "--run", str(tmp_path / "R"), *options, *dry_run, "--", *words]
        assert said in usage_error(capsys, main, command)
    assert not (tmp_path / "R").exists()
