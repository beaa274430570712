import logging
import math
import shutil
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from fairseq import options, tasks
from fairseq.data import data_utils
from torch._inductor.exc import InvalidCxxCompiler

from fairseq_alma.checkpoints import TASK_STATE
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.text import losses
from fairseq_alma.text.task import ensure_printed
from fairseq_alma.text.text_job import check_start
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
def test_training_data_is_the_union_of_the_megabatches_of_the_stage(trained, arguments, megabatches):
    task = task_of(trained, *arguments)
    task.load_dataset("train")
    stream = Stream.open(trained.stream)
    assert task.dataset("train").sizes.sum() == sum(stream.megabatch(t).num_tokens for t in megabatches)
    first, path = task.dataset("train")[0]["target"], trained.stream / f"megabatch-{megabatches[0]:03d}/train"
    document = data_utils.load_indexed_dataset(str(path), task.dictionary)[0]
    assert first[: len(document)].tolist() == document[: len(first)].tolist()


def test_only_a_new_model_is_initialized_from_the_text(trained, tmp_path):
    words = ["--arch", "alma_transformer_lm_tiny", "--lr", "0", "--max-update", "1"]
    new = train_model(trained.stream, tmp_path / "new", *words, "--megabatch", "0")
    start = ["--finetune-from-model", str(new), "--megabatch", "1"]
    later = train_model(trained.stream, tmp_path / "b", *words, *start)
    losses = [evaluate(trained.stream, each)["loss"] for each in (new, later)]
    assert losses[0] == losses[1] < 0.8 * math.log2(len(task_of(trained).dictionary))


@pytest.mark.parametrize(
    ("batch", "max_tokens", "num_shards"), [(3, None, 1), (7, None, 2), (8, None, 2), (None, 300, 1)]
)
def test_every_token_is_trained_on_once_an_epoch_for_any_batch_and_number_of_processes(
    trained, batch, max_tokens, num_shards
):
    task = task_of(trained, "--megabatch", "1")
    task.load_dataset("train")
    counts, num_tokens = np.zeros(len(task.dataset("train")), dtype=int), 0
    sizes = {"max_sentences": batch, "max_tokens": max_tokens, "num_shards": num_shards}
    sizes |= {"required_batch_size_multiple": 8, "disable_iterator_cache": True}  # 8 is fairseq's default
    for shard in range(num_shards):
        for sample in task.get_batch_iterator(task.dataset("train"), shard_id=shard, **sizes).next_epoch_itr():
            num_tokens += sample["ntokens"]
            counts[sample["id"].tolist() if sample["ntokens"] else []] += 1
    assert (counts == 1).all() and num_tokens == Stream.open(trained.stream).megabatch(1).num_tokens


@pytest.mark.parametrize("batch", [4, 2000])
def test_two_epochs_count_every_token_of_a_megabatch_twice(trained, tmp_path, batch):
    length = ["--max-epoch", "2", "--max-update", "10000", "--batch-size", str(batch)]
    checkpoint = torch.load(train_model(trained.stream, tmp_path, "--megabatch", "0", *length), weights_only=True)
    assert checkpoint["extra_state"]["train_iterator"]["epoch"] == 3
    num_tokens = Stream.open(trained.stream).megabatch(0).num_tokens
    assert checkpoint["extra_state"][TASK_STATE]["train_tokens"] == 2 * num_tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--megabatch: not given"),
        (["--megabatch", "4"], "no mega-batch 4; give a number from 0 to 3"),
        (["--megabatch", "0", "--wait", "2"], "--megabatch 0 --wait 2: no stage ends with mega-batch 0"),
    ],
)
def test_a_missing_stage_is_reported(trained, arguments, message):
    with pytest.raises(AlmaError, match=message):
        task_of(trained, *arguments).load_dataset("train")


