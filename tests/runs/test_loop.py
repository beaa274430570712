import json

import pytest

from fairseq_alma.errors import AlmaError, ProcessError
from fairseq_alma.learners.learner import ModelId, stages
from fairseq_alma.runs.loop import Run, run_stages, train_members
from fairseq_alma.runs.run_folder import RunFolder, StageClock
from tests.runs.fakes import FakeBackend, FakeDisplay
from tests.runs.runs import plan_learner


def plan(num_megabatches=3, wait=1, init="previous"):
    return plan_learner("sm", stages(num_megabatches, wait), init=init)


def run(root, backend, plans=None, **options):
    display = FakeDisplay()
    (num_run,) = run_stages([Run(RunFolder(root), plans or plan(), display)], backend, **options)
    return num_run, display.shown


def test_stages_run_in_order_and_each_writes_a_record(tmp_path):
    backend = FakeBackend()
    assert run(tmp_path, backend) == (3, [("completed", 0), ("completed", 1), ("completed", 2)])
    assert backend.calls == [(step, stage) for stage in range(3) for step in ("train", "test")]
    record = json.loads((tmp_path / "stage-001" / "stage.json").read_text())
    assert set(record) == {
        "format_version", "stage", "megabatches", "num_params", "num_experts", "num_members", "num_updates",
        "train_tokens", "train_flops", "test_flops_per_token", "wall_seconds", "valid", "test",
    }  # fmt: skip
    assert (record["stage"], record["megabatches"]) == (1, [1])


def test_seeds_share_the_wall_time_of_a_stage_without_evaluations_also_if_one_fails(tmp_path, monkeypatch):
    clock, evaluations = [6.0], [dict, lambda: 1 / 0, dict, dict]
    monkeypatch.setattr(StageClock, "seconds", lambda _: clock[-1])
    evaluate = lambda _: clock.append(9.0) or evaluations.pop(0)()  # noqa: E731
    runs = [Run(RunFolder(tmp_path / name), plan(1), FakeDisplay(), evaluate) for name in "ab"]
    with pytest.raises(ZeroDivisionError):
        run_stages(runs, FakeBackend())
    clock.append(6.0)
    run_stages(runs, FakeBackend())
    assert [each.folder.read_stage(0)["wall_seconds"] for each in runs] == [3.0, 3.0]


def test_a_complete_run_runs_nothing_and_cannot_keep_removed_weights(tmp_path, capsys):
    run(tmp_path, FakeBackend(), keep=[0])
    assert not capsys.readouterr().err
    backend = FakeBackend()
    assert run(tmp_path, backend, keep=[0]) == (0, [("skipped", 0), ("skipped", 1), ("skipped", 2)])
    assert backend.calls == [] and backend.kept == {}
    assert "note: --keep 0: weights of " in capsys.readouterr().err


def test_the_next_call_completes_an_interrupted_removal_of_weights(tmp_path):
    class CutOff(FakeBackend):
        def keep_only(self, folder, stages, needed, gone):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, CutOff())
    backend = FakeBackend()
    assert run(tmp_path, backend)[1] == [("skipped", 0), ("completed", 1), ("completed", 2)]
    assert backend.kept == {0: [ModelId(0, 0)], 1: [ModelId(1, 0)], 2: [ModelId(2, 0)]}


def test_weights_that_no_stage_needs_are_removed_after_a_stage_runs_again(tmp_path):
    for stage in range(3):
        run(tmp_path, FakeBackend(), plan(num_megabatches=4), only=stage)
    (tmp_path / "stage-000" / "stage.json").unlink()
    backend = FakeBackend()
    run(tmp_path, backend, plan(num_megabatches=4), only=0)
    assert backend.kept == {2: [ModelId(2, 0)]}


def test_a_stage_can_run_alone_after_the_stage_before(tmp_path):
    with pytest.raises(AlmaError, match=r"stage-000/stage.json.*stage 1 starts.*run --stage 0 first"):
        run(tmp_path, FakeBackend(), only=1)
    with pytest.raises(AlmaError, match=r"stage-000/stage.json: missing, but stage 1 predicts with"):
        run(tmp_path, FakeBackend(), plan_learner("gens", stages(2, 1), init="scratch"), only=1)
    assert run(tmp_path, FakeBackend(), only=0)[0] == 1
    assert run(tmp_path, FakeBackend(), only=1) == (1, [("completed", 1)])


