import json
import os
from functools import partial

import pytest

from fairseq_alma.cli.stream import main
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import ModelId, SingleModel
from fairseq_alma.runs.run_folder import RunFolder
from tests.runs.fakes import write_manifest
from tests.scripts import usage_error

TRAIN = ["--arch", "alma_switch_lm_tiny", "--max-update", "10", "--adam-betas", "(0.9, 0.98)"]


@pytest.fixture
def stream(tmp_path):
    return write_manifest(tmp_path / "S", 4).root


def run(stream, tmp_path, *options, train=TRAIN):
    return main(["--stream", str(stream), "--run", str(tmp_path / "R"), *options, "--", *train])


def test_a_dry_run_prints_the_commands_of_each_stage_and_touches_nothing(stream, tmp_path, capsys):
    assert run(stream, tmp_path, "--wait", "3", "--dry-run", "--seed", "1", "2") == 0
    out = capsys.readouterr().out
    assert (out.count("\nfairseq-train "), out.count("\nfairseq-eval-lm ")) == (4, 8)
    assert all(f"# seed {seed}, stage 1/2, arrival 3 (mega-batches 1-3): --stage 0" in out for seed in (1, 2))
    assert "--adam-betas '(0.9, 0.98)'" in out and not (tmp_path / "R").exists()


@pytest.mark.parametrize("option", [["--branch-share", "0.2", "--passes", "99"], ["--best-checkpoint"]])
def test_no_average_is_chosen_if_an_option_selects_the_tested_weights(stream, tmp_path, capsys, option):
    run(stream, tmp_path, *option, "--dry-run", train=[])
    assert "--ema-half-life" not in capsys.readouterr().out
    run(stream, tmp_path, "--dry-run", "--passes", "2", train=[])
    assert "--ema-half-life" in (out := capsys.readouterr().out)
    assert [out.count(f"--weight-decay {value} ") for value in ("0.15", "0.01")] == [1, 3]  # the first text is small


def test_a_dry_run_with_megabatches_needs_no_stream(tmp_path, capsys):
    assert run(tmp_path / "later", tmp_path, "--dry-run", "--megabatches", "3") == 0
    said = capsys.readouterr()
    assert said.out.count("fairseq-train ") == 3 and "later: no such stream; the plan is for text" in said.err


@pytest.mark.parametrize(
    "options,message",
    [
        (["--wait", "0"], "--wait 0: expected a number of at least 1"),
        (["--seed"], "argument --seed: expected at least one argument"),
        (["--lr", "1"], "unrecognized arguments: --lr 1; see --help, and give options of fairseq-train after --"),
        (["--wait", "5", "--drop-rest"], "--wait 5 --drop-rest: the stream has only 4 mega-batches"),
        (["--stage", "4"], "--stage 4: expected a stage of the run (0 to 3)"),
        (["--keep", "0", "4"], "--keep 4: expected arrivals of the stream (0 to 3)"),
        (["--keep", "0", "--first-wait", "2"], "--keep 0: expected arrivals with a model, the first is 1"),
        (["--save-every", "15x"], "--save-every 15x: expected a number of updates such as 500, or a time such as"),
        (
            ["--save-every", "1m", "--best-checkpoint"],
            "--save-every 1m: expected a number of updates with --best-checkpoint",
        ),
        (["--learner", "gmoe"], "--learner gmoe: --grow-schedule is missing"),
        (["--learner", "gmoe", "--grow-schedule", "4,x"], "--grow-schedule 4,x: expected integers from 1 to"),
        (["--learner", "gmoe", "--grow-schedule", "4,6,5,8"], "decreases from 6 to 5 experts before stage 2"),
        (["--learner", "gmoe", "--grow-schedule", "4,9,9,9"], "a growth step at most doubles the number"),
        (["--learner", "gmoe", "--grow-schedule", "4,6"], "4,6: expected numbers of experts for 4 stages, found 2"),
        (["--learner", "gmoe", "--grow-schedule", "4,6,8,8", "--init", "scratch"], "gmoe grows the model"),
        (["--grow-schedule", "4,6,8,8"], "--grow-schedule requires --learner grow or gmoe, found sm"),
        (["--learner", "gens", "--iid", "2"], "--iid requires --learner sm or ens, found gens"),
        (["--iid", "5"], "--iid 5: the stream has only 4 mega-batches"),
        (["--iid", "2", "--wait", "2"], "--iid 2 trains in one stage; remove --wait"),
        (["--init", "fresh"], "argument --init: invalid choice: 'fresh' (choose from"),
        (["--learner", "ens", "--member", "2"], "--member 2: expected a member of the run (0, 1)"),
        (["--learner", "gens", "--stage", "1", "--member", "0"], "--member 0: expected a member of stage 1 (1)"),
        (["--learner", "gens", "--init", "previous", "--jobs", "2"], "--jobs 2: a member starts from the weights of"),
        (["--branch-share", "1.5"], "--branch-share 1.5: expected a number below 1"),
        (["--ema-half-life", "1/8", "--branch-share", "0.2"], "--ema-half-life 1/8: --branch-share 0.2 also selects"),
        (["--new-first", "0.2"], "--new-first 0.2 requires --replay; add --replay"),
        (["--learner", "gens", "--num-members", "201"], "--num-members 201: expected a number of at most 200"),
    ],
)
def test_usage_errors_are_one_line_with_exit_status_2(stream, tmp_path, capsys, options, message):
    assert message in usage_error(capsys, run, stream, tmp_path, *options)


