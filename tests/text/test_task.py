import logging
import shutil
import sys

import numpy as np
import pytest
import torch
from fairseq import tasks
from fairseq.data import data_utils
from torch._inductor.exc import InvalidCxxCompiler

from fairseq_alma.checkpoints import TASK_STATE
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.text.task import ensure_printed
from tests.scripts import run_script
from tests.text.stock_commands import evaluate, prepare_stream, train_model, training_config


def task_of(trained, *arguments):
    return tasks.setup_task(training_config(trained.stream, *arguments).task)


@pytest.mark.parametrize(
    ("arguments", "megabatches"),
    [
        (["--megabatch", "2"], [2]),
        (["--megabatch", "1", "--wait", "2"], [0, 1]),
        (["--megabatch", "3", "--wait", "3"], [3]),
        (["--megabatch", "3", "--wait", "2", "--replay"], [0, 1, 2, 3]),
    ],
)
def test_training_data_is_the_union_of_the_stage_s_megabatches(trained, arguments, megabatches):
    task = task_of(trained, *arguments)
    task.load_dataset("train")
    stream = Stream.open(trained.stream)
    assert task.dataset("train").sizes.sum() == sum(stream.megabatch(t).num_tokens for t in megabatches)
    first = task.dataset("train")[0]["target"]
    want = data_utils.load_indexed_dataset(
        str(trained.stream / f"megabatch-{megabatches[0]:03d}/train"), task.dictionary
    )
    document = want[0]
    assert first[: len(document)].tolist() == document[: len(first)].tolist()


def tokens_of_an_epoch(task, batch, num_shards, max_tokens):
    """Return how often fairseq's trainer would train on each token of the stage in its first epoch, and how many."""
    counts = np.zeros(len(task.dataset("train")), dtype=int)
    num_tokens = 0
    for shard in range(num_shards):
        epoch = task.get_batch_iterator(
            task.dataset("train"),
            max_sentences=batch,
            max_tokens=max_tokens,
            required_batch_size_multiple=8,  # fairseq's default
            num_shards=num_shards,
            shard_id=shard,
            disable_iterator_cache=True,
        )
        for sample in epoch.next_epoch_itr():
            num_tokens += sample["ntokens"]
            counts[sample["id"].tolist() if sample["ntokens"] else []] += 1
    return counts, num_tokens


@pytest.mark.parametrize(
    ("batch", "max_tokens", "num_shards"), [(3, None, 1), (7, None, 2), (8, None, 2), (None, 300, 1)]
)
def test_every_token_is_trained_on_once_an_epoch_whatever_the_batch_and_the_number_of_processes(
    trained, batch, max_tokens, num_shards
):
    task = task_of(trained, "--megabatch", "1")
    task.load_dataset("train")
    counts, num_tokens = tokens_of_an_epoch(task, batch, num_shards, max_tokens)
    assert (counts == 1).all()
    assert num_tokens == Stream.open(trained.stream).megabatch(1).num_tokens


@pytest.mark.parametrize("batch", [4, 2000])
def test_a_training_of_two_epochs_counts_every_token_of_its_mega_batch_twice(trained, tmp_path, batch):
    length = ["--max-epoch", "2", "--max-update", "10000", "--batch-size", str(batch)]
    checkpoint = torch.load(train_model(trained.stream, tmp_path, "--megabatch", "0", *length), weights_only=True)
    assert checkpoint["extra_state"]["train_iterator"]["epoch"] == 3
    num_tokens = Stream.open(trained.stream).megabatch(0).num_tokens
    assert checkpoint["extra_state"][TASK_STATE]["train_tokens"] == 2 * num_tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--megabatch is missing"),
        (["--megabatch", "4"], "no mega-batch 4, the stream has 4"),
        (["--megabatch", "0", "--wait", "2"], "--megabatch 0 --wait 2: no stage ends there"),
    ],
)
def test_a_stage_that_does_not_exist_is_named(trained, arguments, message):
    with pytest.raises(AlmaError, match=message):
        task_of(trained, *arguments).load_dataset("train")


