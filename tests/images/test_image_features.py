"""Features of a training on images: moving average, decay of the learning rate, autocast."""

import json
import signal

import pytest
import torch

from fairseq_alma.cli.stream import main
from fairseq_alma.images.image_job import LoopOptions
from fairseq_alma.images.networks import MLP
from fairseq_alma.images.stage_trainer import ImageInput, StageTraining, TrainingImages, seeded
from fairseq_alma.training.feature import Feature, Features
from fairseq_alma.training.features import LRBranch, WeightAverage
from tests.images.image_streams import NUM_CLASSES, make_images, make_stream
from tests.kills.crashes import Crash
from tests.kills.launch import launch
from tests.runs.results import stage_records
from tests.scripts import usage_error

WORDS = ["--", "--width", "6", "--max-epoch", "12", "--batch-size", "16", "--cpu"]
COPY = ["--branch-share", "0.3"]


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return make_stream(tmp_path_factory.mktemp("images") / "S")


def command(stream, folder, *options, words=()):
    return ["--stream", str(stream), "--run", str(folder), "--wait", "3", *options, *WORDS, *words]


def weights(folder, stage=1, name="checkpoint_last.pt"):
    return torch.load(folder / f"stage-{stage:03d}" / "member-0" / name, weights_only=True)["model"]


def are_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(other[name], tensor) for name, tensor in one.items())


@pytest.mark.slow  # tests/kills is fast and kills such runs
@pytest.mark.parametrize(
    ("options", "runs", "tested"),
    [
        (["--ema-half-life", "1/8", "--seed", "4", "5"], ["seed-4", "seed-5"], "checkpoint_average.pt"),
        ([*COPY, "--learner", "ens", "--num-members", "2"], ["."], "branch/checkpoint_last.pt"),
    ],
    ids=["average of two seeds", "copies"],
)
def test_a_killed_run_ends_with_the_same_figures_and_weights(options, runs, tested, stream, tmp_path):
    def call(name, step=0):
        crash = Crash(tmp_path / name, tmp_path / "journal", step, only=r"/training\.pt\t")  # a rename for each save
        return launch(command(stream, tmp_path / name, *options), tmp_path / "log", crash)

    assert call("complete") == 0
    for step in (6, 8):
        assert call("cut", step) == -signal.SIGKILL
    assert call("cut") == 0
    for run in runs:
        first, second = tmp_path / "complete" / run, tmp_path / "cut" / run
        assert len(stage_records(first)) == 2 and stage_records(second) == stage_records(first)
        assert are_equal(weights(first), weights(second))
        assert are_equal(weights(first, name=tested), weights(second, name=tested))


def test_a_copy_has_a_decaying_rate_and_does_not_change_the_model(stream, tmp_path):
    options = {"plain": [], "copy": COPY}
    for name, own in options.items():
        assert main(command(stream, tmp_path / name, *own, "--keep-checkpoints")) == 0
    plain, copy = (stage_records(tmp_path / name) for name in options)
    assert are_equal(weights(tmp_path / "copy"), weights(tmp_path / "plain"))
    assert not are_equal(weights(tmp_path / "copy", 0, "branch/checkpoint_last.pt"), weights(tmp_path / "plain", 0))
    assert copy[0]["num_updates"] == plain[0]["num_updates"]
    assert copy[0]["anytime"] == {"predicts_with": "branch", "branch_updates": round(0.3 * plain[0]["num_updates"])}
    extra = copy[0]["train_images"] / plain[0]["train_images"] - 1
    assert extra == pytest.approx(0.3, abs=0.02) and copy[0]["train_flops"] > plain[0]["train_flops"]


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="a processor without bf16")
def test_autocast_changes_figures_by_rounding_and_keeps_weights_in_fp32(tmp_path):
    large = make_stream(tmp_path / "S", num_megabatches=1, num_train=120, shape=(1, 16, 16))
    own = ["--arch", "alma_moe_vgg", "--channels", "4", "--gate", "soft", "--max-epoch", "3", "--cpu"]
    losses = []
    for words in ([], ["--autocast", "bf16"]):
        folder = tmp_path / f"R{len(words)}"
        assert main(["--stream", str(large), "--run", str(folder), "--learner", "moe", "--", *own, *words]) == 0
        (record,) = stage_records(folder)
        losses.append(record["test"]["loss"])
        assert all(tensor.dtype == torch.float32 for tensor in weights(folder, 0).values())
    assert losses[1] == pytest.approx(losses[0], rel=0.05) and losses[0] != losses[1]
    assert json.loads((folder / "run.json").read_text())["train_options"]["--autocast"] == "bf16"