def test_options_that_alma_stream_decides_are_usage_errors(stream, tmp_path, capsys):
    grows = ["--learner", "gmoe", "--grow-schedule", "4,6,8,12"]
    by_sizes = ["--learner", "grow", "--grow-schedule", "experts=4,6,8,12"]
    for own, words, message in (
        ([], ["--save-dir", "x"], "--save-dir is not allowed after --: give --run"),
        (grows, ["--num-experts", "4"], "--num-experts is not allowed after --: give --grow-schedule"),
        (by_sizes, ["--num-experts", "4"], "--num-experts is not allowed after --: give --grow-schedule"),
        (grows, ["--moe-freq", "0"], "--grow-schedule 4,6,8,12: no layer has experts (--moe-freq 0"),
        (["--branch-share", "0.2"], ["--max-update", "1"], "--branch-share: a stage needs 2 updates, found 1"),
    ):
        assert message in usage_error(capsys, partial(run, train=[*TRAIN, *words]), stream, tmp_path, *own)


def test_missing_and_short_inputs_and_a_path_that_fairseq_splits_are_named(stream, tmp_path):
    for name, options, message in (
        ("nowhere", [], r"nowhere: not a stream "),
        ("S:1", ["--megabatches", "5", "--dry-run"], r"S:1: fairseq splits paths at ':'"),
        ("S", ["--megabatches", "5"], r"expected at least 5 mega-batches \(--megabatches\), found 4"),
        (
            "S",
            ["--dry-run", "--finetune-from-model", "a.pt"],
            "--finetune-from-model a.pt: expected a file, found nothing",
        ),
    ):
        with pytest.raises(AlmaError, match=message):
            run(tmp_path / name, tmp_path, *options)
        assert not (tmp_path / "R").exists()


def begin(stream, tmp_path, *options, **how):
    """Write run.json, and fail at the first command: the stream has no files."""
    with pytest.raises(AlmaError, match="fairseq-train"):
        run(stream, tmp_path, *options, **how)


@pytest.fixture
def no_commands(monkeypatch):
    def refuse(command, *arguments, **options):
        raise AlmaError(f"{command.program} was called")

    monkeypatch.setattr("fairseq_alma.text.helper.Command.run", refuse)


def test_processes_of_members_begin_at_once_and_keep_the_first_command(stream, tmp_path, no_commands, no_patience):
    how = {"train": [*TRAIN, "--tensorboard-logdir", str(tmp_path / "tb")]}
    begin(stream, tmp_path, "--learner", "ens", "--member", "0", **how)
    with RunFolder(tmp_path / "R").lock_member(ModelId(0, 0)):  # while member 0 trains
        begin(stream, tmp_path, "--learner", "ens", "--member", "1", **how)
    assert not (tmp_path / "tb").exists()  # the process that completes the stages writes their results
    assert "--member 0" in json.loads((tmp_path / "R" / "run.json").read_text())["command"]


