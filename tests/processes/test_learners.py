"""``--num-procs 2``: two processes learn the same as one, also if one process resumes their training."""

import pytest

from tests.kills.crashes import Crash
from tests.kills.launch import launch
from tests.kills.learners import arguments_of, make_stream
from tests.runs.results import stage_records

# An update has four batches, two for each of two processes. With a small epsilon, Adam turns a gradient of rounding
# errors into a full step.
SHARED = ["--batch-size", "4", "--update-freq", "4", "--dropout", "0", "--adam-eps", "1e-3"]
SECOND_CHECKPOINT = r"/stage-001/member-0/checkpoint_\d+_12\.pt"


@pytest.mark.slow
def test_a_growing_mixture_killed_with_two_processes_and_resumed_with_one_has_the_figures_of_one(tmp_path):
    stream, log = make_stream("text", tmp_path), tmp_path / "log"

    def run(name, num_procs, crash=None):
        arguments = arguments_of("text-gmoe", stream, tmp_path / name)
        arguments[arguments.index("--") : arguments.index("--")] = ["--num-procs", str(num_procs)]
        return launch([*arguments, *SHARED], log, crash or Crash(tmp_path / name, tmp_path / "journal"))

    assert run("one", 1) == 0, log.read_text()
    assert run("two", 2, Crash(tmp_path / "two", tmp_path / "journal", 1, only=SECOND_CHECKPOINT)) == -9
    assert run("two", 1) == 0, log.read_text()
    for one, two in zip(stage_records(tmp_path / "one"), stage_records(tmp_path / "two"), strict=True):
        for name in ("num_updates", "train_tokens", "num_params", "num_experts", "megabatches"):
            assert one[name] == two[name]
        for split in ("valid", "test"):
            assert two[split]["loss"] == pytest.approx(one[split]["loss"], rel=2e-3)
