"""A small stream and a model trained on it for a few updates, by the functions of the stock commands."""

import random

from fairseq import options
from fairseq_cli import eval_lm, train

import fairseq_alma
from data_prep.text.command import main as prepare
from fairseq_alma.training.stage_task import configuration_of

fairseq_alma.register()

WORDS = [
    "the", "a", "of", "to", "in", "it", "is", "was", "river", "stone", "light",
    "wind", "over", "under", "and", "but", "or", "not", "long", "old", "new", "seven",
]  # fmt: skip
TOKENS_PER_SAMPLE = 32


def write_text(path, seed=0, num_documents=200):
    generator = random.Random(seed)
    lengths = (generator.randint(1, 6) for _ in range(num_documents))
    documents = ["\n".join(" ".join(generator.choices(WORDS, k=12)) for _ in range(length)) for length in lengths]
    path.write_text("\n\n".join(documents) + "\n")


def prepare_stream(folder, vocab_size=300, seed=0, *more):
    write_text(folder / "text.txt", seed)
    arguments = [str(folder / "text.txt"), "--out", str(folder / "stream"), "--megabatches", "4"]
    sizes = ["--vocab-size", str(vocab_size), "--valid-bytes", "1800", "--test-bytes", "3000", "--workers", "1"]
    assert prepare([*arguments, *sizes, *more]) in (None, 0)
    return folder / "stream"


SHAPE = ("--decoder-layers", "2", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "32")
SHAPE += ("--decoder-attention-heads", "2")


def training_words(stream, *arguments, device=("--cpu",), shape=SHAPE):
    command = [str(stream), "--task", "alma_lm", "--tokens-per-sample", str(TOKENS_PER_SAMPLE), *device]
    command += ["--arch", "alma_switch_lm_tiny", *shape, "--optimizer", "adam"]
    command += ["--criterion", "alma_switch_cross_entropy", "--lr", "0.01", "--max-update", "20", "--batch-size", "4"]
    command += ["--disable-validation", "--no-epoch-checkpoints", "--num-workers", "0", "--log-format", "none"]
    return [*command, *arguments]


def training_options(stream, *arguments, **more):
    return options.parse_args_and_arch(options.get_training_parser(), training_words(stream, *arguments, **more))


def training_config(stream, *arguments, **more):
    return configuration_of(training_options(stream, *arguments, **more))


def train_model(stream, folder, *arguments, **more):
    train.main(training_config(stream, "--save-dir", str(folder), *arguments, **more))
    return folder / "checkpoint_last.pt"


def evaluation_config(stream, checkpoint, *arguments):
    command = [str(stream), "--task", "alma_lm", "--tokens-per-sample", str(TOKENS_PER_SAMPLE), "--cpu"]
    command += ["--path", str(checkpoint), "--gen-subset", "test", "--num-workers", "0", "--no-progress-bar"]
    arguments = options.parse_args_and_arch(options.get_eval_lm_parser(), [*command, *arguments])
    return configuration_of(arguments)


def evaluate(stream, checkpoint, *arguments):
    return eval_lm.main(evaluation_config(stream, checkpoint, *arguments))
