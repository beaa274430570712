import numpy as np
import pytest
import torch

from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.errors import AlmaError
from fairseq_alma.images.image_task import ImageDataset
from fairseq_alma.images.stage_images import ImageInput
from tests.images.image_streams import make_stream


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return ImageStream.open(make_stream(tmp_path_factory.mktemp("images") / "S", num_megabatches=2, num_train=120))


def dataset_of(stream, num_images=33, is_training=True, seed=1, augment=False):
    source = ImageInput(stream.mean, stream.std, augment)
    return ImageDataset(stream, stream.train_indices([1])[:num_images], source, seed, is_training)


def test_an_item_is_an_image_of_the_stream_with_its_label(stream):
    dataset = dataset_of(stream)
    for index in (0, 5, 32):
        row = stream.train_indices([1])[index]
        assert dataset[index]["label"] == stream.labels[row]
        assert np.array_equal(dataset[index]["image"], stream.images[row])


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("multiple", [1, 8])
def test_batches_have_every_image_once_whatever_multiple_fairseq_asks_for(stream, is_training, multiple):
    dataset = dataset_of(stream, is_training=is_training)
    batches = dataset.batch_by_size(dataset.ordered_indices(), max_sentences=10, required_batch_size_multiple=multiple)
    assert [len(batch) for batch in batches] == [10, 10, 10, 3]
    assert sorted(np.concatenate(batches)) == list(range(33))


def test_a_last_image_alone_joins_the_batch_before_in_training_and_only_there(stream):
    sizes = {}
    for is_training in (True, False):
        dataset = dataset_of(stream, is_training=is_training)
        sizes[is_training] = [len(batch) for batch in dataset.batch_by_size(dataset.ordered_indices(), 16)]
    assert sizes == {True: [16, 17], False: [16, 16, 1]}


def test_each_epoch_has_an_order_of_its_own_which_seed_and_epoch_decide(stream):
    def order(seed, epoch):
        dataset = dataset_of(stream, seed=seed)
        dataset.set_epoch(epoch)
        return dataset.ordered_indices().tolist()

    assert order(1, 1) == order(1, 1)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (1, 2)}) == 4
    assert dataset_of(stream, is_training=False).ordered_indices().tolist() == list(range(33))


def test_a_batch_is_normalised_and_counts_each_image_as_a_token(stream):
    dataset = dataset_of(stream, is_training=False)
    batch = dataset.collater([dataset[index] for index in range(7)])
    rows = stream.train_indices([1])[:7]
    expected = (torch.from_numpy(stream.images[rows]) / 255 - stream.mean[0]) / stream.std[0]
    torch.testing.assert_close(batch["net_input"]["images"], expected, rtol=1e-4, atol=1e-5)
    assert batch["target"].tolist() == stream.labels[rows].tolist()
    assert (batch["ntokens"], batch["nsentences"], batch["id"].tolist()) == (7, 7, list(range(7)))
    assert dataset.collater([]) == {}


def test_crops_depend_on_the_epoch_and_not_on_which_worker_makes_the_batch(stream):
    def batch(epoch, dataset, first=3):
        dataset.set_epoch(epoch)
        return dataset.collater([dataset[index] for index in range(first, first + 5)])["net_input"]["images"]

    one, other = (dataset_of(stream, augment=True) for _ in range(2))
    first = batch(1, one)
    batch(1, other, first=9)  # another batch in between changes nothing
    assert torch.equal(batch(1, other), first)
    assert not torch.equal(batch(2, one), first)
    plain = dataset_of(stream, augment=True, is_training=False)
    torch.testing.assert_close(batch(1, plain), dataset_of(stream).source.normalised(stream_bytes(stream)))


def stream_bytes(stream):
    return torch.from_numpy(stream.images[stream.train_indices([1])[3:8]])


def test_a_batch_without_images_is_refused(stream):
    dataset = dataset_of(stream)
    with pytest.raises(AlmaError, match=r"--batch-size 0: .* at least 1 is needed"):
        dataset.batch_by_size(dataset.ordered_indices(), max_sentences=0)
