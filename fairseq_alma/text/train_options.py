"""The options after ``--`` of alma-stream: what they may be, what fairseq-eval-lm needs of them too.

They are read as words, because fairseq's own parser takes seconds to import; fairseq-train checks them itself.
"""

from copy import copy
from typing import Mapping, Optional, Sequence

from fairseq_alma.checkpoints.model_options import LANGUAGE, WEIGHTS_FLAG
from fairseq_alma.options import GivenOption, flags_of, group_words, options_of
from fairseq_alma.training.feature import FEATURES
from fairseq_alma.watch.sinks import CurveOptions

# What alma-stream decides, and how a user says it instead.
BALANCING = "alma_switch_cross_entropy"
"""The criterion that adds the balance loss of Switch layers."""
OWNED: dict[str, str] = {
    "--user-dir": "alma-stream gives it",
    "--task": "alma-stream gives it",
    "--megabatch": "alma-stream gives it",
    "--wait": "give --wait before the --",
    "--replay": "give --replay before the --",
    "--train-subset": "a stage trains on its mega-batches",
    "--seed": "give --seed before the --",
    "--save-dir": "give --run before the --",
    "--restore-file": "alma-stream resumes from the stage's own last checkpoint",
    "--continue-once": "alma-stream resumes from the stage's own last checkpoint",
    WEIGHTS_FLAG: "give it, or --init, before the --",
    "--add-bos-token": "sequences begin with </s>, those of tests too",
    "--future-target": "the next token is what is learned and tested",
    "--past-target": "the next token is what is learned and tested",
    "--self-target": "the next token is what is learned and tested",
    "--shorten-method": "documents are learned and tested whole; --tokens-per-sample cuts them",
    "--reset-optimizer": "a stage begins with a new optimizer",
    "--reset-lr-scheduler": "a stage begins with a new schedule",
    "--reset-meters": "a stage begins with new meters",
    "--reset-dataloader": "a stage begins with its own data",
    "--log-format": "alma-stream reads the log",
    "--log-file": "the logs are in RUN/stage-NNN",
    "--no-progress-bar": "the logs are in RUN/stage-NNN",
    "--save-interval": "give --save-every before the --",
    "--save-interval-updates": "give --save-every before the --",
    "--save-interval-minutes": "give --save-every before the --",
    "--keep-interval-updates": "give --keep-checkpoints before the --",
    "--keep-interval-updates-pattern": "give --keep-checkpoints before the --",
    "--keep-last-epochs": "give --keep-checkpoints before the --",
    "--keep-best-checkpoints": "the last weights of a stage count, not the best",
    "--no-save": "the next stage needs the checkpoint",
    "--no-epoch-checkpoints": "give --save-every before the --",
    "--no-last-checkpoints": "the next stage needs the checkpoint",
    "--no-save-optimizer-state": "a stage that was cut off needs it",
    "--write-checkpoints-asynchronously": "--save-in-background writes them beside the training",
    "--checkpoint-suffix": "alma-stream names the checkpoints",
    "--update-ordered-indices-seed": "a stage that was cut off needs the batches that it had",
    "--disable-validation": "it is the default; --validate before the -- switches validation on",
    "--patience": "a stage ends by --max-update or --max-epoch alone",
    "--stop-time-hours": "a stage ends by --max-update or --max-epoch alone",
    "--stop-min-lr": "a stage ends by --max-update or --max-epoch alone",
}

EVAL_FLAGS = ("--cpu",)
# Not --autocast: tests are in fp32, whose rounding leaves no trace of the batch in a perplexity.
EVAL_VALUES = ("--tokens-per-sample", "--sample-break-mode", "--num-workers")
# The evaluation's option: the training's options that it is taken from, the first that is given.
EVAL_BATCH = {
    "--batch-size": ("--batch-size-valid", "--batch-size"),
    "--max-tokens": ("--max-tokens-valid", "--max-tokens"),
}
MODEL_OPTIONS = flags_of(*LANGUAGE)
"""Options of the language models here: for alma_umix they go into --member-options."""
BATCHES_PER_UPDATE = "--update-freq"
# Options that count updates over the whole of a stage.
LENGTHS = ("--max-update", "--total-num-update")


