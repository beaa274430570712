"""Plans and complete stages of runs without models."""

from typing import Any, Mapping, Sequence

from fairseq_alma.learners.learner import LEARNERS, ModelId, Stage, StagePlan, Training, build_learner, stages
from fairseq_alma.runs.run_folder import RunFolder

COUNTS = {"num_tokens": 100, "num_bytes": 400, "num_images": 0}
RUN: Mapping[str, Any] = {
    "learner": "sm", "seed": 1, "train_options": {}, "versions": {},
    "options": {"wait": 1, "replay": False, "drop_rest": False, "init": "previous"},
    "stream": {
        "path": "S", "fingerprint": "f" * 64, "kind": "text", "num_megabatches": 3, "valid": COUNTS, "test": COUNTS,
    },
}  # fmt: skip
"""A run.json."""


def plan_learner(name: str, planned: list[Stage], kind: str = "text", seed: int = 1, **options: Any) -> list[StagePlan]:
    learner = build_learner(LEARNERS[kind][name], kind, seed, len(planned[0].arrivals), options)
    learner.check_stages(planned)
    return [learner.plan(stage) for stage in planned]


def make_plans(num_stages: int, wait: int = 1, replay: bool = False, num_members: int = 1) -> list[StagePlan]:
    """Plan to train some members in each stage."""
    planned = []
    for stage in stages(num_stages * wait, wait, replay):
        models = tuple(ModelId(stage.index, member) for member in range(num_members))
        planned.append(StagePlan(stage, tuple(Training(model, seed=1) for model in models), models))
    return planned


def stage_record(stage: int, megabatches: Sequence[int], **changes: Any) -> dict[str, Any]:
    """Return a stage.json of a run on text."""
    return {
        "stage": stage, "megabatches": [*megabatches], "num_updates": 10, "train_tokens": 1000, "train_flops": 5000.0,
        "num_params": 7, "num_experts": 4, "num_members": 1, "test_flops_per_token": 3, "wall_seconds": 2.5,
        "valid": {"loss": 3.0, "ppl": 8.0}, "test": {"loss": 2.0, "ppl": 4.0}, **changes,
    }  # fmt: skip


def complete(run: RunFolder, plan: StagePlan, ppl: float, **changes: Any) -> None:
    """Write the record of a stage, and run.json if it is missing."""
    if run.read_run() is None:
        run.write_run(RUN)
    tested = {"test": {"loss": 2.0, "ppl": ppl}, **changes}
    run.write_stage(plan.stage.index, stage_record(plan.stage.index, plan.stage.megabatches, **tested))
