import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import ModelId, stages
from fairseq_alma.runs.loop import StageWork
from fairseq_alma.text import stage_checkpoints, text_steps
from fairseq_alma.text.stage_checkpoints import Progress
from fairseq_alma.watch.run_display import RunDisplay
from tests.checkpoints.small import small_checkpoint
from tests.runs.runs import plan_learner
from tests.text.jobs import make_job as job_of

PYTHON = Path(sys.executable).name
PLAN = plan_learner("sm", stages(1, 1))[0]
FACTS = SimpleNamespace(num_params=11, num_experts=4, train_flops_per_token=6, test_flops_per_token=2, num_members=1)
RESULT = "2026-01-01 00:00:00 | INFO | fairseq_cli.eval_lm | Loss (base 2): {}, Perplexity: 1.00"
TESTED = "2026-01-01 00:00:00 | INFO | fairseq_cli.eval_lm | {}: {} bits per token"


def results(loss):
    """What a test on both sets prints, and one on valid alone."""
    return [*(TESTED.format(split, loss) for split in ("valid", "test")), RESULT.format(loss)]


def make_job(root, *words, own=()):
    return job_of("--save-every", "5", *own, words=["--arch", "a", "--max-update", "10", *words], run=root)


def run_steps(job, plan, of_trainings):
    """What the steps of a stage say, of its trainings or of what follows them."""
    work = StageWork(job.folder, plan, RunDisplay([plan], "word"), [0])
    shares = [step.run(work) for step in job.steps(job.folder, plan) if bool(step.trains) == of_trainings]
    return {name: value for share in shares for name, value in share.items()}


def train(job, plan):
    return run_steps(job, plan, True)  # of several trainings the last


def figures_of(job, plan):
    return run_steps(job, plan, False)


@pytest.fixture
def job(tmp_path):
    return make_job(tmp_path)


@pytest.fixture(autouse=True)
def facts(monkeypatch):
    monkeypatch.setattr(text_steps, "_facts", lambda path: FACTS)


@pytest.fixture
def launched(monkeypatch):
    """Programs launched so far; each prints the lines that the test has put into ``launched.lines``."""
    record = SimpleNamespace(programs=[], lines=[], environments=[])

    def run(command, log, watch, keep_open):
        record.programs.append(command.program)
        record.environments.append(command.environment)
        for line in record.lines:
            watch(line)

    monkeypatch.setattr(text_steps, "run_logged", run)
    return record


def pretend(monkeypatch, *progress):
    """Let the checkpoint be there, and be this far at each look."""
    looks = iter(progress)
    monkeypatch.setattr(stage_checkpoints, "repair_last", lambda folder: folder / "checkpoint_last.pt")
    monkeypatch.setattr(stage_checkpoints, "is_whole", lambda path: True)
    monkeypatch.setattr(stage_checkpoints, "read_progress", lambda path: next(looks))
    monkeypatch.setattr(stage_checkpoints, "synchronise", lambda path: None)


def test_a_training_that_was_cut_off_goes_on_and_counts_each_token_once(job, launched, monkeypatch):
    pretend(monkeypatch, Progress(5, 0, 500), Progress(10, 0, 1000))
    assert train(job, PLAN) == {"num_updates": 10, "train_tokens": 1000, "train_flops": 6000}
    assert launched.programs == ["fairseq-train"]


def test_a_finished_training_is_not_launched_again_for_it_would_do_one_more_update(job, launched, monkeypatch):
    pretend(monkeypatch, Progress(10, 0, 1000))
    assert train(job, PLAN)["num_updates"] == 10
    assert launched.programs == []


def test_a_training_that_ends_early_is_an_error(job, launched, monkeypatch):
    pretend(monkeypatch, Progress(5, 0, 500), Progress(7, 0, 700))
    with pytest.raises(AlmaError, match=r"train-member-0.log: fairseq-train ended after 7 updates"):
        train(job, PLAN)


def test_a_stage_whose_start_is_gone_says_which_stage_to_run(job, launched):
    second = plan_learner("sm", stages(2, 1))[1]
    with pytest.raises(
        AlmaError, match=r"stage-000/member-0/checkpoint_last.pt: not there, and stage 1 starts from it"
    ):
        train(job, second)


def test_perplexity_is_computed_from_the_printed_loss(job, launched):
    launched.lines = ["something else", *results("5.1234")]
    record = figures_of(job, PLAN)
    assert record["test"] == record["valid"] == {"loss": 5.1234, "ppl": pytest.approx(2**5.1234, abs=1e-4)}
    assert (record["num_params"], record["num_experts"], record["num_members"]) == (11, 4, 1)
    assert record["test_flops_per_token"] == 2


