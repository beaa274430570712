"""The options after ``--`` of alma-stream: what they may be, what fairseq-eval-lm needs of them too.

They are read as words, because fairseq's own parser takes seconds to import; fairseq-train checks them itself.
"""

from copy import copy
from typing import Mapping, Optional, Sequence

from fairseq_alma.checkpoints.model_options import MODELS
from fairseq_alma.options import GivenOption, group_words, options_of
from fairseq_alma.training.feature import FEATURES

BALANCING = "alma_switch_cross_entropy"
"""The criterion that adds the balance loss of Switch layers."""
_OWNED = {
    "alma-stream gives it": "user-dir task",
    "give it before the --": "wait replay seed",
    "give --run before the --": "save-dir",
    "give it, or --init, before the --": "finetune-from-model",
    "alma-stream resumes from the stage's own last checkpoint": "restore-file continue-once",
    "a stage trains on its mega-batches": "megabatch train-subset",
    "sequences begin with </s>, and the next token is learned and tested": "add-bos-token future-target past-target "
    "self-target",
    "documents are learned and tested whole; --tokens-per-sample cuts them": "shorten-method",
    "a stage begins anew unless --carry-optimizer is given before the --": "reset-optimizer reset-lr-scheduler "
    "reset-meters reset-dataloader",
    "the logs are in RUN/stage-NNN": "log-format log-file no-progress-bar",
    "give --save-every before the --": "save-interval save-interval-updates save-interval-minutes no-epoch-checkpoints",
    "give --keep-checkpoints before the --": "keep-interval-updates keep-interval-updates-pattern keep-last-epochs",
    "the last weights of a stage count, unless --best-checkpoint is given before the --": "keep-best-checkpoints",
    "the next stage, or a resumed one, needs the checkpoint": "no-save no-last-checkpoints no-save-optimizer-state "
    "write-checkpoints-asynchronously checkpoint-suffix",
    "every sequence is trained on in each epoch": "skip-remainder-batch",
    "a resumed stage needs the order that it had": "update-ordered-indices-seed",
    "it is the default; --validate before the -- switches validation on": "disable-validation",
    "a stage ends by --max-update or --max-epoch alone": "patience stop-time-hours stop-min-lr",
}
OWNED = {f"--{name}": instead for instead, names in _OWNED.items() for name in names.split()}
"""Options of fairseq-train that alma-stream decides, and what to do instead."""
EVAL_FLAGS = ("--cpu",)
# Not --autocast: tests are in fp32, whose rounding leaves no trace of the batch in a perplexity.
EVAL_VALUES = ("--tokens-per-sample", "--sample-break-mode", "--num-workers")
EVAL_BATCH = {
    "--batch-size": ("--batch-size-valid", "--batch-size"),
    "--max-tokens": ("--max-tokens-valid", "--max-tokens"),
}
"""Option of the evaluation -> options of the training that it is taken from, the first that is given."""
BATCHES_PER_UPDATE = "--update-freq"
LENGTHS = ("--max-update", "--total-num-update")
"""Options that count updates over the whole of a stage."""


class TrainOptions:
    """Options for fairseq-train, in the order given.

    Args:
        words: the words after ``--``.
        owned: options that the learner decides in addition to `OWNED` -> what to do instead.

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
        self._check_own()
        self.max_update = self._positive("--max-update")
        self.max_epoch = self._positive("--max-epoch")
        if self.max_update is None and self.max_epoch is None:
            raise ValueError("neither --max-update nor --max-epoch after the --; a stage must end")
        if self.last("--balance-loss-weight") is not None and self.last("--criterion") != (BALANCING,):
            raise ValueError(f"--balance-loss-weight after the --: needs --criterion {BALANCING}, which is not given")

    def _check_own(self) -> None:
        """Raise ValueError if an option that this package declares has a value that it may not have."""
        declared = {
            option.flag: option for kind in (*MODELS, *FEATURES) for option in options_of(kind).values()
            if "text" in option.kinds and option.type is not bool
        }  # fmt: skip
        for name, values in self.options:
            if name in declared:
                declared[name].value(" ".join(values))

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
        longer.options = [
            (name, (str(times * (self._positive(name) or 0)),) if name in LENGTHS else values)
            for name, values in self.options
        ]
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
    """Return the options of features that belong before ``--``, and those of fairseq-train that they replace."""
    found: dict[str, str] = {}
    for kind in FEATURES:
        before = {option.flag for option in options_of(kind).values() if option.side is None and "text" in option.kinds}
        found |= dict.fromkeys(before, "give it before the --") | dict(kind.owned)
    return found


def _refuse_owned(name: str, all_owned: Mapping[str, str]) -> None:
    """Refuse an option that alma-stream decides, also abbreviated as argparse allows."""
    for owned, instead in all_owned.items():
        if name == owned or (len(name) > 4 and owned.startswith(name) and name not in all_owned):
            raise ValueError(f"{name} is not allowed after the --: {instead}")
