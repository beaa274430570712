"""The steps of a stage, with commands that are recorded and not run."""

import math
from types import SimpleNamespace

import pytest
import torch

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import ModelId, stages
from fairseq_alma.runs.loop import RunDisplay, StageWork
from fairseq_alma.text import stage_checkpoints, text_job, text_steps
from fairseq_alma.text.helper import Command
from fairseq_alma.text.stage_checkpoints import Progress
from tests.checkpoints.small import small_checkpoint
from tests.runs.fakes import write_manifest
from tests.runs.runs import plan_learner
from tests.text.jobs import make_job as job_of

PLAN = plan_learner("sm", stages(1, 1))[0]
FACTS = SimpleNamespace(num_params=11, num_experts=4, test_flops_per_token=2)


def make_job(root, *words, own=()):
    job = job_of("--save-every", "5", *own, words=["--arch", "a", "--max-update", "10", *words], run=root / "R")
    job.stream = write_manifest(root / "S", 2)
    return job


def run_steps(job, plan, kind):
    work = StageWork(job.folder, plan, RunDisplay([plan], "token"), [0])
    shares = [step.run(work) for step in job.steps(job.folder, plan) if isinstance(step, kind)]
    return {name: value for share in shares for name, value in share.items()}


def train(job, plan=PLAN):
    return run_steps(job, plan, text_steps.TrainingStep)


def figures_of(job, plan=PLAN):
    return run_steps(job, plan, (text_steps.Before, text_steps.Join, text_steps.Test))