def test_a_stage_removes_nothing_of_an_earlier_stage_that_is_incomplete(tmp_path):
    backend, seen = FakeBackend(), []
    backend.keep_only = lambda folder, stages, needed, gone: seen.append((list(stages), gone))
    run(tmp_path, backend, plan(init="scratch"), only=1)
    assert seen == [([1], [])]


@pytest.mark.parametrize(
    ("keep", "stay"), [((), [2]), ((0,), [2]), ((3,), [1, 2]), ((9, 2), [0, 2]), ((1, 3), [0, 1, 2])]
)
def test_models_of_kept_arrivals_stay_and_one_note_reports_the_removal_of_others(keep, stay, tmp_path, capsys):
    for stage in range(3):
        path = RunFolder(tmp_path).checkpoint(ModelId(stage, 0))
        path.parent.mkdir(parents=True)
        path.touch()
    backend = FakeBackend()
    run(tmp_path, backend, plan(num_megabatches=5, wait=2), keep=keep)
    assert backend.kept[2] == [ModelId(stage, 0) for stage in stay]
    assert capsys.readouterr().err.count("give --keep ARRIVAL") == int(not keep)


def test_a_run_resumes_when_its_stream_has_grown_unless_a_complete_stage_would_grow(tmp_path):
    run(tmp_path / "3", FakeBackend(), plan(num_megabatches=4, wait=3))
    with pytest.raises(AlmaError, match=r"stage-001/stage.json: expected mega-batches \[3, 4, 5\], found \[3\]"):
        run(tmp_path / "3", FakeBackend(), plan(num_megabatches=6, wait=3))
    run(tmp_path, FakeBackend(), plan(num_megabatches=2))
    backend = FakeBackend()
    assert run(tmp_path, backend)[0] == 1 and backend.calls == [("train", 2), ("test", 2)]


def ensemble(learner="ens", num_megabatches=2):
    return plan_learner(learner, stages(num_megabatches, 1), num_members=2)


def train_alone(root, member, backend, learner="ens", only=None):
    display = FakeDisplay()
    train_members(Run(RunFolder(root), ensemble(learner), display), [member], backend, only)
    return display.shown


def test_a_member_can_be_trained_alone_and_completes_no_stage(tmp_path):
    backend = FakeBackend()
    assert train_alone(tmp_path, 1, backend) == [("trained member 1", 0), ("trained member 1", 1)]
    assert backend.members == [ModelId(0, 1), ModelId(1, 1)]
    assert not list(tmp_path.glob("stage-*/stage.json"))
    assert run(tmp_path, FakeBackend(), ensemble())[0] == 2
    assert not list(tmp_path.glob("stage-*/clock*"))
    assert train_alone(tmp_path, 1, backend) == [("skipped", 0), ("skipped", 1)]


def test_a_member_needs_its_own_weights_of_the_stage_before(tmp_path):
    backend = FakeBackend(lost=[ModelId(0, 0), ModelId(0, 1)])
    train_alone(tmp_path, 0, backend, only=0)
    with pytest.raises(AlmaError, match=r"stage-000/member-1: incomplete.*run --stage 0 --mem"):
        train_alone(tmp_path, 1, backend, only=1)
    assert train_alone(tmp_path, 0, backend, only=1) == [("trained member 0", 1)]


def test_a_stage_waits_for_models_of_other_processes_before_it_is_locked(tmp_path):
    folder, awaited = RunFolder(tmp_path), []

    def await_models(plan):
        with folder.lock_member(plan.trainings[0].model):  # which is refused where the stage is locked
            awaited.append(plan.stage.index)

    run_stages([Run(folder, ensemble(), FakeDisplay())], FakeBackend(), await_models=await_models)
    assert awaited == [0, 1]
    run_stages([Run(folder, ensemble(), FakeDisplay())], FakeBackend(), await_models=await_models)
    assert awaited == [0, 1]


def test_a_stage_that_completes_while_a_member_waits_for_its_lock_is_skipped(tmp_path, monkeypatch):
    lock, backend = RunFolder.lock_member, FakeBackend()

    def complete_and_lock(folder, model):
        run(tmp_path, FakeBackend(), ensemble(), only=0)
        return lock(folder, model)

    monkeypatch.setattr(RunFolder, "lock_member", complete_and_lock)
    train_alone(tmp_path, 1, backend, only=0)
    assert backend.calls == [] and not list(tmp_path.glob("stage-*/clock*"))