def test_a_waiting_time_of_zero_is_refused(trained, capsys):
    with pytest.raises(SystemExit):
        task_of(trained, "--megabatch", "0", "--wait", "0")
    assert "--wait: expected a number of at least 1, found 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("megabatch-000/train.bin", lambda content: content[:-2]),
        ("megabatch-000/train.bin", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        ("megabatch-000/train.bin", None),
        ("dict.txt", lambda content: content + b"one-more 1\n"),
    ],
    ids=["truncated", "altered", "missing", "dictionary"],
)
def test_a_file_that_differs_from_the_manifest_is_reported(trained, tmp_path, name, damage):
    path = shutil.copytree(trained.stream, tmp_path / "stream") / name
    content = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage(content))
    with pytest.raises(AlmaError, match=name):
        tasks.setup_task(training_config(tmp_path / "stream", "--megabatch", "0").task).load_dataset("train")


@pytest.mark.parametrize("words", [[], ["--context-window", "9", "--num-workers", "2"]])
def test_perplexity_does_not_depend_on_the_batch_or_the_workers(trained, words):
    tested = (trained.stream, trained.checkpoint, *words, "--batch-size")
    losses = [float(evaluate(*tested, number)["loss"]) for number in ("1", "3", "16")]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5) and 0 < losses[0] < 8


def test_sequences_may_be_longer_than_the_usual_batch_of_a_test(trained, tmp_path, monkeypatch):
    length = ["--tokens-per-sample", "40000"]
    model = train_model(trained.stream, tmp_path, "--megabatch", "0", "--max-update", "1", *length)
    words = [str(trained.stream), "--task", "alma_lm", "--path", str(model), "--gen-subset", "test", "--cpu", *length]
    monkeypatch.setattr("sys.argv", ["fairseq-eval-lm", *words])
    assert 0 < losses.evaluate()["test"] < 9


def test_a_checkpoint_of_another_vocabulary_is_refused(trained, tmp_path):
    other = prepare_stream(tmp_path, vocab_size=290, seed=1)
    with pytest.raises(AlmaError, match=r"found another tokenizer, or a model of fairseq_alma 0\.2\.0 "):
        evaluate(other, trained.checkpoint)
    with pytest.raises(AlmaError, match="found another tokenizer"):
        train_model(other, tmp_path / "m", "--megabatch", "0", "--finetune-from-model", str(trained.checkpoint))


def test_files_that_are_no_checkpoint_and_several_files_are_refused(trained, tmp_path):
    (tmp_path / "text.pt").write_text("no checkpoint")
    with pytest.raises(AlmaError, match=r"text\.pt: not a checkpoint"):
        evaluate(trained.stream, tmp_path / "text.pt")
    with pytest.raises(AlmaError, match=r"text\.pt: not a checkpoint"):
        train_model(trained.stream, tmp_path, "--megabatch", "0", "--finetune-from-model", str(tmp_path / "text.pt"))
    with pytest.raises(AlmaError, match="alma-ensemble"):
        evaluate(trained.stream, f"{trained.checkpoint}:{trained.checkpoint}")
    with pytest.raises(AlmaError, match="stream:2: fairseq splits paths at ':'; rename"):
        evaluate(f"{trained.stream}:2", trained.checkpoint)


def test_a_training_takes_the_number_of_experts_from_its_checkpoint(trained, tmp_path):
    update = ["--max-update", "1"]
    first = train_model(trained.stream, tmp_path / "a", "--megabatch", "0", "--num-experts", "3", *update)
    start = ["--finetune-from-model", str(first), *update]
    last = train_model(trained.stream, tmp_path / "b", "--megabatch", "1", *start)
    first.unlink()  # a resumed training does not need the checkpoint
    train_model(trained.stream, tmp_path / "b", "--megabatch", "1", *start, "--max-update", "2")
    assert torch.load(last)["cfg"]["model"]["num_experts"] == 3
    with pytest.raises(AlmaError, match="give --num-experts 4"):
        start = ["--num-experts", "3", "--finetune-from-model", str(trained.checkpoint), *update]
        train_model(trained.stream, tmp_path / "c", "--megabatch", "0", *start)
    with pytest.raises(AlmaError, match="expected --num-experts 2, the first size of --grow-schedule, found 4"):
        check_start(trained.checkpoint, trained.stream, [("--num-experts", "2")])
    last = train_model(trained.stream, tmp_path / "d", "--megabatch", "0", "--arch", "alma_switch_lm", *update)
    model = torch.load(last)["cfg"]["model"]
    assert (model["num_experts"], model["gate_trees"]) == (4, "")


