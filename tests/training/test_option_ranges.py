"""What options may be, at each of the three places that look: alma-stream's words, the tasks, the models."""

import pytest
from fairseq import options, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY
from omegaconf import OmegaConf

import fairseq_alma
from fairseq_alma.checkpoints import UnfitCheckpoint
from fairseq_alma.checkpoints.architecture import read_options
from fairseq_alma.checkpoints.model_options import ACTIVATIONS
from fairseq_alma.errors import AlmaError
from fairseq_alma.training.fairseq_options import check_options, check_whole_config
from fairseq_alma.training.option_ranges import RANGES, check_config, check_words
from fairseq_alma.training.stage_task import StageTask

fairseq_alma.register()

HUGE = "1" + "0" * 30
# Option -> words that are no number of its range.
REFUSED = {
    "--capacity-factor": ("-1", "nan", "inf"),
    "--eval-capacity-factor": ("-1", "nan", "inf"),
    "--balance-loss-weight": ("-1", "nan", "inf"),
    "--decoder-layers": ("-1", "0", "10000000", HUGE, "2.5"),
    "--decoder-embed-dim": ("0", "-1", HUGE),
    "--decoder-ffn-embed-dim": ("0", "-1", HUGE),
    "--decoder-attention-heads": ("0", "-1", HUGE),
    "--dropout": ("-0.1", "1.1", "nan", "x", ""),
    "--attention-dropout": ("7",),
    "--activation-dropout": ("7",),
    "--num-experts": ("0", "-1", "10001"),
    "--moe-freq": ("-1", HUGE),
    "--num-members": ("0", "-1", HUGE),
    "--width": ("0", HUGE),
    "--channels": ("0", HUGE),
    "--hidden-layers": ("0", "1000000000", HUGE),
    "--tokens-per-sample": ("0", "-1", HUGE),
    "--max-target-positions": ("0", "-1", HUGE),
    "--lr": ("-1", "nan", "inf", "0.1,-1", "__import__('os')"),
    "--update-freq": ("0", "-1", "1,0", HUGE),
    "--batch-size": ("0", "-1", HUGE),
    "--max-tokens": ("0", "-1", HUGE),
    "--max-epoch": ("-1", HUGE),
    "--max-update": ("-1", HUGE),
    "--seed": ("-1", HUGE),
    "--num-workers": ("-1", "1000000000"),
    "--log-interval": ("0", "-1"),
    "--clip-norm": ("-1", "nan"),
    "--weight-decay": ("-1", "inf"),
    "--total-num-update": ("0", "-1", "nan"),
    "--warmup-updates": ("-1", HUGE),
    "--distributed-world-size": ("0", HUGE),
    "--distributed-port": ("65536",),
    "--patience": ("-2", HUGE),
}
CASES = [(option, word) for option, words in REFUSED.items() for word in words]


@pytest.mark.parametrize(("option", "word"), CASES)
def test_words_out_of_range_are_named_with_what_is_needed(option: str, word: str) -> None:
    with pytest.raises(ValueError, match=rf"^{option} .*after the --: a (whole )?number .*needed"):
        check_words([("--cpu", ()), (option, (word,))])


@pytest.mark.parametrize("values", [(), ("1", "2")])
def test_an_option_without_its_one_number_is_refused(values: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="one number is needed"):
        check_words([("--batch-size", values)])


@pytest.mark.parametrize(("option", "word"), [case for case in CASES if case[1].strip("-").isdigit()])
def test_the_same_numbers_are_refused_in_a_configuration(option: str, word: str) -> None:
    value = [float(word)] if RANGES[option].is_list else float(word)
    with pytest.raises(AlmaError, match=rf"^{option} .*: a number .*needed"):
        check_config({option[2:].replace("-", "_"): value})


@pytest.mark.parametrize(
    "given", ["(2,2)", "(0.9,nan)", "0.9", "(0.9,)", "(0.9,1)", "exit()", "[[]]", "((" * 999, "('a','b')"]
)
def test_pairs_of_numbers_are_read_and_not_evaluated(given: str) -> None:
    with pytest.raises(ValueError, match=r"^--adam-betas .* after the --: two numbers from 0 to 1 are needed"):
        check_words([("--adam-betas", (given,))])
    with pytest.raises(AlmaError, match=r"^--adam-betas .*: two numbers from 0 to 1 are needed"):
        check_config({"_name": "adam", "adam_betas": given})
    check_words([("--adam-betas", ("(0.9, 0.98)",)), ("--adafactor-eps", ("(1e-30, 1e-3)",))])
    check_config({"adam_betas": "[0.9, 0.98]"})


def test_a_schedule_that_divides_by_the_warm_up_needs_one() -> None:
    check_words([("--warmup-updates", ("0",))])
    for wrong in (
        lambda: check_words([("--warmup-updates", ("0",)), ("--lr-scheduler", ("inverse_sqrt",))]),
        lambda: check_config({"_name": "inverse_sqrt", "warmup_updates": 0}),
    ):
        with pytest.raises(ValueError, match=r"--warmup-updates 0.*: a (whole )?number of at least 1 is needed"):
            wrong()


def test_a_schedule_that_needs_an_end_is_refused_without_one() -> None:
    with pytest.raises(ValueError, match=r"--lr-scheduler polynomial_decay after the --: give --total-num-update too"):
        check_words([("--lr-scheduler", ("polynomial_decay",))])
    check_words([("--lr-scheduler", ("polynomial_decay",)), ("--total-num-update", ("9",))])