def test_members_of_a_stage_can_be_trained_at_the_same_time_but_none_twice(tmp_path, no_patience):
    folder = RunFolder(tmp_path)
    with folder.lock_member(ModelId(0, 0)), folder.lock_member(ModelId(0, 1)):
        with pytest.raises(AlmaError, match="stage-000/member-1: another alma-stream"):
            train_alone(tmp_path, 1, FakeBackend())
        with pytest.raises(AlmaError, match="stage-000: another alma-stream"):
            run(tmp_path, FakeBackend(), ensemble())
    with folder.lock_stage(0), pytest.raises(AlmaError, match="stage-000: another alma-stream"):
        train_alone(tmp_path, 1, FakeBackend())


def test_a_trained_member_is_skipped_while_another_process_evaluates_the_stage_and_its_time_counts(
    tmp_path, no_patience
):
    train_alone(tmp_path, 1, FakeBackend(), only=0)
    backend = FakeBackend()
    with RunFolder(tmp_path).lock_stage(0):  # as --jobs does after a killed evaluation
        assert train_alone(tmp_path, 1, backend) == [("trained member 1", 0), ("trained member 1", 1)]
    assert backend.members == [ModelId(1, 1)]
    (tmp_path / "stage-000/clock-member-0.json").write_text(json.dumps({"spent": 1000.0, "started": None}))
    run(tmp_path, FakeBackend(), ensemble(), only=0)
    assert json.loads((tmp_path / "stage-000" / "stage.json").read_text())["wall_seconds"] >= 1000


def test_a_stage_with_damaged_weights_runs_again_until_it_is_tidy(tmp_path, capsys):
    class CutOff(FakeBackend):
        def keep_only(self, folder, stages, needed, gone):
            if stages[-1] == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, CutOff())
    backend = FakeBackend(lost=[ModelId(1, 0)])
    assert run(tmp_path, backend)[1] == [("skipped", 0), ("completed", 1), ("completed", 2)]
    assert backend.calls[0] == ("train", 1)
    assert "stage-001/member-0/checkpoint_last.pt: missing or damaged; stage 1 runs again" in capsys.readouterr().err


def test_missing_weights_are_named_with_the_stage_that_must_run_again(tmp_path):
    for stage in (0, 1):
        run(tmp_path, FakeBackend(), only=stage)
    backend = FakeBackend(lost=[ModelId(1, 0), ModelId(2, 0)])
    with pytest.raises(
        AlmaError, match=r"stage-001/member-0: a checkpoint is missing or.*; remove .*/stage-001/stage.json to complete"
    ):
        run(tmp_path, backend)
    assert backend.calls == []


def test_a_process_that_fails_while_it_reads_a_checkpoint_does_not_make_the_stage_run_again(tmp_path):
    class OutOfMemory(FakeBackend):
        def is_done(self, model):
            raise ProcessError("the helper process was killed")

    run(tmp_path, FakeBackend(), only=0)
    with pytest.raises(ProcessError, match="helper process was killed"):
        run(tmp_path, OutOfMemory())
    assert RunFolder(tmp_path).read_stage(0) is not None


def test_a_stage_that_another_command_completes_meanwhile_needs_no_weights(tmp_path):
    class Late(FakeBackend):
        def is_done(self, model):
            run(tmp_path, FakeBackend(), only=1)  # which removes the weights of stage 0
            return False

    run(tmp_path, FakeBackend(), only=0)
    assert run(tmp_path, Late(), only=1) == (0, [("skipped", 1)])


def test_costs_of_trainings_add_up_to_the_cost_of_the_stage(tmp_path):
    class Uneven(FakeBackend):
        def train(self, stage, model):
            return {**super().train(stage, model), "num_updates": 10 - model.member, "train_tokens": 3 + model.member}

    run(tmp_path, Uneven(), ensemble(), only=0)
    record = json.loads((tmp_path / "stage-000" / "stage.json").read_text())
    assert (record["num_updates"], record["train_tokens"], record["train_flops"]) == (10, 7, 10_000)