@pytest.fixture
def job(tmp_path):
    return make_job(tmp_path)


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Programs launched so far; each test returns ``launched.loss``."""
    record = SimpleNamespace(programs=[], loss=3.0)

    def run(command, log, files=(), watch=None, given=()):
        record.programs.append(command.program)
        words = command.arguments
        splits = words[words.index("--gen-subset") + 1].split(",") if "--gen-subset" in words else []
        return dict.fromkeys(splits, record.loss)

    def call(function, *arguments, **how):
        record.programs.append(function.rpartition(":")[2])
        if function.endswith("drop_optimizer_state"):
            stage_checkpoints.drop_optimizer_state(*arguments)

    monkeypatch.setattr(Command, "run", run)
    monkeypatch.setattr(text_steps, "call", call)
    monkeypatch.setattr(text_job, "call", call)
    monkeypatch.setattr(text_steps, "describe_checkpoint", lambda path: FACTS)
    return record


def pretend(monkeypatch, *progress):
    """Let the checkpoint exist, with this progress at each read."""
    looks = iter(progress)
    monkeypatch.setattr(stage_checkpoints, "repair_last", lambda folder: folder / "checkpoint_last.pt")
    monkeypatch.setattr(stage_checkpoints, "is_complete", lambda path: True)
    monkeypatch.setattr(text_steps, "read_progress", lambda path: next(looks))
    monkeypatch.setattr(text_steps, "synchronise", lambda *paths: None)


def write_checkpoint(job, model):
    path = job.folder.checkpoint(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(small_checkpoint(), path)
    return path


def test_a_killed_training_resumes_once_and_counts_each_token_once(job, launched, monkeypatch):
    average = write_checkpoint(job, PLAN.trainings[0].model).with_name("checkpoint_average.pt")
    average.touch()  # of an earlier call with fewer --passes
    batches = [{"from_update": 0, "batch_size": 8}, {"from_update": 5, "batch_size": 4}]
    pretend(monkeypatch, Progress(5, 0, 500), Progress(10, 0, 1000, batches=batches))
    assert train(job) == {"num_updates": 10, "train_tokens": 1000, "train_flops": 6000, "batches": batches}
    pretend(monkeypatch, Progress(10, 0, 1000))
    assert train(job)["num_updates"] == 10 and launched.programs == ["fairseq-train"] and not average.exists()


def test_an_interrupted_stage_keeps_its_tokens_per_update(job, monkeypatch):
    batches = [{"from_update": 0, "batch_size": 4, "max_tokens": None, "update_freq": [1], "num_procs": 1}]
    pretend(monkeypatch, Progress(5, 0, 500, batches=batches))
    job.lengths = [10]
    with pytest.raises(AlmaError, match=r"began with 2,048 tokens per update, found 0; give --batch-size and"):
        train(job)


@pytest.mark.parametrize("done", [Progress(10, 0, 500, megabatch=7), Progress(5, 0, 500, has_optimizer=False)])
def test_a_training_that_its_checkpoint_cannot_continue_starts_again(job, launched, monkeypatch, capsys, done):
    last = write_checkpoint(job, PLAN.trainings[0].model)
    pretend(monkeypatch, done, Progress(10, 0, 900))
    assert train(job)["train_tokens"] == 900 and launched.programs == ["fairseq-train"]
    assert "older than a mega-batch of its stage" in capsys.readouterr().err and not last.exists()


def test_a_training_that_ends_early_is_an_error(job, monkeypatch):
    pretend(monkeypatch, Progress(5, 0, 500), Progress(7, 0, 700))
    with pytest.raises(AlmaError, match=r"train-member-0.log: fairseq-train ended after 7 updates"):
        train(job)


def test_a_missing_start_is_reported_with_the_stage_to_run(job):
    with pytest.raises(AlmaError, match=r"stage-000/member-0/.*no such file, .*stage-000/stage.json and run --stage 0"):
        train(job, plan_learner("sm", stages(2, 1))[1])


def test_a_test_gives_loss_perplexity_and_bits_per_byte(job, launched):
    launched.loss = 5.1234
    record = figures_of(job)
    assert record["test"] == record["valid"] == {"loss": 5.1234, "ppl": round(2**5.1234, 4), "bits_per_byte": 1.28085}
    assert (record["num_params"], record["num_experts"], record["num_members"]) == (11, 4, 1)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1024.0])
def test_a_diverged_training_is_an_error(job, launched, loss):
    launched.loss = loss
    with pytest.raises(AlmaError, match=r"test.log: the loss on valid is .* \(training diverged\).* --clip-norm 1$"):
        figures_of(job)


def test_members_have_their_final_form_before_the_ensemble_takes_their_checksums(job, launched):
    plan = plan_learner("ens", stages(2, 1), num_members=2)[0]
    paths = [write_checkpoint(job, model) for model in plan.predictors]
    record = figures_of(job, plan)
    assert (record["num_params"], record["num_experts"], record["num_members"]) == (22, 4, 2)
    before = [path.read_bytes() for path in paths]
    assert "last_optimizer_state" not in torch.load(paths[1], weights_only=True)
    job.keep_only(job.folder, range(1), plan.predictors, [])
    assert [path.read_bytes() for path in paths] == before
    assert launched.programs == ["drop_optimizer_state"] * 2 + ["main", "fairseq-eval-lm"]


def test_predicting_models_stay_and_unneeded_files_are_removed(tmp_path):
    job, second = make_job(tmp_path, own=["--learner", "gens"]), plan_learner("gens", stages(2, 1))[1]
    paths = [write_checkpoint(job, model) for model in second.predictors]
    ensembles = [job.folder.stage_folder(stage) / "ensemble.pt" for stage in (0, 1)]
    for path in (*ensembles, job.grown(ModelId(1, 1))):
        path.touch()
    mine = write_checkpoint(job, ModelId(1, 7))  # of no model of the run
    job.keep_only(job.folder, range(2), second.predictors, [])
    assert [path.is_file() for path in (mine, *paths, ensembles[1])] == [True] * 4
    job.keep_only(job.folder, range(2), second.predictors[1:], second.predictors[:1])
    assert [path.is_file() for path in (mine, *paths, *ensembles)] == [True, False, True, False, False]
    assert not job.grown(ModelId(1, 1)).exists()


def test_growth_precedes_training_and_is_tested_once(job, launched, monkeypatch):
    plan = plan_learner("gmoe", stages(2, 1), grow_schedule="4,6")[1]
    write_checkpoint(job, plan.trainings[0].start)
    pretend(monkeypatch, Progress(0, 0, 0), Progress(0, 0, 0), Progress(10, 0, 1000))
    train(job, plan)
    assert launched.programs == ["alma-grow", "fairseq-train"]
    assert figures_of(job, plan)["after_growth"]["valid"]["loss"] == 3.0
    launched.programs.clear()
    launched.loss = 4.0
    assert figures_of(job, plan)["after_growth"]["valid"]["loss"] == 3.0  # the grown checkpoint may be removed
    assert launched.programs == ["fairseq-eval-lm"]


def test_the_held_out_part_of_each_arrival_is_tested_before_and_after(job, launched, monkeypatch):
    plan = plan_learner("sm", stages(2, 1))[1]
    monkeypatch.setattr(type(job), "holdouts", lambda self, arrivals: [f"megabatch-{t:03d}/holdout" for t in arrivals])
    monkeypatch.setattr(type(job.stream), "split", lambda self, name: self.splits[0])
    assert "megabatch-001/holdout" in str(text_steps.Before(job, plan).commands()[0])  # in a dry run
    write_checkpoint(job, plan.trainings[0].start)
    run_steps(job, plan, text_steps.Before)
    launched.loss = 2.0
    job.keep_only(job.folder, range(2), [], [plan.trainings[0].start])  # the user may run the stage again
    old, new = figures_of(job, plan)["holdouts"]
    assert (old["megabatch"], old["loss"], old["before"]) == (0, 2.0, None)
    assert (new["megabatch"], new["loss"], new["before"]["loss"]) == (1, 2.0, 3.0)


def test_nothing_is_removed_before_the_kept_files_are_on_the_disk(job, monkeypatch):
    second = plan_learner("sm", stages(2, 1))[1]
    before, after = (write_checkpoint(job, model) for model in (second.trainings[0].start, *second.predictors))

    def fail(*paths):
        assert paths == (after, after.parent)
        raise OSError("the disk has failed")

    monkeypatch.setattr(stage_checkpoints, "synchronise", fail)
    with pytest.raises(OSError, match="the disk has failed"):
        job.keep_only(job.folder, range(2), second.predictors, [second.trainings[0].start])
    assert before.is_file()


def test_a_training_with_a_truncated_best_checkpoint_starts_again(launched, monkeypatch, tmp_path):
    job = make_job(tmp_path, own=["--best-checkpoint"])
    last = write_checkpoint(job, PLAN.trainings[0].model)
    best = last.with_name("checkpoint_best.pt")
    best.write_bytes(last.read_bytes()[:100])
    monkeypatch.setattr(stage_checkpoints, "is_complete", lambda path: True)
    monkeypatch.setattr(text_steps, "read_progress", lambda path: Progress(10, 0, 1000))
    monkeypatch.setattr(text_steps, "synchronise", lambda *paths: None)
    train(job)
    assert launched.programs == ["fairseq-train"]
    assert not last.exists() and not best.exists()


def test_a_training_step_is_done_at_the_last_update(job, monkeypatch):
    steps = [step for step in job.steps(job.folder, PLAN) if step.trains]
    assert [step.is_done() for step in steps] == [False]
    write_checkpoint(job, PLAN.trainings[0].model)
    for updates, is_done in ((5, False), (10, True)):
        monkeypatch.setattr(text_steps, "read_progress", lambda path, n=updates: Progress(n, 0, 100))
        assert [step.is_done() for step in steps] == [is_done]