def test_a_waiting_time_of_no_mega_batch_is_refused(trained, capsys):
    with pytest.raises(SystemExit):
        task_of(trained, "--megabatch", "0", "--wait", "0")
    assert "--wait: 0 found, a number of at least 1 is needed" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["truncated", "altered", "missing"])
def test_files_that_do_not_match_the_manifest_are_named(trained, tmp_path, damage):
    stream = shutil.copytree(trained.stream, tmp_path / "stream")
    path = stream / "megabatch-000" / "train.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-2] if damage == "truncated" else content[:-1] + bytes([content[-1] ^ 1]))
    if damage == "missing":
        path.unlink()
    task = tasks.setup_task(training_config(stream, "--megabatch", "0").task)
    with pytest.raises(AlmaError, match=r"megabatch-000/train\.bin"):
        task.load_dataset("train")


def test_an_altered_dictionary_is_named(trained, tmp_path):
    stream = shutil.copytree(trained.stream, tmp_path / "stream")
    with open(stream / "dict.txt", "a") as file:
        file.write("one-more 1\n")
    with pytest.raises(AlmaError, match=r"dict\.txt"):
        tasks.setup_task(training_config(stream).task)


def test_perplexity_does_not_depend_on_the_batch(trained):
    losses = [float(evaluate(trained.stream, trained.checkpoint, "--batch-size", str(n))["loss"]) for n in (1, 3, 16)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert 0 < losses[0] < 8


def test_a_checkpoint_of_another_vocabulary_is_named(trained, tmp_path):
    other = prepare_stream(tmp_path, vocab_size=290, seed=1)
    with pytest.raises(AlmaError, match="another tokenizer"):
        evaluate(other, trained.checkpoint)
    with pytest.raises(AlmaError, match="another tokenizer"):
        train_model(other, tmp_path / "m", "--megabatch", "0", "--finetune-from-model", str(trained.checkpoint))


def test_what_is_no_checkpoint_is_named(trained, tmp_path):
    (tmp_path / "text.pt").write_text("no checkpoint")
    with pytest.raises(AlmaError, match=r"text\.pt: not a checkpoint"):
        evaluate(trained.stream, tmp_path / "text.pt")
    with pytest.raises(AlmaError, match=r"text\.pt: not a checkpoint"):
        start = ["--finetune-from-model", str(tmp_path / "text.pt")]
        train_model(trained.stream, tmp_path / "m", "--megabatch", "0", *start)


def test_several_checkpoints_in_one_path_are_sent_to_alma_ensemble(trained):
    with pytest.raises(AlmaError, match="alma-ensemble"):
        evaluate(trained.stream, f"{trained.checkpoint}:{trained.checkpoint}")


def test_training_goes_on_from_a_checkpoint_with_its_number_of_experts(trained, tmp_path):
    start = ["--finetune-from-model", str(trained.checkpoint), "--max-update", "1"]
    first = train_model(trained.stream, tmp_path / "a", "--megabatch", "0", "--num-experts", "3", "--max-update", "1")
    start_there = ["--finetune-from-model", str(first), "--max-update", "1"]
    second = train_model(trained.stream, tmp_path / "b", "--megabatch", "1", *start_there)
    assert torch.load(second)["cfg"]["model"]["num_experts"] == 3
    with pytest.raises(AlmaError, match="give --num-experts 4"):
        train_model(trained.stream, tmp_path / "c", "--megabatch", "0", "--num-experts", "3", *start)


def test_the_folder_of_another_mega_batch_is_not_taken_for_its_own(trained, tmp_path):
    train_model(trained.stream, tmp_path, "--megabatch", "0", "--max-update", "1")
    with pytest.raises(AlmaError, match="trained on mega-batch 0, not on --megabatch 1; give another --save-dir"):
        train_model(trained.stream, tmp_path, "--megabatch", "1", "--max-update", "2")
    again = train_model(trained.stream, tmp_path, "--megabatch", "0", "--max-update", "2")
    assert torch.load(again)["optimizer_history"][-1]["num_updates"] == 2
    train_model(trained.stream, tmp_path, "--megabatch", "1", "--max-update", "3", "--reset-dataloader")


def test_a_checkpoint_says_how_many_experts_it_has_whatever_names_the_architecture(trained, tmp_path):
    last = train_model(trained.stream, tmp_path, "--megabatch", "0", "--arch", "alma_switch_lm", "--max-update", "1")
    model = torch.load(last)["cfg"]["model"]
    assert (model["num_experts"], model["gate_trees"]) == (4, "")


def test_training_logs_cross_entropy_and_balance_apart(trained):
    log = torch.load(trained.checkpoint)["extra_state"]["metrics"]
    names = {name for aggregator in log.values() for _, name, *_ in aggregator}
    assert {"loss", "nll_loss", "balance_loss", "switch0_dropped", "switch0_expert03", "switch0_entropy"} <= names


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ([], False),
        (["--criterion", "cross_entropy"], True),
        (["--criterion", "cross_entropy", "--num-experts", "1"], False),
    ],
)
def test_a_balance_loss_that_is_left_out_is_told(trained, tmp_path, options, warns, caplog):
    train_model(trained.stream, tmp_path / "m", "--megabatch", "0", "--max-update", "1", *options)
    assert ("training without the balance loss of the experts" in caplog.text) == warns