def test_a_training_does_not_resume_from_another_megabatch(trained, tmp_path):
    for words in (["--checkpoint-suffix=-a"], []):
        train_model(trained.stream, tmp_path, "--megabatch", "0", "--max-update", "1", *words)
        with pytest.raises(AlmaError, match="trained on mega-batch 0, not on --megabatch 1; give another --save-dir"):
            train_model(trained.stream, tmp_path, "--megabatch", "1", "--max-update", "2", *words)
    again = torch.load(train_model(trained.stream, tmp_path, "--megabatch", "0", "--max-update", "2"))
    assert again["optimizer_history"][-1]["num_updates"] == 2
    last = train_model(trained.stream, tmp_path, "--megabatch", "1", "--max-update", "3", "--reset-dataloader")
    tokens = [each["extra_state"]["AlmaLMTask"]["train_tokens"] for each in (again, torch.load(last))]
    assert tokens[1] > tokens[0]  # the state of the features is kept


def test_a_training_resumes_within_an_epoch_only_in_the_same_order(trained, tmp_path):
    first = ["--megabatch", "1", "--max-update", "3"]
    last = train_model(trained.stream, tmp_path, *first)
    for words, found in ((["--replay"], "--replay False"), (["--tokens-per-sample", "16"], "--tokens-per-sample 32")):
        with pytest.raises(AlmaError, match=f"expected {found} of the interrupted epoch"):
            train_model(trained.stream, tmp_path, *first, "--max-update", "4", *words)
    train_model(trained.stream, tmp_path, *first, "--max-update", "4", "--replay", "--reset-dataloader")
    for option in ("--restore-file", "--continue-once"):  # a path, as in fairseq
        with pytest.raises(AlmaError, match="trained on mega-batch 1, not on --megabatch 0"):
            train_model(trained.stream, tmp_path / "b", "--megabatch", "0", option, str(last))
    with pytest.raises(AlmaError, match=r"checkpoint_9\.pt: no such checkpoint file"):
        shutil.copy(last, tmp_path / "checkpoint_9.pt")
        train_model(trained.stream, tmp_path, *first, "--restore-file", "checkpoint_9.pt")


@pytest.mark.parametrize("arch", ["lstm_lm", "fconv_lm"])
def test_a_model_whose_checkpoint_cannot_be_read_is_not_trained(trained, tmp_path, arch):
    with pytest.raises(AlmaError, match=f"--arch {arch}: expected architecture alma_… or transformer_lm…"):
        train_model(trained.stream, tmp_path, "--megabatch", "0", "--arch", arch, shape=())


def test_an_adaptive_softmax_trains_resumes_and_is_tested(trained, tmp_path):
    words = ["--arch", "transformer_lm", "--criterion", "adaptive_loss", "--adaptive-softmax-cutoff", "100,200"]
    for update in ("2", "3"):
        last = train_model(trained.stream, tmp_path, "--megabatch", "0", *words, "--max-update", update)
    assert 0 < float(evaluate(trained.stream, last)["loss"]) < 12


@pytest.mark.parametrize("path", ["nowhere.pt", "a.pt:b.pt", None])
def test_fairseq_validate_needs_one_checkpoint(trained, capsys, path):
    words = [str(trained.stream), "--task", "alma_lm", "--batch-size", "4", *([] if path is None else ["--path", path])]
    with pytest.raises(SystemExit):
        options.parse_args_and_arch(options.get_validation_parser(), words)
    assert ("required: --path" if path is None else f"argument --path: {path}: ") in capsys.readouterr().err