@pytest.mark.parametrize(
    ("options", "words", "reason"),
    [
        ([*COPY, "--ema-half-life", "1/8"], [], "--ema-half-life 1/8: --branch-share 0.3 also selects"),
        (COPY, ["--patience", "2"], "--branch-share: needs a fixed number of updates per stage; omit --patience"),
        ([], ["--autocast", "fp16"], "--autocast fp16: choose from bf16"),
        ([], ["--branch-from", "2"], "--branch-from after --: not supported on streams of images"),
    ],
)
def test_conflicting_options_are_refused_in_one_line(options, words, reason, stream, tmp_path, capsys):
    assert reason in usage_error(capsys, main, command(stream, tmp_path / "R", *options, words=words))
    assert not (tmp_path / "R").exists()


class Watch(Feature):
    """Records the learning rate before and the weights after each update."""

    is_on = True

    def __init__(self):
        self.rates, self.weights, self.logs = [], [], []

    def before_step(self, optimizer, update):
        assert update == len(self.rates)
        self.rates.append(optimizer.param_groups[0]["lr"])

    def after_step(self, model, update):
        self.weights.append({name: tensor.detach().clone() for name, tensor in model.named_parameters()})

    def count(self, logs):
        self.logs += logs


def trained_with(*features):
    """Return a training after its last epoch."""
    images, labels = (torch.from_numpy(array) for array in make_images(60, 1))
    source = ImageInput([0.2], [0.1], augment=False)
    network = MLP((1, 8, 8), NUM_CLASSES, 5, num_members=2)
    network.reset_parameters([seeded(1), seeded(2)])
    settings, optimizer = LoopOptions(max_epoch=4, batch_size=16), torch.optim.SGD(network.parameters(), lr=0.5)
    data = TrainingImages(images[:40], labels[:40], [None, None], source)
    valid = source.normalised(images[40:]), labels[40:]
    training = StageTraining(network, optimizer, data, *valid, settings, [seeded(3), seeded(4)], Features(features))
    while not training.is_over:
        training.run_epoch()
    return training


def test_the_tested_weights_are_the_average_at_the_best_epoch_of_each_member():
    watch = Watch()
    training = trained_with(WeightAverage(ema_half_life="1/8"), watch)
    training.finish()
    for member, unit in enumerate(training.units):
        for name in watch.weights[0]:
            expected = watch.weights[0][name]
            for update in range(1, unit.best_epoch * training.updates_per_epoch):
                keep = 2 ** (-8 / (update + 1))
                expected = keep * expected + (1 - keep) * watch.weights[update][name]
            torch.testing.assert_close(training.tested[member][name], expected[member : member + 1])
            assert not torch.equal(training.tested[member][name], training.states[member][name])


def test_loaded_weights_to_test_go_to_the_device_of_the_training():
    training = trained_with(WeightAverage(ema_half_life="1/8"))
    state, training.valid_labels = training.state_dict(), training.valid_labels.to("meta")
    training.load_state_dict(state)
    assert all(tensor.is_meta for weights in training.tested for tensor in weights.values())


def test_the_learning_rate_of_the_last_updates_goes_down_to_zero():
    watch = Watch()
    training = trained_with(LRBranch(branch_from=7, branch_until=12), watch)
    assert watch.rates == [0.5 * (1 - (max(0, update - 7) / 5) ** 0.5) for update in range(12)]
    assert watch.rates[6:8] == [0.5, 0.5] and 0 < watch.rates[-1] < 0.1
    assert training.optimizer.param_groups[0]["lr"] == 0.5
    assert [log["ntokens"] for log in watch.logs[:3]] == [32, 32, 16] and watch.logs[0]["loss"] > 0
