"""Training a model that is spread over processes: what one process finds, and one checkpoint for the whole."""

import pytest
import torch
from fairseq import tasks
from fairseq.distributed import utils as distributed_utils
from fairseq_cli import train

from fairseq_alma.training.spread_parameters import spread_of
from tests.forked import group_options, together
from tests.text.stock_commands import evaluate, training_config
from tests.training.test_data_parallel import train_together

# Epsilon: Adam turns a gradient of nothing but rounding into a whole step unless it is large. A norm that clips.
TRAINING = ("--num-experts", "8", "--optimizer", "fused_adam", "--adam-eps", "1e-4")
TRAINING += ("--dropout", "0", "--clip-norm", "0.5", "--max-update", "24")
EXPERTS, ALL = "--expert-parallel", "--fully-shard"


@pytest.fixture(scope="module")
def one(trained, tmp_path_factory):
    return train_together(1, tmp_path_factory.mktemp("one"), trained.stream, *TRAINING)


@pytest.fixture(
    scope="module",
    params=[(EXPERTS, 2), *(pytest.param((ALL, number), marks=pytest.mark.slow) for number in (2, 4))],
    ids=str,
)
def several(request, trained, tmp_path_factory):
    option, number = request.param
    return train_together(number, tmp_path_factory.mktemp("several"), trained.stream, *TRAINING, option)


def flat(tensors):
    return torch.cat([tensor.float().flatten() for tensor in tensors])


def moments(checkpoint):
    state = checkpoint["last_optimizer_state"]["state"]
    return flat(state[index][name] for index in sorted(state) for name in ("exp_avg", "exp_avg_sq"))


def require_alike(whole, checkpoint):
    assert whole["model"].keys() == checkpoint["model"].keys()
    assert torch.allclose(flat(whole["model"].values()), flat(checkpoint["model"].values()), atol=1e-3)
    assert torch.allclose(moments(whole), moments(checkpoint), atol=1e-3)


def test_a_spread_model_learns_and_logs_what_that_of_one_process_does(trained, tmp_path, one, several):
    assert len(one[0]) == len(several[0]) == 24
    assert max(figures["gnorm"] for figures in one[0]) > 0.5  # so that clipping by the norm of all matters
    for here, there in zip(one[0], several[0], strict=True):
        assert there == pytest.approx(here, rel=2e-3, abs=2e-3)
    require_alike(one[1], several[1])
    torch.save(several[1], tmp_path / "checkpoint.pt")
    loss = evaluate(trained.stream, tmp_path / "checkpoint.pt")["loss"]  # by one process
    assert float(loss) == pytest.approx(several[0][-1]["nll_loss"], rel=0.2)


@pytest.mark.parametrize(
    ("before", "first", "after", "then"),
    [pytest.param(4, EXPERTS, 2, ALL, marks=pytest.mark.slow), (2, ALL, 1, EXPERTS)],
)
def test_a_checkpoint_is_resumed_by_another_number_of_processes_and_spread_otherwise(
    trained, tmp_path, one, before, first, after, then
):
    train_together(before, tmp_path, trained.stream, *TRAINING, first, "--max-update", "7")
    (tmp_path / f"model-{before}").rename(tmp_path / f"model-{after}")
    figures, checkpoint = train_together(after, tmp_path, trained.stream, *TRAINING, then)
    assert [line["num_updates"] for line in figures] == list(range(8, 25))
    require_alike(one[1], checkpoint)


def sizes_rank(rank, num_processes, folder, stream, option):
    cfg = training_config(stream, "--megabatch", "0", *TRAINING, option, *group_options(num_processes, rank, folder))
    found = []

    def note_sizes(cfg):
        model = tasks.setup_task(cfg.task).build_model(cfg.model)
        found.extend(
            (spread_of(each).own(each).numel() if spread_of(each) else each.numel(), "experts" in name)
            for name, each in model.named_parameters()
        )

    distributed_utils.call_main(cfg, note_sizes)
    return found


@pytest.mark.parametrize(("option", "share_of_experts", "share_of_others"), [(EXPERTS, 1 / 2, 1), (ALL, 1 / 2, 1 / 2)])
def test_each_process_has_its_share_of_the_parameters(
    trained, tmp_path, one, option, share_of_experts, share_of_others
):
    names = [name for name in one[1]["model"] if name.endswith(("weight", "bias")) and "output_projection" not in name]
    wholes = [(one[1]["model"][name].numel(), "experts" in name) for name in names]
    for sizes in together(2, sizes_rank, 2, tmp_path, trained.stream, option)[0]:
        for is_expert, share in ((True, share_of_experts), (False, share_of_others)):
            whole = sum(size for size, of_expert in wholes if of_expert == is_expert)
            own = sum(size for size, of_expert in sizes if of_expert == is_expert)
            assert own == pytest.approx(share * whole, rel=0.01)


def refused_rank(rank, num_processes, folder, stream, *arguments):
    words = ["--megabatch", "0", "--save-dir", str(folder), *arguments, *group_options(num_processes, rank, folder)]
    try:
        distributed_utils.call_main(training_config(stream, *words), train.main)
    except BaseException as error:
        return type(error).__name__, str(error)
    return None


REFUSED = [
    ((EXPERTS, "--moe-freq", "0"), "the model has no Switch layer; leave the option out"),
    ((ALL, "--optimizer", "adam"), "--fully-shard: goes with --optimizer fused_adam"),
    ((EXPERTS, "--num-experts", "5"), "5 experts, which 2 processes cannot share evenly"),
    ((EXPERTS, "--optimizer", "adam"), "--expert-parallel: goes with --optimizer fused_adam"),
    ((ALL, "--ema-half-life", "1/16"), "the average of weights"),
    ((ALL, EXPERTS), "leave out one of the two"),
    ((ALL, "--compile"), "without --compile"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), [*REFUSED[:2], *(pytest.param(*each, marks=pytest.mark.slow) for each in REFUSED[2:])]
)
def test_what_cannot_be_spread_is_refused_by_the_first_process_alone(trained, tmp_path, arguments, message):
    (first, second), _ = together(2, refused_rank, 2, tmp_path, trained.stream, *TRAINING, *arguments)
    assert first[0] == "AlmaError" and message in first[1]
    assert second == ("SystemExit", "1")
    assert not list(tmp_path.glob("*.pt"))