def test_cross_entropy_and_balance_loss_are_logged_separately(trained):
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
def test_a_criterion_without_the_balance_loss_causes_a_warning(trained, tmp_path, options, warns, caplog):
    train_model(trained.stream, tmp_path / "m", "--megabatch", "0", "--max-update", "1", *options)
    assert ("trains without load-balancing loss" in caplog.text) == warns


def test_compile_without_its_criterion_or_a_compiler_is_refused(trained, tmp_path, monkeypatch):
    command = (trained.stream, tmp_path / "m", "--megabatch", "0", "--compile")
    with pytest.raises(AlmaError, match="--compile: requires --criterion alma_switch_cross_entropy"):
        train_model(*command, "--criterion", "cross_entropy")
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", Mock(side_effect=InvalidCxxCompiler))
    with pytest.raises(AlmaError, match=r"--compile: no C\+\+ compiler found"):
        train_model(*command)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "20"], "--max-tokens 20: must not be smaller than --tokens-per-sample 32"),
        (["--max-target-positions", "16"], "--max-target-positions 16: must not be smaller than"),
        (["--skip-remainder-batch"], "--skip-remainder-batch: not supported"),
        (["--sample-break-mode", "complete"], "--sample-break-mode: not supported"),
        (["--past-target"], "--past-target: not supported"),
        (["--add-bos-token"], "--add-bos-token: not supported; omit this option, because sequences begin with </s>"),
        (["--new-first", "0.5"], "--new-first 0.5 requires --replay; add --replay"),
        (["--tokens-per-sample", "0"], "--tokens-per-sample: must be positive and larger than --context-window"),
        (["--batch-size", "0"], "--batch-size 0: must be positive; give 1 or more"),
        (["--max-tokens", "0"], "--max-tokens 0: must be positive; give 1 or more"),
    ],
)
def test_an_option_that_excludes_sequences_is_refused(trained, tmp_path, options, message):
    with pytest.raises(AlmaError, match=message) as error:
        train_model(trained.stream, tmp_path, "--megabatch", "0", *options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("level", "length"), [("WARNING", ["--tokens-per-sample", "32"]), ("INFO", [])])
def test_fairseq_eval_lm_prints_its_result_after_any_logging_configuration(trained, tmp_path, level, length, checkout):
    arguments = [str(trained.stream), "--user-dir", str(checkout / "fairseq_alma"), "--task", "alma_lm", *length]
    arguments += ["--path", str(trained.checkpoint), "--cpu"]  # without a length, that of the training
    result = run_script(["fairseq-eval-lm", *arguments], log={"filename": str(tmp_path / "log"), "level": level})
    assert "Perplexity: " in result.stdout + result.stderr, result.stderr[-500:]


def test_a_logger_that_prints_gets_no_second_handler():
    logger = logging.Logger("test")
    logger.addHandler(logging.StreamHandler(sys.stdout))
    ensure_printed(logger)
    assert len(logger.handlers) == 1


def test_fairseq_interactive_skips_a_prompt_that_is_too_long_and_answers_the_others(trained, tmp_path, checkout):
    arguments = [str(trained.stream), "--user-dir", str(checkout / "fairseq_alma"), "--task", "alma_lm", "--cpu"]
    arguments += ["--path", str(trained.checkpoint), "--beam", "1", "--max-len-b", "20", "--buffer-size", "4"]
    (tmp_path / "lines").write_text(f"the river\n{'the river ' * 40}\nthe stone\n")
    done = run_script(["fairseq-interactive", *arguments, "--input", str(tmp_path / "lines")])
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert "tokens, more than the maximum length of the model" in done.stdout
    assert [line[:3] for line in done.stdout.splitlines() if line.startswith("S-")] == ["S-0", "S-2"]
