import math
from functools import partial

import pytest
import torch

from fairseq_alma.errors import AlmaError
from fairseq_alma.images.image_job import LoopOptions
from fairseq_alma.images.model_store import predict
from fairseq_alma.images.networks import MLP, NUM_CONVOLUTIONS, VGG
from fairseq_alma.images.stage_trainer import ImageInput, StageTraining, TrainingImages, batch_sizes, bootstrap, seeded
from tests.images.image_streams import NUM_CLASSES, make_images

MLP_SHAPE, VGG_SHAPE = (1, 8, 8), (3, 16, 16)
build_mlp = partial(MLP, MLP_SHAPE, NUM_CLASSES, 6, 2)
build_vgg = partial(VGG, VGG_SHAPE, NUM_CLASSES, [2] * NUM_CONVOLUTIONS)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-4)
OPTIMIZERS = {"adadelta": partial(torch.optim.Adadelta, lr=1.0), "sgd": SGD}


def images_of(shape, num_images, seed):
    images, labels = make_images(num_images, seed, shape)
    return torch.from_numpy(images), torch.from_numpy(labels)


def training_of(build, members, optimizer="adadelta", shape=MLP_SHAPE, augment=False, bagging=False, **settings):
    """Return a training of the members with these numbers; a member does not depend on the others."""
    source = ImageInput([0.3] * shape[0], [0.2] * shape[0], augment)
    images, labels = images_of(shape, 37, seed=1)
    valid, valid_labels = images_of(shape, 20, seed=2)
    rows = [bootstrap(37, seeded(member, 9)) if bagging else None for member in members]
    network = build(num_members=len(members))
    network.reset_parameters([seeded(member, 0) for member in members])
    given = {"max_epoch": 5, "batch_size": 16, "patience": None, **settings}
    data = TrainingImages(images, labels, rows, source)
    examples, chosen = (source.normalised(valid), valid_labels), OPTIMIZERS[optimizer](network.parameters())
    generators = [seeded(member, 1) for member in members]
    return StageTraining(network, chosen, data, *examples, LoopOptions(**given), generators)


def run(training):
    while not training.is_over:
        training.run_epoch()
    training.finish()
    return training


@pytest.fixture
def in_double_precision():
    """Keep rounding, which training amplifies, far below the tolerance of the comparison."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "options",
    [
        {"build": build_mlp, "optimizer": "adadelta"},
        {"build": build_mlp, "optimizer": "sgd", "bagging": True},
        {"build": build_mlp, "batch_size": 100},
        {"build": build_mlp, "patience": 1, "max_epoch": 12},
        {"build": build_vgg, "optimizer": "sgd", "shape": VGG_SHAPE, "augment": True, "max_epoch": 2},
    ],
    ids=["adadelta", "bagging", "one batch", "early stop", "vgg"],
)
def test_a_member_trained_with_others_gets_the_weights_of_a_training_alone(options, in_double_precision):
    together = run(training_of(members=[0, 1, 2], **options))
    for member in range(3):
        alone = run(training_of(members=[member], **options))
        assert together.units[member].best_epoch == alone.units[0].best_epoch
        assert together.epochs_of(member) == alone.epochs_of(0)
        for name, tensor in alone.network.state_dict().items():
            assert tensor.dtype == torch.float64
            torch.testing.assert_close(together.network.model_states()[member][name], tensor, rtol=1e-9, atol=1e-11)


def test_the_weights_of_the_epoch_with_the_lowest_validation_loss_are_kept():
    training = training_of(build_mlp, [0], max_epoch=8)
    seen = []
    while not training.is_over:
        training.run_epoch()
        weights = {name: tensor.clone() for name, tensor in training.network.state_dict().items()}
        loss = torch.nn.functional.cross_entropy(training.network(training.valid_images)[0], training.valid_labels)
        seen.append((loss.item(), weights))
    training.finish()
    best = min(range(8), key=lambda epoch: seen[epoch][0])
    assert training.units[0].best_epoch == best + 1
    assert all(torch.equal(tensor, seen[best][1][name]) for name, tensor in training.network.state_dict().items())


def test_epochs_are_selected_by_accuracy_as_a_plain_loop_does():
    """Check the rule of the paper's released code: accuracy must improve by a least gain within N epochs."""
    least_gain = 0.1
    training = training_of(build_mlp, [0], select="accuracy", least_gain=least_gain, patience=4, max_epoch=40)
    best, best_epoch, without, epoch, kept = None, 0, 0, 0, None
    while without < 4:
        training.run_epoch()
        epoch += 1
        classes = training.network(training.valid_images)[0].argmax(dim=-1)
        accuracy = int((classes == training.valid_labels).sum()) / 20
        if best is None or (accuracy > best and accuracy - best > least_gain - 1e-6):
            best, best_epoch, without = accuracy, epoch, 0
            kept = {name: tensor.clone() for name, tensor in training.network.state_dict().items()}
        else:
            without += 1
    assert training.is_over and training.epochs_of(0) == epoch < 40
    assert training.units[0].best_epoch == best_epoch > 1
    training.finish()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in training.network.state_dict().items())


