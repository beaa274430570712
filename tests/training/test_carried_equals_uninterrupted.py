"""Stages with a carried optimizer equal one uninterrupted training on the same batches, bit for bit.

The stages are the commands of ``alma-stream --dry-run`` (one pass, constant rate, nothing reset), each started from the
checkpoint of the previous one. The uninterrupted training reads the batches of all stages in the same order and loads
no checkpoint. A difference means that state is lost, rounded or reset at the end of a stage.
"""

import itertools
import re
import shlex

import pytest
import torch
from fairseq import options
from fairseq.data.iterators import CountingIterator
from fairseq.distributed import utils as distributed_utils
from fairseq.trainer import Trainer
from fairseq_cli import train

from fairseq_alma.checkpoints import AVERAGE
from fairseq_alma.checkpoints.checkpoint_file import find_average
from fairseq_alma.cli.grow import main as grow
from fairseq_alma.cli.stream import main as stream_command
from fairseq_alma.growth.tensors import EXPERTS, GATE_TENSOR, grow_mixture, grow_moments, grow_tensor
from fairseq_alma.moe import DescendingGate
from fairseq_alma.text.task import AlmaLMTask
from fairseq_alma.training.features import WeightAverage
from fairseq_alma.training.stage_task import configuration_of
from tests.forked import group_options, together

STAGES, UPDATES, BATCHES = 3, 5, 2
"""Stages of the run, updates per stage, and batches per update over all processes."""
TRAINING = (
    "--arch alma_switch_lm_tiny --decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 "
    "--decoder-attention-heads 2 --dropout 0.1 --criterion alma_switch_cross_entropy --optimizer adam "
    "--adam-betas (0.9,0.98) --clip-norm 1.0 --lr 0.01 --lr-scheduler fixed --warmup-updates 7 --batch-size 4 "
    f"--tokens-per-sample 32 --update-freq {BATCHES} --num-workers 0 --cpu --max-update {UPDATES}"
).split()
FIXED = ["--learner", "sm"]
GROWING = ["--learner", "gmoe", "--grow-method", "split", "--grow-schedule", "4,6,8,12"]
AVERAGED = ["--ema-half-life", "1/16"]
needs_bf16 = pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="a processor without bf16")


def commands_of(stream, run, before, after, capsys):
    """Return the training and growth commands of the first stages of a run, as lists of words."""
    own = ["--stream", str(stream), "--run", str(run), "--carry-optimizer", "--dry-run", *before]
    capsys.readouterr()
    assert not stream_command([*own, "--", *TRAINING, *after])
    lines = capsys.readouterr().out.replace("\\\n", " ").splitlines()
    lines = [re.sub(r"^for RANK in .*(fairseq-train .*) & done; wait$", r"\1", line) for line in lines]
    words = [shlex.split(line) for line in lines]
    trainings, growths = ([each for each in words if each[:1] == [name]] for name in ("fairseq-train", "alma-grow"))
    return trainings[:STAGES], growths[: STAGES - 1]


def launch(words, *more):
    """Run a command of fairseq-train in this process."""
    plugin = words.index("--user-dir")
    words = [*words[1:plugin], *words[plugin + 2 :], "--log-format", "none", *more]
    arguments = options.parse_args_and_arch(options.get_training_parser(), words)
    distributed_utils.call_main(configuration_of(arguments), train.main)


def chain_stages(task, dataset, *arguments, hook, num_procs, between, **more):
    """Replace the task's ``get_batch_iterator``: return the batches of all stages, each in its own order."""
    stages = []
    for stage in range(STAGES):
        task.args.megabatch = stage
        task.load_dataset("train")
        iterator = hook(task, task.dataset("train"), *arguments, **more)
        stages.append((iterator, iterator.next_epoch_itr(shuffle=True)))
    first, per_stage = stages[0][0], UPDATES * BATCHES // num_procs

    def batches():
        for stage, (_, each) in enumerate(stages):
            if stage:
                between(stage)
            yield from itertools.islice(each, per_stage)

    def next_epoch_itr(**unused):
        first._cur_epoch_itr = CountingIterator(batches(), start=0, total=STAGES * per_stage)
        return first._cur_epoch_itr

    first.next_epoch_itr = next_epoch_itr
    return first