def test_a_run_continues_if_the_reader_of_its_output_exits(stream, tmp_path, no_commands, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("sys.stdout", os.fdopen(writer, "w", 1))
    begin(stream, tmp_path, train=[])


def test_a_run_that_failed_at_its_first_command_may_begin_with_other_options(stream, tmp_path, no_commands):
    begin(stream, tmp_path)
    begin(stream, tmp_path, "--seed", "9", "--replay", "--new-first", "0.5")
    record = json.loads((tmp_path / "R" / "run.json").read_text())
    assert (record["learner"], record["seed"], record["options"]["new_first"]) == ("sm", 9, 0.5)
    assert record["train_options"]["--max-update"] == "10"
    with pytest.raises(AlmaError, match="R: expected a folder for several seeds, found a run"):
        run(stream, tmp_path, "--seed", "1", "2")
    for words in (["--lr", "abc"], []):
        begin(stream, tmp_path, train=words)
    assert float(json.loads((tmp_path / "R" / "run.json").read_text())["train_options"]["--lr"]) > 0


def test_a_run_records_the_mega_batches_and_stages_of_a_longer_stream(stream, tmp_path, no_commands, monkeypatch):
    grow = ["--learner", "gmoe", "--grow-schedule", "4,6,8,8"]
    begin(stream, tmp_path, *grow)
    path, begun = tmp_path / "R" / "run.json", Stream.open(stream).fingerprint_of_first(1)
    record = json.loads(path.read_text())
    older = record | {"stream": record["stream"] | {"num_megabatches": 1, "fingerprint": begun}}
    older = json.dumps(older | {"options": record["options"] | {"grow_schedule": "4"}})
    path.write_text(older)
    monkeypatch.setattr(RunFolder, "has_begun", lambda folder: True)
    begin(stream, tmp_path, *grow)
    assert json.loads(path.read_text()) == record
    path.write_text(older)
    monkeypatch.setattr(RunFolder, "read_stage", lambda folder, stage: {"megabatches": [stage]})
    with pytest.raises(AlmaError, match=r"stage\.json"):  # there are no results to print
        run(stream, tmp_path, *grow)
    assert path.read_text() == older  # nothing was trained


def test_a_run_of_another_alma_stream_is_not_changed(stream, tmp_path, no_commands, no_patience):
    begin(stream, tmp_path)
    with RunFolder(tmp_path / "R").lock_stage(0), pytest.raises(AlmaError, match="another alma-stream"):
        run(stream, tmp_path, "--seed", "9")
    assert json.loads((tmp_path / "R" / "run.json").read_text())["seed"] == 1


def test_the_iid_control_is_one_stage_with_the_updates_of_all(stream, tmp_path, capsys):
    train = [*TRAIN, "--total-num-update", "10", "--warmup-updates", "2"]
    run(stream, tmp_path, "--learner", "ens", "--iid", "3", "--dry-run", train=train)
    out = capsys.readouterr().out
    assert out.count("fairseq-train ") == 2 and "--megabatch 2 --wait 3" in out and "--warmup-updates 2" in out
    assert out.count("--max-update 30") == out.count("--total-num-update 30") == 2


def test_a_dry_run_of_one_member_prints_its_trainings(stream, tmp_path, capsys):
    run(stream, tmp_path, "--learner", "ens", "--member", "1", "--dry-run")
    out = capsys.readouterr().out
    assert out.count("fairseq-train ") == out.count("member-1 ") == 4 and "fairseq-eval-lm" not in out


def test_a_learner_may_start_each_stage_from_random_weights(stream, tmp_path, capsys, monkeypatch, no_commands):
    run(stream, tmp_path, "--learner", "gens", "--dry-run")
    by_default = capsys.readouterr().out
    run(stream, tmp_path, "--learner", "gens", "--init", "scratch", "--dry-run")
    assert capsys.readouterr().out == by_default and "--finetune-from-model" not in by_default
    monkeypatch.setattr(SingleModel, "starts_from", lambda *_: None)  # as a learner of --learners-from may do
    assert run(stream, tmp_path, "--dry-run", train=[]) == 0
    begin(stream, tmp_path, "--wait", "4", train=[])  # one stage; more mega-batches may follow
    assert "carry_optimizer" not in json.loads((tmp_path / "R" / "run.json").read_text())["options"]