def test_what_cannot_be_compiled_is_refused_in_one_line(trained, tmp_path, monkeypatch):
    command = (trained.stream, tmp_path / "m", "--megabatch", "0", "--compile")
    with pytest.raises(AlmaError, match="--compile: requires --criterion alma_switch_cross_entropy"):
        train_model(*command, "--criterion", "cross_entropy")

    def find_none():
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", find_none)
    with pytest.raises(AlmaError, match=r"--compile: no C\+\+ compiler was found"):
        train_model(*command)


@pytest.mark.parametrize(("level", "length"), [("WARNING", ["--tokens-per-sample", "32"]), ("INFO", [])])
def test_the_stock_command_prints_its_result_whatever_set_up_logging_before(trained, tmp_path, level, length, checkout):
    arguments = [str(trained.stream), "--user-dir", str(checkout / "fairseq_alma"), "--task", "alma_lm", *length]
    arguments += ["--path", str(trained.checkpoint), "--cpu"]  # without a length, that of the training
    result = run_script(["fairseq-eval-lm", *arguments], log={"filename": str(tmp_path / "log"), "level": level})
    assert "Perplexity: " in result.stdout + result.stderr, result.stderr[-500:]


def test_a_logger_that_prints_already_gets_no_second_handler():
    logger = logging.Logger("test")
    logger.addHandler(logging.StreamHandler(sys.stdout))
    ensure_printed(logger)
    assert len(logger.handlers) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "20"], "--max-tokens 20: smaller than a sequence of --tokens-per-sample 32"),
        (["--max-target-positions", "16"], "--max-target-positions 16: .* and --tokens-per-sample is 32"),
        (["--skip-remainder-batch"], "--skip-remainder-batch: every sequence is trained on"),
    ],
)
def test_the_option_that_leaves_no_room_for_a_sequence_is_named(trained, tmp_path, options, message):
    with pytest.raises(AlmaError, match=message) as error:
        train_model(trained.stream, tmp_path, "--megabatch", "0", *options)
    assert "\n" not in str(error.value)


def test_a_line_that_is_too_long_for_the_model_is_skipped_with_a_note_and_the_others_are_answered(
    trained, tmp_path, checkout
):
    arguments = [str(trained.stream), "--user-dir", str(checkout / "fairseq_alma"), "--task", "alma_lm", "--cpu"]
    arguments += ["--path", str(trained.checkpoint), "--beam", "1", "--max-len-b", "20", "--buffer-size", "4"]
    (tmp_path / "lines").write_text(f"the river\n{'the river ' * 40}\nthe stone\n")
    done = run_script(["fairseq-interactive", *arguments, "--input", str(tmp_path / "lines")])
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert "tokens is longer than the model takes; skipped" in done.stdout
    assert [line[:3] for line in done.stdout.splitlines() if line.startswith("S-")] == ["S-0", "S-2"]