def test_an_evaluation_without_a_result_is_an_error(job, launched):
    with pytest.raises(AlmaError, match=r"test.log: no loss on valid was printed"):
        figures_of(job, PLAN)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1024.0, 5e4])
def test_a_diverged_training_is_an_error(job, launched, loss):
    launched.lines = results(loss)
    message = r"test.log: the loss on valid is (nan|inf|1024\.0|50000\.0), so the training diverged.*--lr"
    with pytest.raises(AlmaError, match=message):
        figures_of(job, PLAN)


def plans_of(learner, **options):
    return plan_learner(learner, stages(2, 1), **options)


def write_checkpoint(job, model):
    path = job.folder.checkpoint(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(small_checkpoint(), path)
    return path


def test_the_figures_of_an_ensemble_are_sums_but_experts_are_those_of_a_member(job, launched):
    plan = plans_of("ens", num_members=2)[0]
    launched.lines = results("5.0")
    for model in plan.predictors:
        write_checkpoint(job, model)
    record = figures_of(job, plan)
    assert (record["num_params"], record["num_experts"], record["num_members"]) == (22, 4, 2)
    assert record["test_flops_per_token"] == 4


def test_members_have_their_final_form_before_the_ensemble_takes_their_checksums(job, launched, monkeypatch):
    plan = plans_of("ens", num_members=2)[0]
    paths = [write_checkpoint(job, model) for model in plan.predictors]
    launched.lines = results("5.0")
    figures_of(job, plan)
    before = [path.read_bytes() for path in paths]
    assert "last_optimizer_state" not in torch.load(paths[1], weights_only=True)
    job.keep_only(job.folder, range(1), plan.predictors, [])
    assert [path.read_bytes() for path in paths] == before
    assert launched.programs == [PYTHON]


def test_what_predicts_stays_and_what_nobody_needs_goes(job):
    def ensembles(stage):
        return [job.folder.stage_folder(stage) / name for name in ("ensemble.pt", "ensemble-predictions.npz")]

    second = plans_of("gens")[1]
    paths = [write_checkpoint(job, model) for model in second.predictors]
    leftovers = [*ensembles(0), job.folder.stage_folder(1) / "grown.pt"]
    last = ensembles(1)
    for path in (*leftovers, *last):
        path.touch()
    mine = write_checkpoint(job, ModelId(1, 7))
    job.keep_only(job.folder, range(2), second.predictors, [])
    assert mine.is_file()  # of no model of the run
    assert all(path.is_file() for path in (*paths, *last))
    assert not any(path.exists() for path in leftovers)
    job.keep_only(job.folder, range(2), second.predictors[1:], second.predictors[:1])
    assert [path.is_file() for path in paths] == [False, True]


def test_growth_comes_before_training_and_is_not_done_twice(job, launched, monkeypatch):
    plan = plans_of("gmoe", grow_schedule="4,6")[1]
    write_checkpoint(job, plan.trainings[0].start)
    begun, ended = Progress(0, 0, 0), Progress(10, 0, 1000)
    pretend(monkeypatch, begun, begun, ended, begun, ended)  # the first look is growth's
    train(job, plan)
    assert launched.programs == ["alma-grow", "fairseq-train"]
    job.grown(plan.trainings[0].model).parent.mkdir(exist_ok=True)
    job.grown(plan.trainings[0].model).touch()
    train(job, plan)
    assert launched.programs == ["alma-grow", "fairseq-train", "fairseq-train"]


def test_the_perplexity_right_after_growth_is_recorded(job, launched):
    plan = plans_of("gmoe", grow_schedule="4,6")[1]
    write_checkpoint(job, plan.trainings[0].start)
    launched.lines = results("3.0")
    assert figures_of(job, plan)["after_growth"] == {"valid": {"loss": 3.0, "ppl": 8.0}}
    assert "after_growth" not in figures_of(job, plans_of("gmoe", grow_schedule="4,6")[0])


def test_curves_go_on_after_a_kill_and_begin_anew_with_a_training_that_begins(launched, monkeypatch, tmp_path):
    pytest.importorskip("tensorboard")
    job = make_job(tmp_path / "R", "--tensorboard-logdir", str(tmp_path / "tb"), "--wandb-project", "p")
    curve = tmp_path / "tb" / "R" / "stage-000" / "member-0" / "train" / "events.out.tfevents.1"
    curve.parent.mkdir(parents=True)
    curve.touch()
    pretend(monkeypatch, Progress(5, 0, 500), Progress(10, 0, 1000), Progress(5, 0, 500), Progress(10, 0, 1000))
    train(job, PLAN)
    train(job, PLAN)
    assert curve.exists()
    pretend(monkeypatch, Progress(10, 0, 1000))
    monkeypatch.setattr(stage_checkpoints, "repair_last", lambda folder: None)
    train(job, PLAN)
    assert not curve.exists()
    first, second, third = (environment["WANDB_RUN_ID"] for environment in launched.environments)
    assert first == second != third


def test_nothing_is_removed_before_what_stays_is_on_the_disk(job, monkeypatch):
    second = plans_of("sm")[1]
    before, after = (write_checkpoint(job, model) for model in (second.trainings[0].start, *second.predictors))

    def fail(path):
        assert path == after
        raise OSError("the disk is gone")

    monkeypatch.setattr(stage_checkpoints, "synchronise", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        job.keep_only(job.folder, range(2), second.predictors, [second.trainings[0].start])
    assert before.is_file()


def test_a_finished_training_is_on_the_disk_before_its_stage_is_complete(job, launched, monkeypatch):
    synchronised = []
    for looks in ([Progress(10, 0, 1000)], [Progress(5, 0, 500), Progress(10, 0, 1000)]):
        pretend(monkeypatch, *looks)
        monkeypatch.setattr(stage_checkpoints, "synchronise", synchronised.append)
        train(job, PLAN)
    assert synchronised == [job.folder.checkpoint(PLAN.trainings[0].model)] * 2


def test_a_training_whose_best_checkpoint_was_cut_off_begins_anew(launched, monkeypatch, tmp_path):
    job = make_job(tmp_path, own=["--best-checkpoint"])
    last = write_checkpoint(job, PLAN.trainings[0].model)
    best = last.with_name("checkpoint_best.pt")
    best.write_bytes(last.read_bytes()[:100])
    monkeypatch.setattr(stage_checkpoints, "is_whole", lambda path: True)
    monkeypatch.setattr(stage_checkpoints, "read_progress", lambda path: Progress(10, 0, 1000))
    monkeypatch.setattr(stage_checkpoints, "synchronise", lambda path: None)
    train(job, PLAN)
    assert launched.programs == ["fairseq-train"]
    assert not last.exists() and not best.exists()


def test_a_stage_json_that_is_removed_comes_back_without_what_grew(job, launched):
    plan = plans_of("gmoe", grow_schedule="4,6")[1]
    start = write_checkpoint(job, plan.trainings[0].start)
    launched.lines = results("3.0")
    record = figures_of(job, plan)
    assert launched.programs[:2] == ["alma-grow", "fairseq-eval-lm"]
    start.unlink()
    launched.programs.clear()
    assert figures_of(job, plan) == record
    assert launched.programs == [PYTHON]


def test_a_stage_without_a_note_of_its_growth_grows_again_or_says_what_it_takes(job, launched):
    plan = plans_of("gmoe", grow_schedule="4,6")[1]
    note = job.folder.stage_folder(1) / "growth.json"
    launched.lines = results("3.0")
    with pytest.raises(AlmaError, match=r"stage-000/member-0/.*not there, and stage 1 starts from it; remove"):
        figures_of(job, plan)
    write_checkpoint(job, plan.trainings[0].start)
    note.parent.mkdir()
    note.write_text('{"valid": {"loss": ')
    assert figures_of(job, plan)["after_growth"] == {"valid": {"loss": 3.0, "ppl": 8.0}}
    assert launched.programs[0] == "alma-grow"


def test_a_run_that_is_moved_while_a_command_runs_says_so(job, monkeypatch, tmp_path):
    def move(command, log, watch, keep_open):
        (tmp_path / "R").rename(tmp_path / "moved")
        raise FileNotFoundError(log)

    job = make_job(tmp_path / "R")
    with job.folder.lock_stage(0):
        monkeypatch.setattr(text_steps, "run_logged", move)
        with pytest.raises(AlmaError, match=r"R: the folder was moved, or replaced"):
            train(job, PLAN)


def test_a_model_is_there_when_the_steps_are_done_that_train_it(job, monkeypatch):
    steps = job.steps(job.folder, PLAN)
    assert [step.is_done() for step in steps if step.trains] == [False]
    write_checkpoint(job, PLAN.trainings[0].model)
    for updates, is_done in ((5, False), (10, True)):
        monkeypatch.setattr(stage_checkpoints, "read_progress", lambda path, n=updates: Progress(n, 0, 100))
        assert [step.is_done() for step in steps if step.trains] == [is_done]
