"""alma_transformer_lm with experts and Muon through the stock commands: resumed, grown, tested."""

import pytest
import torch

from fairseq_alma.checkpoints.model_options import GrowOptions
from fairseq_alma.text.grow import grow
from tests.text.stock_commands import evaluate, train_model

MODEL = ("--arch", "alma_transformer_lm_tiny", "--num-experts", "3", "--dropout", "0.1")
OPTIMIZER = ("--optimizer", "muon", "--lr", "0.02", "--clip-norm", "1", "--lr-scheduler", "inverse_sqrt")
STAGE = (*OPTIMIZER, "--warmup-updates", "5", "--ema-half-life", "1/16", "--megabatch")
THREE_EPOCHS = ("0", "--batch-size", "12", "--max-update", "24")


@pytest.fixture(scope="module")
def through(trained, tmp_path_factory):
    return train_model(trained.stream, tmp_path_factory.mktemp("through"), *MODEL, *STAGE, *THREE_EPOCHS)


def leaves(value):
    """Yield all tensors and numbers of a nested state."""
    if isinstance(value, dict):
        for each in value.values():
            yield from leaves(each)
    else:
        yield value


def test_a_training_cut_in_its_third_epoch_resumes_bit_for_bit(trained, through, tmp_path):
    cut = train_model(trained.stream, tmp_path, *MODEL, *STAGE, *THREE_EPOCHS, "--max-update", "22")
    assert torch.load(cut)["extra_state"]["train_iterator"]["epoch"] == 3
    resumed = torch.load(train_model(trained.stream, tmp_path, *MODEL, *STAGE, *THREE_EPOCHS))
    one = torch.load(through)
    parts = [(end["model"], end["last_optimizer_state"], end["extra_state"]["AlmaLMTask"]) for end in (one, resumed)]
    pairs = [*zip(*(leaves(dict(enumerate(each))) for each in parts), strict=True)]
    assert len(pairs) > 100
    assert all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in pairs)


def test_a_grown_model_trains_with_its_optimizer_and_without_size_options(trained, through, tmp_path):
    grown = str(tmp_path / "grown.pt")
    how = {"method": "split", "experts": 2, "select": "random", "layers": 3, "optimizer": "copy"}
    printed = grow(GrowOptions(path=str(through), out=grown, cpu=True, **how))
    assert "from the checkpoint: --decoder-layers 3 --num-experts 5" in printed
    before, after = (float(evaluate(trained.stream, path)["loss"]) for path in (through, grown))
    assert after == pytest.approx(before, rel=1e-5)
    start = ("--arch", "alma_transformer_lm", "--continue-once", grown, "--continue-as", "stage")
    words = [*start, *STAGE, "1", "--max-update", "40"]
    trained_on = torch.load(train_model(trained.stream, tmp_path / "on", *words, shape=()))
    model = trained_on["cfg"]["model"]
    assert (model["num_experts"], model["decoder_layers"], model["head_dim"]) == (5, 3, 8)
    assert trained_on["optimizer_history"][-1]["num_updates"] == 40