class TrainOptions:
    """Options for fairseq-train, in the order given.

    Args:
        words: the words after ``--``.
        owned: options that the learner decides beside `OWNED`, and how a user says it instead.

    Raises:
        ValueError: an option that alma-stream decides, one that is missing, or a number out of range.
    """

    def __init__(self, words: Sequence[str], owned: Mapping[str, str] = {}) -> None:
        self.owned = {**OWNED, **_owned_by_features(), **owned}
        self.options = group_words(words)
        for name, _ in self.options:
            _refuse_owned(name, self.owned)
        if self.last("--arch") is None:
            raise ValueError("no --arch after the --; choose an architecture, for instance --arch alma_switch_lm_tiny")
        self.live = CurveOptions.from_options(self.as_dict())
        self.max_update = self._positive("--max-update")
        self.max_epoch = self._positive("--max-epoch")
        if self.max_update is None and self.max_epoch is None:
            raise ValueError("neither --max-update nor --max-epoch after the --; a stage must end")
        if self.last("--balance-loss-weight") is not None and self.last("--criterion") != (BALANCING,):
            raise ValueError(f"--balance-loss-weight after the --: needs --criterion {BALANCING}, which is not given")

    def last(self, name: str) -> Optional[tuple[str, ...]]:
        """Return the values of the last occurrence of an option, or None."""
        found = [values for option, values in self.options if option == name]
        return found[-1] if found else None

    def as_dict(self) -> dict[str, str]:
        """Return option and value, empty for a flag, the last occurrence counting: for run.json."""
        return {name: " ".join(values) for name, values in self.options}

    def for_evaluation(self) -> list[GivenOption]:
        """Return the options that fairseq-eval-lm needs too."""
        chosen: list[GivenOption] = [(name, ()) for name in EVAL_FLAGS if self.last(name) is not None]
        chosen += [(name, values) for name in EVAL_VALUES if (values := self.last(name)) is not None]
        for name, sources in EVAL_BATCH.items():
            given = [values for source in sources if (values := self.last(source)) is not None]
            chosen += [(name, given[0])] if given else []
        return chosen

    def lengthened(self, times: int) -> "TrainOptions":
        """Return the options of a stage with that many times the updates; epochs, and the warm-up, stay as they are."""
        longer = copy(self)
        longer.options = [self._lengthen(name, values, times) for name, values in self.options]
        longer.max_update = longer._positive("--max-update")
        return longer

    def shared(self, num_procs: int) -> "TrainOptions":
        """Return the options of each of several processes that share the batches of an update.

        Raises:
            ValueError: they cannot have equally many each.
        """
        (words,) = self.last(BATCHES_PER_UPDATE) or ("1",)
        counts = [int(word) if word.isdecimal() else 0 for word in words.split(",")]
        if any(count == 0 or count % num_procs for count in counts):
            raise ValueError(
                f"--num-procs {num_procs}: the processes share the batches of an update, and {BATCHES_PER_UPDATE} "
                f"{words} after the -- is no multiple of it; give one, with a --batch-size that is as much smaller"
            )
        each = ",".join(str(count // num_procs) for count in counts)
        shared = copy(self)
        shared.options = replace_option(self.options, BATCHES_PER_UPDATE, each)
        return shared

    def _lengthen(self, name: str, values: tuple[str, ...], times: int) -> GivenOption:
        if name not in LENGTHS:
            return name, values
        value = self._positive(name)
        assert value is not None
        return name, (str(times * value),)

    def _positive(self, name: str) -> Optional[int]:
        values = self.last(name)
        if values is None:
            return None
        if len(values) != 1 or not values[0].isdecimal() or int(values[0]) < 1:
            raise ValueError(f"{name} {' '.join(values)} after the --: a whole number of at least 1 is needed")
        return int(values[0])


def replace_option(options: Sequence[GivenOption], name: str, value: str) -> list[GivenOption]:
    """Return options with another value of one that is among them."""
    return [(each, (value,)) if each == name else (each, values) for each, values in options]


def _owned_by_features() -> dict[str, str]:
    """Return the options of features that stand before ``--``, and those of fairseq-train that these stand for."""
    found: dict[str, str] = {}
    for kind in FEATURES:
        before = {option.flag for option in options_of(kind).values() if option.side is None and "text" in option.kinds}
        found |= dict.fromkeys(before, "give it before the --") | dict(kind.owned)
    return found


def _refuse_owned(name: str, all_owned: Mapping[str, str]) -> None:
    """Refuse an option that alma-stream decides, also abbreviated as argparse allows."""
    for owned, instead in all_owned.items():
        if name == owned or (len(name) > 4 and owned.startswith(name) and name not in all_owned):
            raise ValueError(f"{name} may not stand after the --: {instead}")