class UninterruptedTraining:
    """One training on the batches of all stages.

    Args:
        words: command of the first stage.
        folder: folder of its checkpoint.
        growth: growth record of each stage except the first; None: the model does not grow.
        num_procs: number of processes.
    """

    def __init__(self, words, folder, growth, num_procs=1):
        self.words, self.folder, self.growth, self.num_procs = words, folder, growth, num_procs

    def run(self, *more):
        length = ["--max-update", str(STAGES * UPDATES), "--save-dir", str(self.folder)]
        hooks = {"hook": AlmaLMTask.get_batch_iterator, "between": self.grow, "num_procs": self.num_procs}
        begin = Trainer.begin_epoch

        def begin_epoch(trainer, epoch):
            self.trainer = trainer
            return begin(trainer, epoch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "begin_epoch", begin_epoch)
            patch.setattr(AlmaLMTask, "get_batch_iterator", lambda *args, **more: chain_stages(*args, **hooks, **more))
            launch([*self.words], *length, *more)

    def grow(self, stage):
        """Grow the model, its moments and its average in place during the training."""
        if self.growth is None:
            return
        generators = [torch.Generator().manual_seed(self.growth[stage]["options"]["seed"]) for _ in range(2)]
        model, average = self.trainer.model, self.trainer.task.features[WeightAverage].average
        optimizer = self.trainer.optimizer.optimizer
        plans = {}
        for name, layer in self.growth[stage]["layers"].items():
            tree = model.get_submodule(name).gate.tree
            plans[name] = grow_mixture(tree, "split", layer["expert_source"][tree.num_experts :])
        for full in [*model.state_dict()]:
            for name, plan in plans.items():
                part = full.removeprefix(f"{name}.")
                if part != GATE_TENSOR and not part.startswith(EXPERTS):
                    continue
                old = model.get_parameter(full)
                new = torch.nn.Parameter(grow_tensor(part, old.detach(), plan, generators[0]))
                average[full] = grow_tensor(part, average[full], plan, generators[1])
                optimizer.state[new] = grow_moments(part, optimizer.state.pop(old), plan, is_shared=True)
                owner, _, attribute = full.rpartition(".")
                setattr(model.get_submodule(owner), attribute, new)
        for name, plan in plans.items():
            layer = model.get_submodule(name)
            gate = DescendingGate(layer.gate.weight.size(1), plan.new)
            gate.weight, layer.gate = layer.gate.weight, gate
        optimizer.param_groups[0]["params"][:] = [*model.parameters()]


def assert_same(carried, uninterrupted):
    one, other = (torch.load(path, weights_only=True) for path in (carried, uninterrupted))
    assert one["model"].keys() == other["model"].keys()
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, other["model"][name]), name
    first, second = (each["last_optimizer_state"]["state"] for each in (one, other))
    assert first.keys() == second.keys() and len(first) > 10
    for number, entry in first.items():
        assert float(entry["step"]) == float(second[number]["step"]) == STAGES * UPDATES
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(entry[moment], second[number][moment]), (number, moment)
    average, expected = (find_average(each)[AVERAGE] for each in (one, other))
    assert average.keys() == expected.keys()
    for name, tensor in average.items():
        assert torch.equal(tensor, expected[name]), name
        assert not torch.equal(tensor, one["model"][name]), name
    assert [each["optimizer_history"][-1]["num_updates"] for each in (one, other)] == [STAGES * UPDATES] * 2
    assert one["extra_state"]["train_iterator"]["epoch"] == 1  # one pass over each mega-batch


@pytest.mark.parametrize(
    ("learner", "after"),
    [
        (GROWING, []),
        pytest.param(GROWING, ["--autocast", "bf16"], marks=[pytest.mark.slow, needs_bf16]),
        pytest.param(FIXED, ["--optimizer", "fused_adam"], marks=pytest.mark.slow),
    ],
    ids=["growing", "growing-bf16", "fused-adam"],
)
def test_carried_stages_with_an_average_equal_one_uninterrupted_training(trained, tmp_path, capsys, learner, after):
    trainings, growths = commands_of(trained.stream, tmp_path / "run", [*learner, *AVERAGED], after, capsys)
    records = [None]
    for stage, words in enumerate(trainings):
        if growths and stage:
            assert not grow(growths[stage - 1][1:])
            grown = growths[stage - 1][growths[stage - 1].index("--out") + 1]
            records.append(torch.load(grown, weights_only=True)["alma_growth"][-1])
        launch(words)
    UninterruptedTraining(trainings[0], tmp_path / "whole", records if growths else None).run()
    assert_same(tmp_path / "run/stage-002/member-0/checkpoint_last.pt", tmp_path / "whole/checkpoint_last.pt")


def train_rank(rank, folder, trainings):
    """Run the stages and the uninterrupted training as one of two processes."""
    group = group_options(2, rank, folder)
    for words in trainings:
        launch(words, *group)
    UninterruptedTraining(trainings[0], folder / "whole", None, num_procs=2).run(*group)


@pytest.mark.slow
def test_carried_stages_with_two_processes_equal_one_uninterrupted_training(trained, tmp_path, capsys):
    trainings, _ = commands_of(trained.stream, tmp_path / "run", [*FIXED, *AVERAGED, "--num-procs", "2"], [], capsys)
    together(2, train_rank, tmp_path, trainings)
    assert_same(tmp_path / "run/stage-002/member-0/checkpoint_last.pt", tmp_path / "whole/checkpoint_last.pt")
