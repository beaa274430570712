"""``--num-procs 2``: two processes learn what one does, also when a process is lost and another number resumes."""

import pytest

from tests.kills.crashes import Crash
from tests.kills.launch import launch
from tests.kills.learners import arguments_of, make_stream
from tests.runs.results import stage_records

# Two batches make an update, for two processes one each. Adam turns a gradient of nothing but rounding into a whole
# step unless its eps is large.
SHARED = ["--batch-size", "4", "--update-freq", "4", "--dropout", "0", "--adam-eps", "1e-3"]
SECOND_CHECKPOINT = r"/stage-001/member-0/checkpoint_\d+_12\.pt"


@pytest.mark.slow
def test_a_mixture_that_grows_and_loses_a_process_ends_with_the_figures_of_one_process(tmp_path):
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
