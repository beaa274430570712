"""Fast fakes: a stream without data files, a back end that trains nothing, a display that records calls."""

import json
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

from fairseq_alma.data.stream import Split, Stream, StreamFile, TokenizerEntry, split_name
from fairseq_alma.learners.learner import ModelId, StagePlan, Training
from fairseq_alma.runs.loop import StageWork
from fairseq_alma.runs.run_folder import RunFolder

SHA = "0" * 64


def write_manifest(root: Path, num_megabatches: int, seed: int = 1) -> Stream:
    """Write a stream.json of text without its files."""
    names = [*(split_name(t) for t in range(num_megabatches)), "valid", "test"]
    files = {name: tuple(StreamFile(f"{name}{suffix}", 8, SHA) for suffix in (".bin", ".idx")) for name in names}
    splits = tuple(Split(name, files[name], 2, 40, 100, 400) for name in names)
    tokenizer = TokenizerEntry.describe("tokenizers", 50, [StreamFile("tokenizer/tokenizer.json", 3, SHA)])
    stream = Stream(root, "text", seed, splits, tokenizer, StreamFile("dict.txt", 3, SHA))
    root.mkdir(parents=True, exist_ok=True)
    (root / "stream.json").write_text(json.dumps(stream.to_json()))
    return stream


class FakeBackend:
    """Records its calls; raises KeyboardInterrupt in the test of one stage; has lost the weights of some models."""

    def __init__(self, fail_in_test_of: int = -1, lost: Sequence[ModelId] = ()) -> None:
        self.calls: list[tuple[str, int]] = []
        self.members: list[ModelId] = []
        self.kept: dict[int, list[ModelId]] = {}
        self.lost = [*lost]
        self.fail_in_test_of = fail_in_test_of

    def steps(self, folder: RunFolder, plan: StagePlan) -> list["FakeStep"]:
        return [*(FakeStep(self, training.model) for training in plan.trainings), FakeStep(self)]

    def train(self, stage: int, model: ModelId) -> Mapping[str, Any]:
        self.calls.append(("train", stage))
        self.members.append(model)
        self.lost = [each for each in self.lost if each != model]
        return {"num_updates": 10, "train_tokens": 1000, "train_flops": 5000}

    def is_done(self, model: Optional[ModelId]) -> bool:
        return model not in self.lost

    def test(self, stage: int) -> Mapping[str, Any]:
        self.calls.append(("test", stage))
        if stage == self.fail_in_test_of:
            raise KeyboardInterrupt
        facts = {"num_params": 7, "num_experts": 4, "num_members": 1, "test_flops_per_token": 3}
        return {**facts, "valid": {"loss": 3.0, "ppl": 8.0}, "test": {"loss": 2.0, "ppl": 4.0}}

    def keep_only(self, folder: RunFolder, stages: range, needed: Sequence[ModelId], gone: object) -> None:
        self.kept[stages[-1]] = list(needed)


class FakeStep:
    """Trains one model, or tests."""

    def __init__(self, backend: FakeBackend, *trains: ModelId) -> None:
        self.backend, self.trains = backend, trains

    def is_done(self, model: Optional[ModelId] = None) -> bool:
        return self.backend.is_done(model)

    def commands(self) -> Sequence[object]:
        return ()

    def run(self, work: StageWork) -> Mapping[str, Any]:
        stage = work.plan.stage.index
        return self.backend.train(stage, *self.trains) if self.trains else self.backend.test(stage)


class FakeDisplay:
    def __init__(self) -> None:
        self.shown: list[tuple[str, int]] = []

    def completed(self, plan: StagePlan, record: Mapping[str, Any], is_new: bool = True) -> None:
        self.shown.append(("completed" if is_new else "skipped", plan.stage.index))

    def trained(self, plan: StagePlan, training: Training) -> None:
        self.shown.append((f"trained member {training.model.member}", plan.stage.index))