@pytest.mark.parametrize(
    ("score", "best", "gain", "better"),
    [(0.5, 0.5, 0.0, False), (0.4999, 0.5, 0.0, True), (0.4999, 0.5, 0.001, False), (0.899, 0.9, 0.001, True),
     (math.nan, math.inf, 0.0, False), (0.3, math.inf, 1, True)],
)  # fmt: skip
def test_an_epoch_is_better_if_it_gains_at_least_the_least_gain(score, best, gain, better):
    assert LoopOptions(least_gain=gain).is_better(score, best) is better


def test_an_update_equals_that_of_a_plain_loop():
    training = training_of(build_mlp, [0], max_epoch=1, batch_size=37)
    plain = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 6), torch.nn.ReLU(), torch.nn.Linear(6, 6), torch.nn.ReLU(),
        torch.nn.Linear(6, NUM_CLASSES),
    )  # fmt: skip
    for ours, theirs in zip(training.network.state_dict().values(), plain.parameters(), strict=True):
        theirs.data.copy_(ours[0])
    optimizer = torch.optim.Adadelta(plain.parameters(), lr=1.0)
    torch.nn.functional.cross_entropy(plain(training.data.images), training.data.labels).backward()
    optimizer.step()
    training.run_epoch()
    for ours, theirs in zip(training.network.state_dict().values(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours[0], theirs.data)


@pytest.mark.parametrize("how", ["mean", "sum"])
def test_joint_members_train_and_predict_by_the_mean_or_sum_of_their_logits(how):
    training = training_of(build_mlp, [0, 1, 2], max_epoch=1, batch_size=37)
    training.network.joint_logits = how
    network = build_mlp(num_members=3)
    network.load_state_dict(training.network.state_dict())
    logits = getattr(network(training.data.images), how)(dim=0)
    torch.nn.functional.cross_entropy(logits, training.data.labels).backward()
    training._loss(training.data.images, training.data.labels[None]).backward()
    for ours, theirs in zip(training.network.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(predict(training.network, training.data.images)[0], logits[None])


@pytest.mark.parametrize(("select", "patience"), [("loss", None), ("accuracy", 2)])
def test_a_training_without_a_finite_validation_loss_is_reported(select, patience):
    training = training_of(build_mlp, [0], max_epoch=2 if patience is None else 9, select=select, patience=patience)
    for parameter in training.network.parameters():
        parameter.data.fill_(float("nan"))
    with pytest.raises(AlmaError, match="diverged"):
        run(training)


def test_each_image_is_in_one_batch_of_an_epoch_and_a_single_last_image_joins_the_previous_batch():
    images, _ = images_of(MLP_SHAPE, 33, seed=1)
    data = TrainingImages(images, torch.arange(33), [None, None], ImageInput([0.3], [0.2], False))
    batches = [batch for _, batch in data.epoch(16, [seeded(0), seeded(1)])]
    assert [batch.size(1) for batch in batches] == [16, 17] == batch_sizes(33, 16)
    seen = torch.cat(batches, dim=1)
    assert all(sorted(member.tolist()) == list(range(33)) for member in seen)
    assert seen[0].tolist() != seen[1].tolist()


def test_a_bootstrap_sample_has_the_number_of_images_with_repetition():
    assert len(rows := bootstrap(1000, seeded(1))) == 1000 and 600 < len(rows.unique()) < 660  # 1 - 1/e
