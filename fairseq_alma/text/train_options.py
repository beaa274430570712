"""The options of alma-stream after ``--``: checks, and the options that fairseq-eval-lm shares.

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
    "alma-stream sets it": "user-dir task",
    "give it before the --": "wait replay seed",
    "give --run before the --": "save-dir",
    "give it, or --init, before the --": "finetune-from-model",
    "alma-stream resumes from the last checkpoint of the stage": "restore-file continue-once",
    "a stage trains on its mega-batches": "megabatch train-subset",
    "sequences begin with </s>, and the target is the next token": "add-bos-token future-target past-target "
    "self-target",
    "all tokens of a document are used; --tokens-per-sample cuts documents": "shorten-method",
    "a stage starts with a new optimizer unless --carry-optimizer is given before the --": "reset-optimizer "
    "reset-lr-scheduler reset-meters reset-dataloader",
    "the logs are in RUN/stage-NNN": "log-format log-file no-progress-bar",
    "give --save-every before the --": "save-interval save-interval-updates save-interval-minutes no-epoch-checkpoints",
    "give --keep-checkpoints before the --": "keep-interval-updates keep-interval-updates-pattern keep-last-epochs",
    "the last weights of a stage are tested, unless --best-checkpoint is given before the --": "keep-best-checkpoints",
    "the next stage, or a resumed one, needs the checkpoint": "no-save no-last-checkpoints no-save-optimizer-state "
    "write-checkpoints-asynchronously checkpoint-suffix",
    "every sequence is trained on in each epoch": "skip-remainder-batch",
    "a resumed stage needs the order in which it began": "update-ordered-indices-seed",
    "it is the default; --validate before the -- enables validation": "disable-validation",
    "only --max-update or --max-epoch ends a stage": "patience stop-time-hours stop-min-lr",
}
OWNED = {f"--{name}": instead for instead, names in _OWNED.items() for name in names.split()}
"""Options of fairseq-train that alma-stream sets -> what to do instead."""
EVAL_FLAGS = ("--cpu",)
# Not --autocast: tests are in fp32, so that the perplexity does not depend on the batch.
EVAL_VALUES = ("--tokens-per-sample", "--sample-break-mode", "--num-workers")
EVAL_BATCH = {
    "--batch-size": ("--batch-size-valid", "--batch-size"),
    "--max-tokens": ("--max-tokens-valid", "--max-tokens"),
}
"""Option of the evaluation -> options of the training; the first given one sets it."""
BATCHES_PER_UPDATE = "--update-freq"
LENGTHS = ("--max-update", "--total-num-update")
"""Options that count the updates of a complete stage."""


class TrainOptions:
    """Options for fairseq-train, in the order given.

    Args:
        words: the words after ``--``.
        owned: options that the learner sets in addition to `OWNED` -> what to do instead.

    Raises:
        ValueError: an option that alma-stream sets, a missing option, or a number out of range.
    """

    def __init__(self, words: Sequence[str], owned: Mapping[str, str] = {}) -> None:
        self.owned = dict(OWNED)
        for kind in FEATURES:
            own = [
                option.flag for option in options_of(kind).values() if option.side is None and "text" in option.kinds
            ]
            self.owned |= dict.fromkeys(own, "give it before the --") | dict(kind.owned)
        self.owned |= owned
        self.options = group_words(words)
        for name, _ in self.options:
            for each, instead in self.owned.items():
                is_short_for = len(name) > 4 and each.startswith(name) and name not in self.owned  # as argparse allows
                if name == each or is_short_for:
                    raise ValueError(f"{name} is not allowed after the --: {instead}")
        if self.last("--arch") is None:
            raise ValueError("no --arch after the --; choose an architecture, for instance --arch alma_switch_lm_tiny")
        options = [option for kind in (*MODELS, *FEATURES) for option in options_of(kind).values()]
        declared = {each.flag: each for each in options if "text" in each.kinds and each.type is not bool}
        for name, values in self.options:
            if name in declared:
                declared[name].value(" ".join(values))
        self.max_update = self._positive("--max-update")
        self.max_epoch = self._positive("--max-epoch")
        if self.max_update is None and self.max_epoch is None:
            raise ValueError("neither --max-update nor --max-epoch after the --; give one of them to end a stage")
        if self.last("--balance-loss-weight") is not None and self.last("--criterion") != (BALANCING,):
            raise ValueError(f"--balance-loss-weight after the --: needs --criterion {BALANCING}, which is not given")

    def last(self, name: str) -> Optional[tuple[str, ...]]:
        """Return the values of the last occurrence of an option, or None."""
        found = [values for option, values in self.options if option == name]
        return found[-1] if found else None

    def as_dict(self) -> dict[str, str]:
        """Return the options for run.json: the last value of each, empty for a flag."""
        return {name: " ".join(values) for name, values in self.options}

    def for_evaluation(self) -> list[GivenOption]:
        """Return the options for fairseq-eval-lm."""
        chosen: list[GivenOption] = [(name, ()) for name in EVAL_FLAGS if self.last(name) is not None]
        chosen += [(name, values) for name in EVAL_VALUES if (values := self.last(name)) is not None]
        for name, sources in EVAL_BATCH.items():
            given = [values for source in sources if (values := self.last(source)) is not None]
            chosen += [(name, given[0])] if given else []
        return chosen

    def lengthened(self, times: int) -> "TrainOptions":
        """Return the options of a stage with ``times`` as many updates; epochs and warm-up are unchanged."""
        longer = copy(self)
        longer.options = [
            (name, (str(times * (self._positive(name) or 0)),) if name in LENGTHS else values)
            for name, values in self.options
        ]
        longer.max_update = longer._positive("--max-update")
        return longer

    def shared(self, num_procs: int) -> "TrainOptions":
        """Return the options of each process; processes share the batches of an update.

        Raises:
            ValueError: the batches are no multiple of the processes.
        """
        (words,) = self.last(BATCHES_PER_UPDATE) or ("1",)
        counts = [int(word) if word.isdecimal() else 0 for word in words.split(",")]
        if any(count == 0 or count % num_procs for count in counts):
            raise ValueError(
                f"--num-procs {num_procs}: the processes share the batches of an update, and {BATCHES_PER_UPDATE} "
                f"{words} after the -- is no multiple of it; give a multiple, and a smaller --batch-size"
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
            raise ValueError(f"{name} {' '.join(values)} after the --: a positive integer is required")
        return int(values[0])


def replace_option(options: Sequence[GivenOption], name: str, value: str) -> list[GivenOption]:
    """Return options with another value for each occurrence of one of them."""
    return [(each, (value,)) if each == name else (each, values) for each, values in options]
