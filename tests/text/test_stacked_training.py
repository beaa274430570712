"""Several models computed as one are what each is alone, to rounding; a training that resumes, to the last bit."""

import pytest
import torch

from fairseq_alma.checkpoints import AVERAGE
from fairseq_alma.checkpoints.checkpoint_file import find_average
from fairseq_alma.text.criterion import AlmaSwitchCrossEntropy
from fairseq_alma.text.stacked_training import StackedModel, Uneven, train_side_by_side
from fairseq_alma.text.stage_checkpoints import repair_together
from tests.text.stock_commands import prepare_stream, train_model, training_words
from tests.text.switch_models import model_of

PAD, TOKENS = 1, 40
SEEDS = (1, 2, 3)
TREES = {"trees": ("[[[0,1],2],[0,[1,2]]]", "[[0,[1,2]],[0,[1,2]]]", "[[0,[2,1]],[[0,2],1]]"), "num_experts": 3}
OPTIONS = [{}, {"capacity_factor": 0.0}, {"activation_fn": "gelu", "moe_freq": 1}, TREES]
HOW = ["--megabatch", "1", "--dropout", "0", "--clip-norm", "0.1", "--ema-half-life", "1/16", "--num-experts", "4"]


def build_members(**options):
    trees = options.pop("trees", ("",) * len(SEEDS))
    pairs = zip(SEEDS, trees, strict=True)
    return [model_of(TOKENS - 4, seed, gate_trees=each, **options).train() for seed, each in pairs]


def batch_of_each(length, *, with_padding):
    tokens = torch.randint(4, TOKENS, (len(SEEDS), 4, length + 1))
    if with_padding:
        tokens[0, 2, 5:], tokens[1, 3] = PAD, PAD
    return tokens[:, :, :-1].contiguous(), tokens[:, :, 1:].contiguous()


class TestStackedModel:
    @pytest.mark.parametrize(
        "options", [{}, {"capacity_factor": 0.0}, {"activation_fn": "gelu", "moe_freq": 1}, TREES], ids=str
    )
    @pytest.mark.parametrize(("length", "with_padding"), [(8, False), (150, False), (8, True)])
    def test_every_member_has_the_loss_and_the_gradient_that_it_has_alone(self, options, length, with_padding):
        models = build_members(tokens_per_sample=length, **options)
        tokens, target = batch_of_each(length, with_padding=with_padding)
        stack = StackedModel(models)
        found = stack(tokens, target)
        num_tokens = target.ne(PAD).flatten(1).sum(1)
        (found.nll + 0.01 * found.balance * num_tokens).sum().backward()
        for number, model in enumerate(models):
            real = int(num_tokens[number])
            sample = {"net_input": {"src_tokens": tokens[number]}, "target": target[number], "ntokens": real}
            loss, _, log = AlmaSwitchCrossEntropy.forward(criterion(), model, sample)
            loss.backward()
            assert found.nll[number].item() == pytest.approx(log["nll_loss"].item(), rel=1e-6)
            alone = stack.row({name: parameter.grad for name, parameter in model.named_parameters()})
            assert (stack.members.grad[number] - alone).norm() < 2e-6 * alone.norm()

    def test_models_of_other_sizes_are_refused(self):
        with pytest.raises(Uneven, match="sizes differ"):
            StackedModel([model_of(num_experts=2), model_of(num_experts=4)])


def criterion():
    made = AlmaSwitchCrossEntropy.__new__(AlmaSwitchCrossEntropy)
    torch.nn.Module.__init__(made)
    made.padding_idx, made.sentence_avg = PAD, False
    return made


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return prepare_stream(tmp_path_factory.mktemp("seeds"))


def load(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)


def assert_close(alone, together):
    """Compare weights but for biases of keys: their gradient is rounding alone, which Adam makes steps of."""
    for name, weight in alone.items():
        other = together[name]
        if name.endswith("qkv_proj.bias"):
            weight, other = (torch.cat([*each.chunk(3)[::2]]) for each in (weight, other))
        assert torch.allclose(weight, other, atol=2e-5), name


DECAYED = ["--lr-scheduler", "polynomial_decay", "--total-num-update", "12"]
SCHEDULES = [["--lr-scheduler", "fixed"], DECAYED]  # either sets its peak where an epoch begins


class TestSideBySide:
    @pytest.fixture(scope="class", params=SCHEDULES, ids=lambda words: words[1])
    def trained(self, stream, tmp_path_factory, request):
        """Two seeds for twelve updates in two epochs: alone, side by side, and side by side with an interruption."""
        folder = tmp_path_factory.mktemp("trained")
        seeds, how = SEEDS[:2], [*HOW, *request.param, "--warmup-updates", "3", "--batch-size", "24"]

        def together(name, updates):
            calls = [
                training_words(
                    stream,
                    "--save-dir",
                    str(folder / name / str(seed)),
                    *how,
                    "--seed",
                    str(seed),
                    "--max-update",
                    updates,
                )
                for seed in seeds
            ]
            train_side_by_side(calls)

        for seed in seeds:
            train_model(stream, folder / "alone" / str(seed), *how, "--seed", str(seed), "--max-update", "12")
        together("together", "12")
        together("resumed", "5")
        assert repair_together([folder / "resumed" / str(seed) for seed in seeds])
        together("resumed", "12")
        return {name: [load(folder / name / str(seed)) for seed in seeds] for name in ("alone", "together", "resumed")}

    def test_checkpoints_are_laid_out_as_those_of_trainings_alone(self, trained):
        for alone, together in zip(trained["alone"], trained["together"], strict=True):
            assert alone.keys() == together.keys()
            assert alone["extra_state"]["train_iterator"] == together["extra_state"]["train_iterator"]
            assert alone["extra_state"]["AlmaLMTask"].keys() == together["extra_state"]["AlmaLMTask"].keys()
            assert alone["cfg"]["checkpoint"].keys() == together["cfg"]["checkpoint"].keys()
            assert alone["optimizer_history"] == together["optimizer_history"]

    def test_weights_moments_and_averages_are_those_of_trainings_alone_to_rounding(self, trained):
        for alone, together in zip(trained["alone"], trained["together"], strict=True):
            assert_close(alone["model"], together["model"])
            assert_close(*(find_average(each)[AVERAGE] for each in (alone, together)))
            states = [each["last_optimizer_state"]["state"] for each in (alone, together)]
            for index, state in states[0].items():
                assert state["step"] == states[1][index]["step"]
                assert torch.allclose(state["exp_avg"], states[1][index]["exp_avg"], atol=1e-5)

    def test_an_interruption_changes_no_bit(self, trained):
        for whole, resumed in zip(trained["together"], trained["resumed"], strict=True):
            for name, weight in whole["model"].items():
                assert torch.equal(weight, resumed["model"][name]), name


def test_trainings_side_by_side_resume_from_the_newest_update_that_all_have(stream, tmp_path):
    folders = [tmp_path / str(seed) for seed in SEEDS[:2]]
    for folder, updates in zip(folders, ("4", "2"), strict=True):
        train_model(stream, folder, "--megabatch", "1", "--max-update", updates, "--save-interval-updates", "2")
    assert repair_together(folders)
    assert [load(folder)["optimizer_history"][-1]["num_updates"] for folder in folders] == [2, 2]
    for path in folders[1].glob("*.pt"):
        path.write_bytes(b"")
    assert not repair_together(folders)
    assert not [*folders[0].glob("*.pt")]