def test_every_default_of_fairseq_and_of_this_package_is_in_its_range() -> None:
    for parser in (options.get_training_parser(), options.get_eval_lm_parser(), options.get_generation_parser()):
        for action in parser._actions:
            if action.default is not None:
                check_config({action.dest: action.default})
    groups = [*MODEL_DATACLASS_REGISTRY.values()]
    groups += [
        each for name in ("optimizer", "lr_scheduler") for each in REGISTRIES[name]["dataclass_registry"].values()
    ]
    for group in groups:
        content = OmegaConf.to_container(OmegaConf.structured(group), resolve=False)
        assert isinstance(content, dict)
        check_config(content)


def test_every_number_among_the_options_of_the_models_here_has_a_range() -> None:
    for name in (
        "alma_switch_lm",
        "alma_umix",
        "alma_mlp",
        "alma_vgg",
        "alma_moe_mlp",
        "alma_moe_vgg",
        "alma_firefly_vgg",
    ):
        parser = options.get_parser("", "alma_lm")
        ARCH_MODEL_REGISTRY[name].add_args(parser.add_argument_group(name))
        numbers = {
            action.option_strings[0]
            for action in parser._action_groups[-1]._group_actions
            if action.type in (int, float)
        }
        assert numbers <= set(RANGES)


def whole_config(*words: str):
    base = ["S", "--task", "alma_lm", "--arch", "alma_switch_lm_tiny", "--optimizer", "adam"]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), [*base, *words]))


def test_a_task_sees_the_options_of_the_whole_command() -> None:
    check_whole_config(whole_config().task)
    with pytest.raises(AlmaError, match=r"--weight-decay -1\.0: a number of at least 0"):
        check_whole_config(whole_config("--weight-decay", "-1").task)
    with pytest.raises(AlmaError, match=r"--lr \[-1\.0\]: a number of at least 0"):
        check_whole_config(whole_config("--lr", "-1").task)


def test_a_window_that_leaves_nothing_of_a_sequence_is_named_itself() -> None:
    config = OmegaConf.create({"task": {"tokens_per_sample": 32 - 100}, "eval_lm": {"context_window": 100}})
    with pytest.raises(AlmaError, match=r"^--context-window 100: must be smaller than --tokens-per-sample 32$"):
        check_whole_config(config.task)


@pytest.mark.parametrize("task", ["alma_lm", "alma_image_classification"])
@pytest.mark.parametrize("words", [("--seed", "-1"), ("--wait", "0"), ("--batch-size", "0"), ("--max-epoch", HUGE)])
def test_numbers_that_no_option_can_be_are_usage_errors_of_fairseqs_commands(task, words, capsys) -> None:
    parser = options.get_training_parser()
    with pytest.raises(SystemExit) as raised:
        options.parse_args_and_arch(parser, ["S", "--task", task, "--arch", "alma_mlp", *words])
    assert raised.value.code == 2
    assert f"argument {words[0]}" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("arch", ["alma_switch_lm", "alma_umix", "alma_moe_vgg"])
def test_a_model_looks_at_its_own_options_which_a_checkpoint_may_bring(arch: str) -> None:
    config = OmegaConf.structured(MODEL_DATACLASS_REGISTRY[arch])
    check_options(config)
    name = "num_members" if arch == "alma_umix" else "num_experts"
    config[name] = 10**9
    with pytest.raises(AlmaError, match=f"--{name.replace('_', '-')} 1000000000: a number of at most 10,000"):
        check_options(config)


def test_the_break_mode_that_the_engine_cannot_do_is_refused(monkeypatch) -> None:
    for wrong in (
        lambda: check_words([("--sample-break-mode", ("eos",))]),
        lambda: check_config({"sample_break_mode": "eos"}),
        lambda: check_whole_config(whole_config("--sample-break-mode", "eos").task),
    ):
        monkeypatch.delattr("numpy.compat", raising=False)
        with pytest.raises(ValueError, match=r"^--sample-break-mode eos: fairseq cannot do it with NumPy 2; give none"):
            wrong()
    check_words([("--sample-break-mode", ("complete",))])
    monkeypatch.setattr("numpy.compat", object(), raising=False)  # as NumPy 1 has it
    check_words([("--sample-break-mode", ("eos",))])


def test_every_task_here_bounds_its_numbers() -> None:
    assert all(issubclass(TASK_REGISTRY[name], StageTask) for name in ("alma_lm", "alma_image_classification"))


@pytest.mark.parametrize("option", ["--decoder-layers", "--num-experts", "--capacity-factor", "--decoder-embed-dim"])
def test_what_a_command_line_refuses_a_file_may_not_have_either(option: str) -> None:
    needed = {"decoder_embed_dim": 8, "decoder_ffn_embed_dim": 8, "decoder_layers": 1, "decoder_attention_heads": 1}
    most = RANGES[option].most
    given = {**needed, "num_experts": 4, option[2:].replace("-", "_"): most}
    check_words([(option, (str(most),))])
    read_options({"_name": "alma_switch_lm", **given})
    given[option[2:].replace("-", "_")] = most + 1
    with pytest.raises(ValueError, match="number of at most"):
        check_words([(option, (str(most + 1),))])
    with pytest.raises(UnfitCheckpoint, match=option[2:].replace("-", "_")):
        read_options({"_name": "alma_switch_lm", **given})


def test_what_a_model_cannot_be_is_refused_before_it_is_built() -> None:
    with pytest.raises(ValueError, match=r"^--gate firm after the --: choose from soft, hard$"):
        check_words([("--gate", ("firm",))])


def test_fairseq_knows_the_activations_that_are_declared() -> None:
    assert list(ACTIVATIONS) == utils.get_available_activation_fns()
