import pytest
import torch
from fairseq.logging import metrics
from torch import nn

from fairseq_alma.images.image_task import AlmaImageCrossEntropy


class Linear(nn.Linear):
    def forward(self, images):
        return super().forward(images.flatten(1))


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Linear(12, 4)


def sample_of(num_images, seed=1):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(num_images, 3, 2, 2, generator=generator)
    return {"net_input": {"images": images}, "target": torch.randint(4, (num_images,), generator=generator)}


def plain_loop(model, sample):
    """Return the summed loss and the number of wrong images, one image at a time."""
    loss, wrong = 0.0, 0
    for image, label in zip(sample["net_input"]["images"], sample["target"], strict=True):
        probs = model(image[None])[0].softmax(dim=0)
        loss -= probs[label].log().item()
        wrong += probs.argmax().item() != label.item()
    return loss, wrong


def test_the_loss_is_the_sum_over_the_images_and_the_errors_are_counted(model):
    sample = sample_of(30)
    loss, sample_size, log = AlmaImageCrossEntropy(None)(model, sample)
    expected, wrong = plain_loop(model, sample)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert 0 < wrong < 30
    assert {name: float(value) for name, value in log.items()} == pytest.approx(
        {"loss": expected, "num_wrong": wrong, "ntokens": 30, "nsentences": 30, "sample_size": 30}, rel=1e-5
    )
    assert sample_size == 30 and not log["loss"].requires_grad
    each, _, unreduced = AlmaImageCrossEntropy(None)(model, sample, reduce=False)
    assert each.shape == (30,)
    torch.testing.assert_close(each.sum(), loss)
    torch.testing.assert_close(unreduced["loss"], log["loss"])


def test_logs_of_batches_of_different_sizes_give_the_figures_of_all_images(model):
    samples = [sample_of(7, seed=1), sample_of(20, seed=2), sample_of(3, seed=3)]
    logs = [AlmaImageCrossEntropy(None)(model, sample)[2] for sample in samples]
    assert AlmaImageCrossEntropy.logging_outputs_can_be_summed()
    summed = {name: sum(log[name] for log in logs) for name in logs[0]}
    losses, wrongs = zip(*(plain_loop(model, sample) for sample in samples), strict=True)
    for outputs in (logs, [summed]):
        with metrics.aggregate(new_root=True) as logged:
            AlmaImageCrossEntropy.reduce_metrics(outputs)
        values = logged.get_smoothed_values()
        assert values["loss"] == pytest.approx(sum(losses) / 30, abs=1e-4)
        assert values["error"] == pytest.approx(sum(wrongs) / 30, abs=1e-4)
